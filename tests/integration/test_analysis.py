"""A real run's tables against what its trainer measured, and against a copy of itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import runs
from slurm_grpo.analysis import open_run
from slurm_grpo.commands import main as cli


def test_a_runs_tables_say_what_its_trainer_measured(
    tmp_path: Path, tiny_model_dir: Callable[[], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs.launch(runs.write_config(tmp_path, tiny_model_dir()))
    opened = open_run(run.root)
    episodes, steps = opened.episodes(), opened.steps()
    assert not opened.damaged
    assert list(steps["step"]) == [1, 2, 3]
    by_step = episodes.assign(is_cut=episodes["finish_reason"] == "length").groupby("step")
    for measured, table in (
        ("reward/mean", by_step["reward"].mean()),
        ("completion/length_mean", by_step["n_tokens"].mean()),
        ("completion/truncation_rate", by_step["is_cut"].mean()),
        ("staleness/mean", by_step["staleness"].mean()),
        ("episodes/n", by_step.size()),
    ):
        np.testing.assert_allclose(steps[measured], table.astype("f8"), rtol=1e-6)
    zero_spread = opened.groups(["step", "zero_spread"]).groupby("step")["zero_spread"].mean()
    assert list(zero_spread) == list(steps["groups/zero_spread_fraction"])
    n_trained = opened.tokens(episodes["episode_id"]).groupby("policy_version").size()
    assert list(n_trained) == list(steps["trainer/n_trained_tokens"])

    out = tmp_path / "out.parquet"
    assert cli.main(["episodes", "export", str(run.root), str(out), "--tokens"]) == 0
    assert pd.read_parquet(out)["token_id"].map(len).tolist() == episodes["n_tokens"].tolist()

    copy = tmp_path / "copy"
    shutil.copytree(run.root, copy)
    assert cli.main(["episodes", "diff", str(run.root), str(copy)]) == 0
    metrics = copy / "metrics" / "trainer.jsonl"
    loss = repr(float(steps["trainer/loss"][1]))
    assert metrics.read_text().count(loss) == 1
    metrics.write_text(metrics.read_text().replace(loss, "0.125"))
    capsys.readouterr()
    assert cli.main(["episodes", "diff", str(run.root), str(copy)]) == 1
    assert f"losses first differ: step 2: {loss} in A, 0.125 in B" in capsys.readouterr().out
