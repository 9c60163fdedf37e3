"""Real runs that keep little: after retention and after compaction they go on as before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import runs
from slurm_grpo.run.checkpoints import complete_steps
from slurm_grpo.staging.compact import compact_run
from slurm_grpo.staging.ledger import read_ledger
from slurm_grpo.staging.shards import list_shards
from slurm_grpo.staging.verify import audit_run


def test_a_run_keeps_the_last_steps_only_and_resumes_from_what_it_kept(
    tmp_path: Path, tiny_model_dir: Callable[[], Path]
) -> None:
    changes = {
        "run": {"steps": 6},
        "staging": {"keep": "recent", "keep_steps": 2},
        "trainer": {"n_ranks": 2, "checkpoint": {"every_steps": 1, "keep": 1}},
        "evaluation": {"n_prompts": 0},
    }
    run = runs.launch(runs.write_config(tmp_path, tiny_model_dir(), changes))
    assert [name.version for _, name in list_shards(run)] == [4, 5]
    assert len(read_ledger(run).retired) == 4
    audit = audit_run(run)
    assert (audit.findings, audit.n_committed, audit.n_trained) == ([], 6, 24)

    done = compact_run(run)
    assert (done.n_merged, done.n_made, done.n_left) == (2, 1, 0)
    runs.resume(run, "--run.steps", "8")
    assert complete_steps(run) == [8]
    assert [row["step"] for row in runs.step_rows(run)] == [1, 2, 3, 4, 5, 6, 7, 8]
    audit = audit_run(run)
    assert (audit.findings, audit.n_committed, audit.n_trained) == ([], 8, 32)
    assert [name.attempt for _, name in list_shards(run)] == [1, 1]
