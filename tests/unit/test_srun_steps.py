"""The srun commands, and what each task makes of its node; real steps are in tests/slurm."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from runs import ROOT, wait_until
from slurm_commands import stub
from slurm_grpo.config.schema import ClusterConfig, Config, NodesConfig, SiteConfig, TrainerConfig
from slurm_grpo.control.address import address_of, interface_of
from slurm_grpo.errors import ConfigError
from slurm_grpo.jobs.srun_steps import SrunLauncher, srun_command
from slurm_grpo.jobs.task_entry import node_environment
from slurm_grpo.run.directory import RunDir
from slurm_grpo.slurm.allocation import Allocation, Component
from slurm_grpo.slurm.placement import place
from slurm_grpo.supervisor.environment import role_environment
from slurm_grpo.supervisor.steps import Step, StepSpec

TASKS = Path("/runs/r/attempts/0/x.tasks.json")
JOB = Allocation(
    job_id="7",
    reference="7",
    restart_count=0,
    components=(
        Component(job_id="7", hosts=("gen1",), cpus=(6,)),
        Component(job_id="8", hosts=("b", "a"), cpus=(8, 5)),
    ),
)
CONFIG = Config(
    trainer=TrainerConfig(n_ranks=3),
    cluster=ClusterConfig(
        kind="slurm",
        generators=NodesConfig(gpus_per_node=1),
        trainers=NodesConfig(nodes=2, gpus_per_node=2),
    ),
)


def command(peers: list[str], cfg: Config = CONFIG, job: Allocation = JOB) -> tuple[str, ...]:
    seats = place(cfg, job.hosts)
    return srun_command(cfg, job, "name", [seats[peer] for peer in peers], TASKS)


def start_engine(cfg: Config, folder: Path) -> tuple[SrunLauncher, Step]:
    """A step on the job's first host, by the srun that is on PATH."""
    run = RunDir(folder / "r")
    attempt = run.attempt(0)
    attempt.root.mkdir(parents=True)
    launcher = SrunLauncher(cfg, JOB)
    launcher.prepare(attempt)
    spec = StepSpec(
        peer="engine-0",
        argv=("true",),
        env=role_environment(os.environ, cfg, run, attempt=0, peer="engine-0", incarnation=0),
        log=attempt.log("engine-0"),
        exit_file=attempt.exit_code("engine-0"),
    )
    return launcher, launcher.start([spec])["engine-0"]


def test_an_engine_gets_a_step_on_its_host_with_all_flags_said() -> None:
    assert command(["engine-0"]) == (
        "srun",
        "--job-name=name",
        "--nodes=1",
        "--ntasks=1",
        "--nodelist=gen1",
        "--cpus-per-task=6",
        "--overlap",
        "--mem=0",
        "--mpi=none",
        "--export=ALL",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--het-group=0",
        "--gpus-per-node=1",
        sys.executable,
        "-m",
        "slurm_grpo.jobs.task_entry",
        str(TASKS),
    )


def test_ranks_go_where_we_say_though_slurm_would_sort_and_spread_them() -> None:
    words = command(["trainer-0", "trainer-1", "trainer-2"])
    for word in (
        "--nodes=2",
        "--ntasks=3",
        "--nodelist=b,b,a",
        "--distribution=arbitrary",
        "--cpus-per-task=4",  # the smallest share: 8 for two on b, 5 for one on a
        "--het-group=1",
        "--gpus-per-node=2",
    ):
        assert word in words


def test_a_split_allocation_has_no_groups() -> None:
    cfg = replace(CONFIG, cluster=replace(CONFIG.cluster, allocation="split"))
    job = replace(JOB, components=JOB.components[1:])
    assert not [word for word in command(["engine-0"], cfg, job) if "het-group" in word]


def test_a_site_replaces_and_removes_flags() -> None:
    site = SiteConfig(
        srun_flags=("--mpi=pmix", "--mem=4G", "--label"),
        remove_flags=("wait",),
        cpu_bind="cores",
        gpu_flag="gres",
        gpu_type="h100",
    )
    words = command(["engine-0"], replace(CONFIG, site=site))
    for word in (*site.srun_flags, "--cpu-bind=cores", "--gres=gpu:h100:1"):
        assert word in words
    assert not {"--mpi=none", "--mem=0", "--wait=0"} & {*words}


def test_roles_run_in_the_sites_container() -> None:
    pyxis = SiteConfig(container="pyxis", container_image="i.sqsh", container_mounts=("/data:/d",))
    words = command(["engine-0"], replace(CONFIG, site=pyxis))
    assert "--container-image=i.sqsh" in words
    (mounts,) = (word for word in words if word.startswith("--container-mounts="))
    assert mounts.startswith("--container-mounts=/runs/r:/runs/r,")
    assert mounts.endswith(",/data:/d")
    prefix = SiteConfig(container="prefix", container_prefix=("apptainer", "exec", "i.sif"))
    words = command(["engine-0"], replace(CONFIG, site=prefix))
    # The image may set a PYTHONPATH, and the prefix may clean the environment.
    assert words[-9:-4] == ("apptainer", "exec", "i.sif", "env", f"PYTHONPATH={ROOT}")


def test_what_a_role_is_told_does_not_depend_on_what_srun_or_an_image_pass_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no srun: the step fails
    monkeypatch.setenv("PMIX_MCA_gds", "hash")  # a leftover, unless the site says it too
    site = SiteConfig(environment=("PMIX_MCA_gds=hash", "NCCL_DEBUG=INFO"), interface="lo")
    launcher, step = start_engine(replace(CONFIG, site=site), tmp_path)
    (told,) = json.loads((step.log.parent / "engine-0.0.tasks.json").read_text()).values()
    for name in ("PMIX_MCA_gds", "NCCL_DEBUG", "PYTHONPATH", "SLURM_GRPO_PEER"):
        assert told["env"][name] == step.spec.env[name]
    wait_until(lambda: step.poll() is not None, 10, "the end of a step without srun")
    assert step.log.read_text().startswith("cannot start srun")
    launcher.close()


def test_what_others_print_among_the_notices_of_a_step_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notice = 'slurm_grpo-task {"peer": "engine-0", '
    lines = [
        "** Maintenance on Monday **",
        "slurm_grpo-task ** Maintenance **",
        f'{notice}"ex',
        "slurm_grpo-task 7",
        'slurm_grpo-task {"peer": "engine-9", "exit": 1}',
        "srun: error: gen1: task 9: Exited with exit code 9",
        f'{notice}"exit": 3}}srun: lua: welcome',
    ]
    stub(tmp_path, "srun", "\n".join(f"echo '{line}'" for line in lines))
    monkeypatch.setenv("PATH", str(tmp_path))
    launcher, step = start_engine(CONFIG, tmp_path)
    wait_until(lambda: step.poll() is not None, 10, "the end of the step")
    assert step.poll() == 3
    assert not launcher.told_to_end()
    launcher.close()


def task(peer: str, **fields: object) -> dict[str, object]:
    return {"peer": peer, "gpus": [], "interface": "lo", "scratch_dir": None, **fields}


def test_a_rank_sees_its_seats_gpus_of_those_the_step_may_use() -> None:
    env = node_environment(task("trainer-1", gpus=[1, 2]), {"CUDA_VISIBLE_DEVICES": "3,5,7"})
    assert env["CUDA_VISIBLE_DEVICES"] == "5,7"
    assert "CUDA_VISIBLE_DEVICES" not in node_environment(task("trainer-1"), {})
    with pytest.raises(ConfigError, match=r"GPU \[1, 2\] of the node, .* the step has 1 \(3\)"):
        node_environment(task("trainer-1", gpus=[1, 2]), {"CUDA_VISIBLE_DEVICES": "3"})


def test_caches_are_on_the_nodes_own_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_DISK", str(tmp_path))
    env = node_environment(task("trainer-0", scratch_dir="$LOCAL_DISK/s"), {})
    assert env["TMPDIR"] == str(tmp_path / "s")
    assert Path(env["TMPDIR"]).is_dir()
    assert env["TRITON_CACHE_DIR"].startswith(env["TMPDIR"])
    kept = node_environment(task("trainer-0"), {"TRITON_CACHE_DIR": "/mine"})
    assert kept["TRITON_CACHE_DIR"] == "/mine"


def test_a_host_is_reached_at_the_address_of_the_sites_interface() -> None:
    assert node_environment(task("engine-0"), {})["SLURM_GRPO_HOST_ADDRESS"] == "127.0.0.1"
    assert (address_of("lo"), interface_of("127.0.0.1")) == ("127.0.0.1", "lo")
    assert interface_of("203.0.113.1") is None
    with pytest.raises(ConfigError, match=r"site\.interface: nope0 .* one of lo \(127\.0\.0\.1\)"):
        address_of("nope0")
