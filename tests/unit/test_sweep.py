"""Sweeps: what a file expands to, what is refused, what is written, and how results are shown."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from model_shell import make_model_shell
from slurm_grpo.commands.main import main as slurm_grpo
from slurm_grpo.commands.sweep import main
from slurm_grpo.config.loading import read_frozen
from slurm_grpo.config.schema import Config
from slurm_grpo.errors import ConfigError, ExitCode
from slurm_grpo.run.attempt import AttemptRecord
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.metrics import MetricsWriter
from slurm_grpo.sweeps.directory import compress, read_manifest, short_names
from slurm_grpo.sweeps.file import read_sweep

ROOT = Path(__file__).resolve().parents[2]
SPLIT = {"kind": "slurm", "allocation": "split"}
GRID = {"trainer.optimizer.lr": ["1e-5", "3e-5"], "run.seed": [0, 1]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with base.yaml of a split run; no Slurm answers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    make_model_shell(tmp_path / "model")
    write_base(tmp_path, SPLIT)
    return tmp_path


def write_base(folder: Path, cluster: dict[str, Any], **sections: Any) -> None:
    base = {"model": {"path": "model"}, "cluster": cluster, **sections}
    (folder / "base.yaml").write_text(yaml.safe_dump(base))


def write_sweep(folder: Path, **content: Any) -> Path:
    path = folder / "lr.yaml"
    path.write_text(yaml.safe_dump({"base": "base.yaml", **content}, sort_keys=False))
    return path


def changes(folder: Path, **content: Any) -> list[dict[str, str]]:
    return read_sweep(write_sweep(folder, **content)).changes


def test_grid_is_every_combination_and_zip_goes_in_step(tmp_path: Path) -> None:
    assert changes(tmp_path, grid=GRID) == [
        {"trainer.optimizer.lr": lr, "run.seed": seed}
        for lr in ("1e-5", "3e-5")
        for seed in ("0", "1")
    ]
    assert changes(tmp_path, zip=GRID) == [
        {"trainer.optimizer.lr": "1e-5", "run.seed": "0"},
        {"trainer.optimizer.lr": "3e-5", "run.seed": "1"},
    ]


def test_random_draws_stay_in_bounds_and_a_longer_sweep_begins_with_the_shorter(
    tmp_path: Path,
) -> None:
    drawn = {
        "trainer.optimizer.lr": {"loguniform": [1e-6, 1e-3]},
        "algorithm.clip_high": {"uniform": [0.2, 0.4]},
        "algorithm.group_size": {"uniform": [2, 4]},
        "algorithm.order": {"choice": ["strict", "ready"]},
    }
    found = changes(tmp_path, random=drawn, n=60, seed=1)
    assert len(found) == 60
    assert found[:20] == changes(tmp_path, random=drawn, n=20, seed=1)
    assert found != changes(tmp_path, random=drawn, n=60, seed=2)
    rates = [float(element["trainer.optimizer.lr"]) for element in found]
    assert all(1e-6 <= rate <= 1e-3 for rate in rates)
    assert -5.0 < sum(map(math.log10, rates)) / 60 < -4.0  # the middle is 10 ** -4.5
    assert all(0.2 <= float(element["algorithm.clip_high"]) <= 0.4 for element in found)
    assert {element["algorithm.group_size"] for element in found} == {"2", "3", "4"}
    assert {element["algorithm.order"] for element in found} == {"strict", "ready"}


def test_adding_a_key_leaves_the_draws_of_the_others(tmp_path: Path) -> None:
    rate = {"trainer.optimizer.lr": {"loguniform": [1e-6, 1e-3]}}
    more = {**rate, "run.seed": {"uniform": [0, 9]}}
    alone = changes(tmp_path, random=rate, n=5)
    both = changes(tmp_path, random=more, n=5)
    assert [c["trainer.optimizer.lr"] for c in both] == [c["trainer.optimizer.lr"] for c in alone]


def test_elements_of_a_random_sweep_differ_or_it_says_that_there_are_no_more(
    tmp_path: Path,
) -> None:
    seeds = {"run.seed": {"uniform": [0, 3]}}
    found = [element["run.seed"] for element in changes(tmp_path, random=seeds, n=4)]
    assert sorted(found) == ["0", "1", "2", "3"]
    with pytest.raises(ConfigError, match="no more than 4 different elements; n is 5"):
        changes(tmp_path, random=seeds, n=5)


def test_everything_wrong_in_the_file_is_reported_at_once_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(
        "base: base.yaml\n"
        "random:\n"
        "  trainer.optimizer.lr: {loguniform: [0, 1e-3]}\n"
        "  trainer.optimiser.lr: {uniform: [0, 1]}\n"
        "  run.name: {choice: [a]}\n"
        "  algorithm.order: {choice: [strict, redy]}\n"
        "  evaluation.n_prompts: 3\n"
        "m: 3\n"
    )
    with pytest.raises(ConfigError) as error:
        read_sweep(path)
    assert str(error.value).replace(str(path), "s.yaml").splitlines() == [
        "6 problems in the sweep s.yaml:",
        "  s.yaml:3: trainer.optimizer.lr.loguniform: expected 0 < low < high, not 0, 0.001.",
        "  s.yaml:4: random: unknown key trainer.optimiser.lr. Did you mean trainer.optimizer.lr?",
        "  s.yaml:5: random: run.name is chosen by the sweep. Use `name` for its own.",
        "  s.yaml:6: algorithm.order: 'redy' is not one of 'strict', 'ready'.",
        "  s.yaml:7: evaluation.n_prompts: expected one of uniform, loguniform, choice, "
        "as in `{uniform: [0, 1]}`.",
        "  s.yaml:8: unknown key m. Known here: base, name, grid, zip, random, n, seed.",
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, "expected one of grid, zip, random; found none"),
        ({"grid": GRID, "zip": GRID}, "found grid and zip"),
        ({"grid": {}}, "grid: expected `key: value` lines"),
        ({"grid": {"run.seed": 1}}, r"run.seed: expected a list of values"),
        ({"grid": {"run.seed": [1, 1]}}, "element 1 repeats 0, run.seed 1"),
        ({"grid": GRID, "n": 3}, "n: has an effect with `random` only"),
        ({"zip": {"run.seed": [1], "run.steps": [1, 2]}}, "run.seed has 1, run.steps has 2 values"),
        ({"grid": GRID, "name": "a/b"}, "name: 'a/b' cannot be a directory's"),
    ],
)
def test_a_file_that_makes_no_sweep_is_refused(
    content: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=expected):
        changes(tmp_path, **content)


def test_runs_and_manifest_and_script_are_made_and_a_second_call_changes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep(folder, grid=GRID)
    assert main([str(path)]) == ExitCode.OK
    shown = capsys.readouterr().out
    sweep = folder / "runs/lr"
    assert f"sbatch --array=0-3 {sweep}/array.sh" in shown
    elements = read_manifest(sweep)
    assert [Path(e["run_dir"]).name for e in elements] == [f"lr-{i:03}" for i in range(4)]
    assert elements[2]["changes"] == {"trainer.optimizer.lr": "3e-5", "run.seed": "0"}
    cfg = read_frozen(sweep / "lr-002/config.yaml")
    assert (cfg.run.name, cfg.run.runs_dir) == ("lr-002", str(sweep))
    assert (cfg.trainer.optimizer.lr, cfg.run.seed) == (3e-5, 0)
    assert "slurm_grpo.jobs.batch --sweep" in (sweep / "array.sh").read_text()
    assert (sweep / "code/slurm_grpo/sweeps/directory.py").is_file()
    before = {p: p.read_bytes() for p in sweep.glob("*/config.yaml")} | {
        p: p.read_bytes() for p in (sweep / "manifest.json", sweep / "array.sh")
    }
    assert main([str(path)]) == ExitCode.OK
    assert {p: p.read_bytes() for p in before} == before


def test_a_sweep_may_grow_and_old_elements_keep_their_places(folder: Path) -> None:
    main([str(write_sweep(folder, grid={"run.seed": [3, 4]}))])
    assert main([str(write_sweep(folder, grid={"run.seed": [5, 4, 3]}))]) == ExitCode.OK
    elements = read_manifest(folder / "runs/lr")
    assert [e["changes"]["run.seed"] for e in elements] == ["3", "4", "5"]


def test_a_sweep_may_not_change(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(write_sweep(folder, grid={"run.seed": [3, 4]}))])
    manifest = (folder / "runs/lr/manifest.json").read_bytes()
    assert main([str(write_sweep(folder, grid={"run.seed": [4, 5]}))]) == ExitCode.CONFIG
    assert "no longer holds element 0 of" in capsys.readouterr().err
    write_base(folder, SPLIT, run={"steps": 50}, generator={"n_engines": 2})
    assert main([str(write_sweep(folder, grid={"run.seed": [3, 4]}))]) == ExitCode.CONFIG
    report = capsys.readouterr().err
    assert "[all] generator.n_engines: 2 now, but 1 when the sweep was made" in report
    assert "[all] run.steps: 50 now, but 40 when the sweep was made" in report
    assert (folder / "runs/lr/manifest.json").read_bytes() == manifest


def test_a_run_of_that_name_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "runs/lr").mkdir(parents=True)
    (folder / "runs/lr/config.yaml").touch()
    assert main([str(write_sweep(folder, grid=GRID))]) == ExitCode.CONFIG
    assert "is a run, which a sweep cannot be too" in capsys.readouterr().err


def test_one_report_covers_all_elements_and_nothing_is_made(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = {"trainer.optimizer.lr": ["1e-5", "-1"], "run.seed": [0, 1]}
    path = write_sweep(folder, grid=grid)
    assert main([str(path), "--algorithm.group_size", "1"]) == ExitCode.CONFIG
    report = capsys.readouterr().err
    assert "4 of 4 elements of" in report
    assert "  [2-3] --trainer.optimizer.lr: -1.0 given" in report
    assert "  [all] --algorithm.group_size: 1 given" in report
    assert not (folder / "runs").exists()


def test_heterogeneous_sweeps_are_refused_with_the_choice(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_base(folder, {"kind": "slurm"})
    path = write_sweep(folder, grid=GRID)
    assert main([str(path)]) == ExitCode.CONFIG
    report = capsys.readouterr().err
    assert "Slurm refuses job arrays of heterogeneous jobs" in report
    assert "split" in report
    assert "--lanes L" in report
    assert main([str(path), "--lanes", "2"]) == ExitCode.OK
    assert "2 at once, with --submit" in capsys.readouterr().out
    assert not (folder / "runs/lr/array.sh").exists()
    write_base(folder, SPLIT)
    assert main([str(path), "--lanes", "2", "--dry-run"]) == ExitCode.CONFIG


def test_elements_that_ask_for_different_nodes_cannot_share_a_script(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep(folder, grid={"generator.threads": [2, 3]})
    assert main([str(path)]) == ExitCode.CONFIG
    report = capsys.readouterr().err
    assert "elements 0 and 1 ask Slurm for different things" in report
    assert "-#SBATCH --cpus-per-task=4" in report
    assert "+#SBATCH --cpus-per-task=5" in report


def test_submitting_needs_a_slurm_that_answers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep(folder, grid=GRID)
    assert main([str(path), "--submit"]) == ExitCode.INFRASTRUCTURE
    assert "squeue: no such command here" in capsys.readouterr().err


def test_a_local_sweep_runs_one_element_after_the_other_past_a_failure(folder: Path) -> None:
    started: list[str] = []

    def start(run: RunDir, cfg: Config) -> int:
        started.append(f"{run.root.name} seed {cfg.run.seed}")
        run.attempt(0).root.mkdir()
        status, code = ("failed", 3) if cfg.run.seed == 6 else ("done", 0)
        AttemptRecord(run.attempt(0)).renew(peak_pss_bytes=0, status=status)
        return code

    write_base(folder, {"kind": "local"})
    path = str(write_sweep(folder, grid={"run.seed": [5, 6, 7]}))
    assert main([path, "--submit"], start) == 3
    assert started == ["lr-000 seed 5", "lr-001 seed 6", "lr-002 seed 7"]


def test_an_interrupted_local_sweep_does_not_go_on_with_the_next(folder: Path) -> None:
    started = []

    def start(run: RunDir, cfg: Config) -> int:
        started.append(run.root.name)
        return 130

    write_base(folder, {"kind": "local"})
    assert main([str(write_sweep(folder, grid=GRID)), "--submit"], start) == 130
    assert started == ["lr-000"]


def test_only_elements_that_are_not_done_are_offered(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep(folder, grid=GRID)
    main([str(path)])
    finish(folder / "runs/lr/lr-000", "done", reward=0.5)
    finish(folder / "runs/lr/lr-001", "failed", reward=0.1)
    finish(folder / "runs/lr/lr-002", "done", reward=0.7)
    capsys.readouterr()
    assert main([str(path), "--max-running", "4"]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "2 done, 1 failed, 1 unknown" in shown  # it might be queued, and Slurm is not there
    assert "--array=1,3%4" in shown


def finish(root: Path, status: str, *, reward: float) -> None:
    """Leave behind what an ended run does."""
    run = RunDir(root)
    run.attempt(0).root.mkdir()
    metrics = MetricsWriter(run.metrics_file("trainer"), attempt=0)
    metrics.log(0, {"eval/held_out/accuracy": 0.25})
    metrics.log(40, {"trainer/step_s": 61.5, "reward/mean": reward})
    metrics.log(40, {"eval/held_out/accuracy": reward})
    metrics.close()
    AttemptRecord(run.attempt(0)).renew(peak_pss_bytes=0, status=status)


def test_table_sorts_by_what_is_asked_with_unfinished_elements_last(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main([str(write_sweep(folder, grid=GRID))])
    for index, reward in ((0, 0.5), (2, 0.7), (3, 0.6)):
        finish(folder / f"runs/lr/lr-00{index}", "done", reward=reward)
    capsys.readouterr()
    assert slurm_grpo(["sweep", "table", "lr"]) == ExitCode.OK
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:6] == ["#", "lr", "seed", "state", "before", "after"]
    assert [line[0] for line in lines[1:]] == ["2", "3", "0", "1"]
    assert lines[1][:6] == ["2", "3e-5", "0", "done", "0.250", "0.700"]
    assert slurm_grpo(["sweep", "table", "runs/lr", "--csv", "--sort", "lr"]) == ExitCode.OK
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["trainer.optimizer.lr"] for row in rows] == ["3e-5", "3e-5", "1e-5", "1e-5"]
    assert {row["status"] for row in rows} == {"done", "unknown"}
    assert rows[0]["eval.after"] == "0.7"
    assert rows[0]["step_s_median"] == "61.5"
    assert slurm_grpo(["sweep", "table", "lr", "--sort", "eval.aftr"]) == ExitCode.CONFIG
    assert "Did you mean eval.after" in capsys.readouterr().err


def test_status_shows_every_element(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(write_sweep(folder, grid=GRID))])
    finish(folder / "runs/lr/lr-001", "failed", reward=0.1)
    capsys.readouterr()
    assert slurm_grpo(["sweep", "status", "lr"]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:4] == ["1", "1e-5", "1", "failed"]
    assert "3 unknown, 1 failed" in lines[5]
    assert lines[6].startswith("0,2-3: squeue: no such command here.")


def test_the_shipped_example_expands_and_its_base_is_there() -> None:
    sweep = read_sweep(ROOT / "configs/sweep.yaml")
    assert len(sweep.changes) == 4
    assert sweep.base.is_file()


def test_indices_are_written_as_slurm_reads_them() -> None:
    assert compress([5, 0, 1, 2, 3]) == "0-3,5"
    assert compress([7]) == "7"


def test_short_names_tell_keys_apart() -> None:
    keys = ["trainer.optimizer.lr", "generator.threads", "trainer.threads", "run.seed"]
    assert short_names(keys) == {
        "trainer.optimizer.lr": "lr",
        "generator.threads": "generator.threads",
        "trainer.threads": "trainer.threads",
        "run.seed": "seed",
    }
