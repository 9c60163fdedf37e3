"""Rescoring: new columns beside the shards, which stay as they are."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sample_episodes import make_group, make_header, make_run
from slurm_grpo.analysis import open_run
from slurm_grpo.analysis.report import build_report
from slurm_grpo.analysis.report_facts import Facts
from slurm_grpo.analysis.rescore import add_arguments, run
from slurm_grpo.analysis.summary_table import summary_text
from slurm_grpo.config.loading import freeze_config
from slurm_grpo.config.schema import Config
from slurm_grpo.errors import AnalysisError, ConfigError, ScorerLimitExceeded
from slurm_grpo.run.directory import RunDir
from slurm_grpo.staging.shards import publish_groups

JUDGE = """
def judge(text, target):
    if text.endswith("1") and target == 3:
        raise ValueError("no opinion")
    return {"length": len(text), "half": 0.5, "reward": float(target)}
"""


@pytest.fixture
def scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Two shards of two groups of two; `judges.judge` in the current directory fails once."""
    rundir = make_run(tmp_path / "run")
    freeze_config(Config(), rundir.config)
    for sequence in (0, 1):
        groups = [make_group(2 * sequence + i, oldest_version=sequence) for i in (0, 1)]
        publish_groups(rundir, groups, make_header(sequence=sequence))
    (tmp_path / "judges.py").write_text(JUDGE)
    monkeypatch.chdir(tmp_path)
    return rundir


def rescore(rundir: RunDir, *options: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(rundir.root), *options]))


def scores(rundir: RunDir, name: str = "judge") -> pd.DataFrame:
    columns = ["group_id", "reward", f"{name}_reward", f"{name}_part_half", f"{name}_error"]
    return open_run(rundir.root).episodes(columns)


def contents(rundir: RunDir) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in rundir.episodes.glob("*.h5")}


def test_new_rewards_stand_beside_the_old_ones(
    scored: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(scored)
    assert rescore(scored, "--scorer", "judges:judge") == 0
    assert contents(scored) == before
    table = scores(scored)
    assert table["reward"].tolist() == [0.0, 1.0] * 4
    expected = [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, np.nan]
    np.testing.assert_array_equal(table["judge_reward"], expected)
    assert table["judge_part_half"].notna().tolist() == [True] * 7 + [False]
    assert table["judge_error"].dropna().tolist() == ["ValueError: no opinion"]
    said = capsys.readouterr().out
    assert "7 of 8 episodes scored, 1 errors, such as ValueError: no opinion" in said
    assert "mean reward 1.286; the run's own 0.500" in said


def test_columns_can_be_asked_about(scored: RunDir) -> None:
    rescore(scored, "--scorer", "judges:judge", "--name", "mine")
    chosen = open_run(scored.root).episodes(["group_id"], where="mine_reward > reward + 0.5")
    assert chosen["group_id"].tolist() == [1, 2, 2, 3]


def test_a_second_call_scores_only_what_is_new(
    scored: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    rescore(scored, "--scorer", "judges:judge")
    assert "2 of 2 shards were scored now" in capsys.readouterr().out
    kept = sorted((scored.rescored / "judge").glob("*.h5"))
    times = [path.stat().st_mtime_ns for path in kept]
    publish_groups(scored, [make_group(9)], make_header(sequence=2))
    assert scores(scored)["judge_reward"].tolist()[-2:] != [9.0, 9.0]
    rescore(scored, "--scorer", "judges:judge")
    assert "1 of 3 shards were scored now" in capsys.readouterr().out
    assert [path.stat().st_mtime_ns for path in kept] == times
    assert scores(scored)["judge_reward"].tolist()[-2:] == [9.0, 9.0]


def test_scores_that_do_not_fit_their_shard_are_left_out_and_made_again(scored: RunDir) -> None:
    rescore(scored, "--scorer", "judges:judge")
    first, second = sorted((scored.rescored / "judge").glob("*.h5"))
    first.write_bytes(second.read_bytes())  # of another shard
    second.write_bytes(second.read_bytes()[:-100])
    table = scores(scored)
    assert table["judge_reward"].isna().all()
    assert table["reward"].tolist() == [0.0, 1.0] * 4  # the run's own are not concerned
    rescore(scored, "--scorer", "judges:judge")
    assert scores(scored)["judge_reward"].notna().sum() == 7


def test_a_damaged_shard_is_not_scored(scored: RunDir) -> None:
    victim = sorted(scored.episodes.glob("*.h5"))[0]
    image = bytearray(victim.read_bytes())
    image[len(image) // 2] ^= 1
    victim.write_bytes(image)
    rescore(scored, "--scorer", "judges:judge")
    assert not (scored.rescored / "judge" / victim.name).exists()


def test_another_scorer_or_changed_code_needs_another_name(scored: RunDir, tmp_path: Path) -> None:
    rescore(scored, "--scorer", "judges:judge")
    with pytest.raises(ConfigError, match=r"--name: judge holds the scores of judges:judge"):
        rescore(scored, "--scorer", "exact", "--name", "judge")
    (tmp_path / "judges.py").write_text(JUDGE + "\n# better\n")
    with pytest.raises(ConfigError, match=r"other code.*Choose another --name"):
        rescore(scored, "--scorer", "judges:judge")


def test_wrong_scorers_and_names_are_refused_before_anything_is_made(scored: RunDir) -> None:
    for options in (
        ["--scorer", "judges:missing"],
        ["--scorer", "nowhere:judge"],
        ["--scorer", "regex"],
        ["--scorer", "best"],
        ["--scorer", "exact", "--name", "not a name"],
        ["--scorer", "exact", "--name", "part_exact"],
    ):
        with pytest.raises(ConfigError):
            rescore(scored, *options)
    assert not scored.rescored.exists()


def test_too_many_errors_end_the_command(scored: RunDir) -> None:
    with pytest.raises(ScorerLimitExceeded, match="no opinion"):
        rescore(scored, "--scorer", "judges:judge", "--max-errors", "0")
    assert len(list((scored.rescored / "judge").glob("*.h5"))) == 1  # the shard before


def test_summary_and_report_show_either_rewards(scored: RunDir) -> None:
    rescore(scored, "--scorer", "judges:judge")
    data = open_run(scored.root)
    own = summary_text(data, max_rows=9, max_width=120)
    new = summary_text(data, max_rows=9, max_width=120, score="judge")
    assert ("half" in own, "half" in new) == (False, True)
    assert Facts(data, "judge").episodes["reward"].mean() == pytest.approx(9 / 7)
    assert "rewards of the rescoring judge" in build_report(Facts(data, "judge"))
    with pytest.raises(AnalysisError, match=r"no rescoring 'other'. There are: judge"):
        Facts(data, "other")
