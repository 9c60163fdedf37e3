"""The README's commands run, and what it names exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from model_shell import make_model_shell
from slurm_grpo.commands.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_files_that_the_readme_names_exist() -> None:
    scripts = re.findall(r"\b(?:launch|tests|configs)/[\w./-]+\.(?:py|sh|yaml)\b", TEXT)
    order = TEXT.split("## Reading order")[1].split("##")[0]
    modules = [f"slurm_grpo/{name}" for name in re.findall(r"`([\w/]+(?:\.py|/))`", order)]
    assert len(scripts) > 4
    assert len(modules) > 8
    assert [name for name in scripts + modules if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("config", ["quickstart", "slurm"])
def test_the_dry_runs_of_the_readme_run(config: str, tmp_path: Path) -> None:
    pattern = rf"^\.venv/bin/python (launch/submit\.py configs/{config}\.yaml .*--dry-run)$"
    (line,) = re.findall(pattern, TEXT, re.M)
    command = [
        sys.executable,
        *shlex.split(line),
        "--model.path",
        str(make_model_shell(tmp_path / "model")),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert ("#SBATCH hetjob" if config == "slurm" else "trainer-0") in done.stdout


def test_the_commands_that_the_readme_names_exist() -> None:
    named = set(re.findall(r"slurm-grpo ((?:episodes |sweep )?[a-z]+)", TEXT))
    assert named - {"episodes", "sweep"} <= set(COMMANDS)
    assert set(COMMANDS) <= named


def test_the_example_of_own_prompts_is_accepted(tmp_path: Path) -> None:
    (rows,) = re.findall(r"^```json\n(.*?)```$", TEXT, re.M | re.S)
    (task,) = re.findall(r"^```yaml\n(task:.*?)```$", TEXT, re.M | re.S)
    for name in ("train.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text(rows)
    (tmp_path / "mine.yaml").write_text(task)
    model = str(make_model_shell(tmp_path / "model"))
    command = [sys.executable, "launch/submit.py", str(tmp_path / "mine.yaml"), "--dry-run"]
    done = subprocess.run(
        [*command, "--model.path", model], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_the_readme_holds_no_placeholder() -> None:
    assert not re.search(r"^[A-Z_]{6,}$", TEXT, re.M)
