"""`slurm-grpo replay RUN`: train again on what a run trained on, without generators.

For debugging and offline studies: another loss, learning rate or model on the same groups in the
same steps. The result is a run directory of its own, made by the ordinary supervisor and trainer
role (`trainer/replay.py`) with zero engines. What concerns generation stays as it was in RUN, since
it is part of the data. Imports no torch; the trainer's process does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime
from operator import attrgetter
from pathlib import Path

from slurm_grpo.analysis.terminal import add_run, say
from slurm_grpo.checks.load import check_config
from slurm_grpo.commands.submit import require_packages
from slurm_grpo.config import loading as config_io
from slurm_grpo.config.schema import Config
from slurm_grpo.config.values import option_types
from slurm_grpo.errors import ConfigError, ShardError
from slurm_grpo.fsio import storage_errors
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.metrics import read_run_metrics

_IGNORED = (
    "run.seed",
    "run.replay_of",
    "task.",
    "evaluation.",
    "generator.",
    "weight_sync.",
    "staging.",
    "site.",
    "algorithm.max_staleness",
    "algorithm.order",
    "algorithm.drop_zero_spread",
    "algorithm.oversample",
    "algorithm.max_dropped_per_step",
    "cluster.kind",
    "cluster.allocation",
    "cluster.generators.",
    "cluster.trainers.",
    "cluster.shared.",
    "cluster.time_limit",
    "cluster.signal_s",
    "cluster.max_requeues",
)
"""Keys, or sections, that say how episodes were made and picked, or where: they cannot matter."""
_FIXED = ("algorithm.groups_per_step", "algorithm.group_size")
"""Keys that the recorded steps decide."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN, the changes to its configuration as a file, and as options."""
    parser.usage = "slurm-grpo replay RUN [--config NEW.yaml] [--section.option VALUE ...]"
    parser.epilog = (
        "Without changes, a strict run repeats its losses exactly on CPUs. The replay is a run "
        "directory beside RUN; --run.name and --run.runs_dir put it elsewhere."
    )
    add_run(parser)
    parser.add_argument(
        "--config", metavar="NEW.yaml", type=Path, help="changes to RUN's own configuration"
    )
    parser.set_defaults(overrides=[])


def run(arguments: argparse.Namespace) -> int:
    """Check everything, then supervise the replay; its exit code."""
    source = RunDir(arguments.run.absolute())
    cfg, ignored = replay_config(source, arguments.config, arguments.overrides)
    n_steps = check_recorded(source, cfg)
    require_packages(cfg, "torch", "torchtitan")
    target = RunDir(Path(cfg.run.runs_dir) / cfg.run.name)
    if target.root.exists():
        raise ConfigError(f"run.name: {target.root} exists. Choose another --run.name.")
    with storage_errors("make the run directory", target.root):
        target.create()
    config_io.freeze_config(cfg, target.config, replace=False)
    for key in ignored:
        say(f"ignored, the episodes are as they are: {key}")
    say(f"replaying {n_steps} steps of {source.root} in {target.root}")

    from slurm_grpo.supervisor.supervisor import (
        supervise,  # errors above need not wait for its imports
    )

    code = supervise(target, cfg).exit_code
    say(compare_losses(source, target))
    return code


def replay_config(
    source: RunDir, new: Path | None, overrides: Sequence[str]
) -> tuple[Config, list[str]]:
    """The replay's configuration, and the keys among the changes that cannot matter.

    Raises ConfigError for changes that contradict the recorded steps, and for what cannot run.
    """
    own = config_io.read_frozen(source.config)
    wanted = config_io.read_config(new or source.config, overrides, base=own)
    changed = [k for k in option_types(Config) if attrgetter(k)(wanted) != attrgetter(k)(own)]
    if wrong := [key for key in changed if key in _FIXED]:
        key = wrong[0]
        raise ConfigError(
            f"{key}: {attrgetter(key)(wanted)} given, but {source.root} recorded its steps with "
            f"{attrgetter(key)(own)}, and a replay takes the same steps. Leave it out."
        )
    ignored = [key for key in changed if key.startswith(_IGNORED)]
    values = {
        "run.name": f"{source.root.name}-replay-{datetime.now():%Y%m%d-%H%M%S}",
        "run.runs_dir": str(source.root.parent),
        **{key: attrgetter(key)(wanted) for key in changed if key not in ignored},
        "run.replay_of": str(source.root),
        "generator.n_engines": 0,
        "evaluation.n_prompts": 0,
        "cluster.kind": "local",
    }
    cfg = config_io.with_values(own, values)
    if problems := check_config(cfg):
        raise ConfigError("\n  ".join(["the replay cannot run:", *problems]))
    return cfg, ignored


def check_recorded(source: RunDir, cfg: Config) -> int:
    """How many steps will be replayed. Raises ShardError when shards of them are gone."""
    from slurm_grpo.staging.ledger import read_ledger
    from slurm_grpo.staging.manifest import committed_manifests  # h5py

    manifests = committed_manifests(source)[: cfg.run.steps]
    if not manifests:
        raise ConfigError(f"{source.root} has taken no step yet: there is nothing to replay.")
    ledger = read_ledger(source)
    paths = {ledger.resolve(p): m.step for m in reversed(manifests) for _, p in m.groups}
    missing = sorted((s, path) for path, s in paths.items() if not (source.root / path).is_file())
    if missing:
        step, path = missing[0]
        until = f"Replay the steps before with --run.steps {step - 1}" if step > 1 else "Restore it"
        why = "retired, as staging.keep says" if path in ledger.retired else "and nothing says why"
        raise ShardError(
            f"{source.root}: {len(missing)} of {len(paths)} shards are gone, first {path} of step "
            f"{step}, {why}. {until}."
        )
    return len(manifests)


def compare_losses(source: RunDir, replayed: RunDir) -> str:
    """One line: in how many steps both have the same loss, and where they part."""
    theirs, ours = _losses(source), _losses(replayed)
    common = sorted(theirs.keys() & ours.keys())
    if not common:
        return "no step was replayed: there is no loss to compare"
    parting = next((step for step in common if theirs[step] != ours[step]), None)
    if parting is None:
        return f"losses equal the recorded ones, bit for bit, in all {len(common)} steps"
    return (
        f"losses equal the recorded ones before step {parting}: "
        f"there {theirs[parting]} recorded, {ours[parting]} replayed"
    )


def _losses(run: RunDir) -> dict[int, float | None]:
    rows = read_run_metrics(run, "trainer")
    return {row["step"]: row["trainer/loss"] for row in rows if "trainer/loss" in row}
