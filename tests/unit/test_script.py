"""Batch scripts: whole texts for what is shipped, and what each component repeats."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from model_shell import make_model_shell
from slurm_grpo.checks.load import load_config
from slurm_grpo.config.schema import Config
from slurm_grpo.jobs import srun_steps
from slurm_grpo.jobs.srun_steps import srun_command
from slurm_grpo.slurm.allocation import Allocation, Component
from slurm_grpo.slurm.placement import place
from slurm_grpo.slurm.script import (
    array_script,
    cpus_per_node,
    job_script,
    node_groups,
    submitit_command,
)

ROOT = Path(__file__).resolve().parents[2]
GPUS = [
    *("--cluster.generators.partition", "gen", "--cluster.generators.gpus_per_node", "4"),
    *("--cluster.generators.account", "grpo", "--cluster.generators.mem_gib", "128"),
    *("--cluster.trainers.partition", "train", "--cluster.trainers.gpus_per_node", "2"),
    *("--cluster.trainers.mem_gib", "64", "--cluster.trainers.constraint", "nvlink"),
    *("--generator.n_engines", "2", "--generator.engine.tensor_parallel", "2"),
]
IN_CONTAINER = ["--cluster.python", "python3"]
SPLIT = [
    *("--cluster.allocation", "split", "--cluster.shared.partition", "gpu"),
    *("--cluster.shared.gpus_per_node", "8", "--cluster.shared.exclusive"),
    *("--generator.n_engines", "6", "--trainer.n_ranks", "2"),
]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """Loads the example for clusters."""
    model = make_model_shell(tmp_path / "model")
    monkeypatch.setattr(sys, "executable", "/envs/base/bin/python")
    monkeypatch.setattr(srun_steps, "PACKAGE_ROOT", Path("/shared/runs/r/jobs/0/code"))

    def load(*options: str, site: str = "plain") -> Config:
        fixed = ["--model.path", str(model), "--run.runs_dir", "/shared/runs", "--run.name", "r"]
        return load_config(
            ROOT / "configs/slurm.yaml",
            [*fixed, *options],
            site=ROOT / f"configs/sites/{site}.yaml",
        )

    return load


def text_of(cfg: Config) -> str:
    job_dir = Path(cfg.run.runs_dir) / cfg.run.name / "jobs/0"
    command = submitit_command(job_dir)
    return job_script(cfg, job_dir=job_dir, command=command)


def steps_of(cfg: Config) -> str:
    """The sruns of the supervisor for one engine and for the ranks, on hosts x0, x1, ..."""
    hosts = [tuple(f"x{k}" for k in range(g.nodes)) for g in node_groups(cfg).values()]
    components = tuple(
        Component(job_id=str(7 + k), hosts=h, cpus=(n,) * len(h))
        for k, (h, n) in enumerate(zip(hosts, cpus_per_node(cfg), strict=True))
    )
    allocation = Allocation(job_id="7", reference="7", restart_count=0, components=components)
    seats = place(cfg, hosts)
    ranks = [seat for peer, seat in seats.items() if peer.startswith("trainer-")]
    attempt = Path(cfg.run.runs_dir) / cfg.run.name / "attempts/0"
    return "".join(
        shlex.join(srun_command(cfg, allocation, name, of, attempt / f"{name}.tasks.json")) + "\n"
        for name, of in (("engine-0", [seats["engine-0"]]), ("trainers", ranks))
    )


@pytest.mark.parametrize(
    ("name", "site", "options"),
    [
        ("minimal_site", "plain", []),
        ("het", "plain", GPUS),
        ("split", "plain", SPLIT),
        ("pyxis", "pyxis", [*GPUS, *IN_CONTAINER]),
        ("apptainer", "apptainer", [*GPUS, *IN_CONTAINER]),
    ],
)
def test_the_whole_script_of_a_job_and_its_steps(
    name: str,
    site: str,
    options: list[str],
    load: Callable[..., Config],
    check_golden: Callable[[str, str], None],
) -> None:
    cfg = load(*options, site=site)
    check_golden(
        f"scripts/{name}.sh", f"{text_of(cfg)}\n# Then, by the supervisor:\n{steps_of(cfg)}"
    )


def test_the_whole_script_of_an_array(
    load: Callable[..., Config], check_golden: Callable[[str, str], None]
) -> None:
    sweep = Path("/shared/sweeps/lr")
    text = array_script(load(*SPLIT), sweep_dir=sweep, n_elements=8, max_running=4)
    check_golden("scripts/array.sh", text)


@pytest.mark.parametrize("config", ["slurm.yaml", "quickstart.yaml", "jsonl.yaml"])
@pytest.mark.parametrize("site", ["plain", "pyxis", "apptainer"])
def test_every_shipped_configuration_renders_on_every_shipped_site(
    config: str, site: str, tmp_path: Path
) -> None:
    model = make_model_shell(tmp_path / "model")
    options = ["--model.path", str(model), "--cluster.kind", "slurm", *IN_CONTAINER]
    assert "\n#SBATCH --nodes=1\n" in text_of(
        load_config(ROOT / "configs" / config, options, site=ROOT / f"configs/sites/{site}.yaml")
    )


def test_cpus_are_those_of_the_fullest_node(load: Callable[..., Config]) -> None:
    cfg = load(
        *("--generator.n_engines", "3", "--cluster.generators.nodes", "2"),
        *("--generator.threads", "5", "--trainer.threads", "3"),
    )
    assert cpus_per_node(cfg) == [2 * 5, 2 * 3]


def test_flags_are_removed_then_replaced_by_the_site_then_by_the_group(
    load: Callable[..., Config],
) -> None:
    cfg = load("--site.remove_flags", "requeue", "nodes", "--cluster.trainers.qos", "high")
    site = replace(cfg.site, flags=("--qos=low", "--nodes=3", "--overcommit"))
    trainers = replace(cfg.cluster.trainers, flags=("--qos=special",))
    text = text_of(replace(cfg, site=site, cluster=replace(cfg.cluster, trainers=trainers)))
    first, second = text.split("#SBATCH hetjob")
    assert "requeue" not in text
    for part, qos in ((first, "low"), (second, "special")):
        lines = part.splitlines()
        assert lines.count("#SBATCH --nodes=3") == lines.count("#SBATCH --overcommit") == 1
        assert [line for line in lines if "--qos" in line] == [f"#SBATCH --qos={qos}"]


def test_paths_with_spaces_and_quotes_are_quoted(load: Callable[..., Config]) -> None:
    text = text_of(load("--run.runs_dir", "/shared/our runs/it's"))
    assert """#SBATCH --chdir='/shared/our runs/it'"'"'s/r/jobs/0'\n""" in text
    assert """-m submitit.core._submit '/shared/our runs/it'"'"'s/r/jobs/0'\n""" in text
