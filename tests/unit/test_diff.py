"""Whether two runs are the same, and where they first differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sample_episodes import begin_attempt, make_group, make_header, make_run, train_step
from slurm_grpo.commands import main as cli
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.metrics import MetricsWriter
from slurm_grpo.staging.shards import publish_groups
from slurm_grpo.types import Episode, Group

Change = Callable[[Episode], Episode]


def write_run(
    root: Path,
    *,
    change: Change | None = None,
    loss: float = 0.25,
    group_ids: tuple[int, int] = (0, 1),
) -> RunDir:
    """A run of two steps, one group each; `change` is done to the second episode of step 2."""
    run = make_run(root)
    begin_attempt(run, 0, 0)
    groups: list[Group] = [make_group(i, oldest_version=v) for v, i in enumerate(group_ids)]
    if change is not None:
        groups[1][1] = change(groups[1][1])
    for version, group in enumerate(groups):
        train_step(run, version + 1, publish_groups(run, [group], make_header(sequence=version)))
    writer = MetricsWriter(run.metrics_file("trainer"), attempt=0)
    writer.log(1, {"trainer/loss": 0.5})
    writer.log(2, {"trainer/loss": loss})
    writer.close()
    return run


def diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = cli.main(["episodes", "diff", str(tmp_path / "a"), str(tmp_path / "b")])
    return code, " ".join(capsys.readouterr().out.split())


def test_a_repeated_run_is_the_same_whatever_its_times_and_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a")
    b = write_run(
        tmp_path / "b", change=lambda e: replace(e, completion=replace(e.completion, t_finish=9.0))
    )
    begin_attempt(b, 1, 2)
    code, text = diff(tmp_path, capsys)
    assert code == 0
    assert text.endswith("The runs are the same.")


def _token(e: Episode) -> Episode:
    ids = e.completion.token_ids.copy()
    ids[2] = 7
    return replace(e, completion=replace(e.completion, token_ids=ids))


def _logprob(e: Episode) -> Episode:
    logprobs = e.completion.logprobs.copy()
    logprobs[0] = np.nextafter(logprobs[0], np.float32(0))
    return replace(e, completion=replace(e.completion, logprobs=logprobs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_token, "tokens first differ: step 2, episode 1000001, token 2:"),
        (_logprob, "log-probs first differ: step 2, episode 1000001, token 0:"),
        (
            lambda e: replace(e, reward=0.5),
            "rewards first differ: step 2, episode 1000001: 1.0 in A, 0.5 in B",
        ),
        (lambda e: replace(e, advantage=0.5), "advantages first differ: step 2"),
    ],
)
def test_the_first_difference_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Change, message: str
) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", change=change)
    code, text = diff(tmp_path, capsys)
    assert code == 1
    assert message in text
    assert text.count("first differ") == 1
    assert text.endswith("The runs differ.")


def test_losses_and_missing_episodes_differ_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", loss=0.75, group_ids=(0, 2))
    code, text = diff(tmp_path, capsys)
    assert code == 1
    assert "steps' groups first differ: step 2: groups [1] in A, [2] in B" in text
    assert "episode 1000000 is in A only (2 such); episode 2000000 is in B only (2 such)" in text
    assert "losses first differ: step 2: 0.25 in A, 0.75 in B" in text


def test_a_run_without_episodes_differs_from_one_that_has_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "a")
    write_run(tmp_path / "b")
    code, text = diff(tmp_path, capsys)
    assert code == 1
    assert "episode 0 is in B only (4 such)" in text


def test_a_damaged_run_is_not_called_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        run = write_run(tmp_path / name)
        next(iter(run.episodes.glob("v000001*"))).write_bytes(b"")
    assert diff(tmp_path, capsys)[0] == 1
