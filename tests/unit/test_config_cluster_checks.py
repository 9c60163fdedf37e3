"""Rules of the sections `cluster` and `site`, and requests no partition can ever give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from model_shell import make_model_shell
from slurm_commands import stub
from slurm_grpo.checks.cluster import check_cluster
from slurm_grpo.checks.load import load_config
from slurm_grpo.config.schema import (
    ClusterConfig,
    Config,
    EngineConfig,
    GeneratorConfig,
    NodesConfig,
    SiteConfig,
)
from slurm_grpo.errors import ConfigError
from slurm_grpo.slurm.partitions import (
    NodeKind,
    Partition,
    impossible_requests,
    limit_seconds,
    read_partitions,
)


def slurm(**cluster: object) -> Config:
    return Config(cluster=ClusterConfig(kind="slurm", **cluster))  # type: ignore[arg-type]


def test_all_problems_of_cluster_and_site_are_one_report_with_files_and_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check_golden: Callable[[str, str], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_model_shell(tmp_path / "model")
    Path("c.yaml").write_text("""\
model: {path: model}
run: {runs_dir: /shared/50%}
generator: {n_engines: 6, engine: {tensor_parallel: 2}}
trainer: {n_ranks: 4}
cluster:
  kind: slurm
  generators: {nodes: 2, gpus_per_node: 5, flags: [qos=high]}
  trainers: {nodes: 0, mem_gib: 0}
  shared:
    partition: gpu
  time_limit: 4 hours
  max_requeues: -1
""")
    Path("site.yaml").write_text("""\
gpu_flags: gres
remove_flags: [--mem]
srun_flags: [mpi=none]
container: pyxis
container_prefix: [apptainer, exec]
environment: [NCCL_DEBUG]
""")
    with pytest.raises(ConfigError) as caught:
        load_config(Path("c.yaml"), site=Path("site.yaml"))
    check_golden("errors/config_cluster.txt", f"{caught.value}\n")


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        (slurm(time_limit="2", signal_s=90), "cluster.signal_s: 90 seconds before the end of 2"),
        (
            replace(
                slurm(
                    generators=NodesConfig(gpus_per_node=3), trainers=NodesConfig(gpus_per_node=1)
                ),
                generator=GeneratorConfig(n_engines=2, engine=EngineConfig(tensor_parallel=2)),
            ),
            "generator.n_engines: 2 engines x tensor_parallel 2 = 4 GPUs",
        ),
        (
            slurm(trainers=NodesConfig(nodes=3)),
            "cluster.trainers.nodes: 3, of which 2 would have no process. Lower it to 1",
        ),
        (slurm(signal_s=0), "cluster.signal_s: 0 seconds"),
        (slurm(time_limit="0"), "cluster.time_limit: '0' given"),
        (
            slurm(generators=NodesConfig(gpus_per_node=4), trainers=NodesConfig(cpus_per_node=1)),
            "cluster.trainers.cpus_per_node: 1, but the processes on one node have 2 threads",
        ),
        (
            slurm(allocation="split", generators=NodesConfig(nodes=2)),
            "cluster.generators: has no effect with cluster.allocation = split, which reads "
            "cluster.shared",
        ),
        (
            replace(slurm(), site=SiteConfig(container="prefix", container_prefix=("x",))),
            "cluster.python: missing; with site.container = prefix",
        ),
    ],
)
def test_what_cannot_work_is_refused(cfg: Config, expected: str) -> None:
    [(keys, text)] = check_cluster(cfg)
    assert f"{keys[0]}: {text}".startswith(expected)


def test_a_cluster_section_does_not_hinder_a_local_run() -> None:
    cluster = ClusterConfig(generators=NodesConfig(nodes=0), time_limit="soon")
    assert list(check_cluster(Config(cluster=cluster))) == []


def kinds(*hosts: str, cpus: int = 8, mem_mib: int = 16000, gpus: int = 2) -> NodeKind:
    return NodeKind(
        hosts=frozenset(hosts),
        cpus=cpus,
        mem_mib=mem_mib,
        gpus=gpus,
        features=frozenset(["nvlink", "hdr"]),
    )


PARTITIONS = {
    "gen": Partition(is_default=True, limit_s=3600, kinds=[kinds("g1", "g2", "g3")]),
    "train": Partition(
        is_default=False, limit_s=None, kinds=[kinds("t1", "t2", gpus=0), kinds("t3", "t4", gpus=4)]
    ),
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"partition": "gen,train", "nodes": 2}, None),
        ({"partition": "gpu"}, "cluster.trainers.partition: gpu; expected one of gen, train"),
        (
            {"nodes": 3},
            "3 and cluster.generators.nodes: 1 are 4 nodes, but their partitions have 3",
        ),
        ({"nodes": 4}, "cluster.trainers.nodes: 4 node(s) with 2 CPUs, 0 GPUs each"),
        ({"partition": "train", "gpus_per_node": 4, "nodes": 2}, None),
        ({"partition": "train", "gpus_per_node": 4, "nodes": 3}, "partition train has 2 such"),
        ({"partition": "train", "gpus_per_node": 5}, "partition train has 0 such node(s): 2 x (8"),
        ({"mem_gib": 16}, "2 CPUs, 0 GPUs, 16 GiB each, but partition gen has 0"),
        ({"cpus_per_node": 9}, "1 node(s) with 9 CPUs"),
        ({"constraint": "nvlink"}, None),
        ({"constraint": "nvlink&hdr"}, None),
        ({"constraint": "a100"}, "partition gen has 0 such"),
        ({"constraint": "a100", "flags": ("--constraint=hdr",)}, None),
    ],
)
def test_a_request_that_would_wait_for_ever_is_named(
    changes: dict[str, object], expected: str | None
) -> None:
    nodes = NodesConfig(**changes)  # type: ignore[arg-type]
    cfg = slurm(time_limit="60", trainers=nodes)
    found = [f"{keys[0]}: {text}" for keys, text in impossible_requests(cfg, PARTITIONS)]
    assert len(found) == (expected is not None)
    assert expected is None or expected in found[0]


def test_partitions_are_read_from_sinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "gpu*|1-00:00:00|n[01-02],n7|64|512000|gpu:a100:4(S:0-1),nvme:1|nvlink,hdr",
        "gpu*|1-00:00:00|n9|64|512000+|gpu:h100:2,gpu:a100:1(S:0)|(null)",
        "** Maintenance on Monday | all queues | from 6:00 | to | 7:00 | thank | you **",
        "cpu|infinite|c[1-3]|128|256000|(null)|(null)",
    ]
    stub(tmp_path, "sinfo", "\n".join(f"echo '{x}'" for x in lines))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = read_partitions.__wrapped__()
    assert [(name, p.is_default, p.limit_s) for name, p in found.items()] == [
        ("gpu", True, 86400),
        ("cpu", False, None),
    ]
    first, second = found["gpu"].kinds
    assert first.hosts == {"n01", "n02", "n7"}
    assert (first.gpus, first.cpus, first.mem_mib) == (4, 64, 512000)
    assert first.features == {"nvlink", "hdr"}
    assert second.gpus == 3
    assert found["cpu"].kinds[0].gpus == 0


def test_a_time_limit_beyond_the_partitions_is_named() -> None:
    cfg = slurm(time_limit="1:00:01", trainers=NodesConfig(partition="train"))
    [(keys, text)] = impossible_requests(cfg, PARTITIONS)
    assert keys[0] == "cluster.time_limit"
    assert "1:00:01 is more than the 60 minutes that partition gen allows" in text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("4:00:00", 14400),
        ("2-0", 172800),
        ("1-12:30", 131400),
        ("1-00:00:01", 86401),
        ("UNLIMITED", None),
        ("4h", None),
        ("1:2:3:4", None),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, seconds: int | None) -> None:
    assert limit_seconds(text) == seconds
