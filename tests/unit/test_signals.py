"""Whether the signal before the time limit comes early enough."""

from __future__ import annotations

from slurm_grpo.config.schema import ClusterConfig, Config
from slurm_grpo.supervisor.signals import BoundaryWatch


def watch(kind: str = "slurm") -> BoundaryWatch:
    assert kind in ("slurm", "local")
    cluster = ClusterConfig(kind="slurm" if kind == "slurm" else "local", signal_s=60)
    return BoundaryWatch(Config(cluster=cluster))


def test_a_step_and_a_checkpoint_are_measured_against_the_signal() -> None:
    measured = watch()
    assert measured.look({"phase": "training", "trainer/step_s": 30.0}, 0.0) is None
    assert measured.look({"phase": "saving a checkpoint"}, 100.0) is None
    assert measured.look({"phase": "saving a checkpoint"}, 110.0) is None
    # The next report came with the next step, of 30 s.
    warning = measured.look({"phase": "training", "trainer/step_s": 30.0}, 165.0)
    assert warning is not None
    assert "a step has taken 30 s and a checkpoint 35 s" in warning
    assert "at least 130" in warning
    assert measured.longest_s == 65.0
    assert measured.look({"phase": "training", "trainer/step_s": 300.0}, 400.0) is None  # once


def test_without_slurm_nothing_is_too_late() -> None:
    assert watch("local").look({"phase": "training", "trainer/step_s": 3000.0}, 0.0) is None
