"""Who sits where: hosts, GPUs and local ranks for het and split allocations."""

from __future__ import annotations

import pytest

from slurm_grpo.config.schema import (
    ClusterConfig,
    Config,
    EngineConfig,
    GeneratorConfig,
    NodesConfig,
    TrainerConfig,
)
from slurm_grpo.errors import ConfigError
from slurm_grpo.slurm.placement import Seat, place


def config(
    engines: int, ranks: int, *, width: int = 1, gpus: tuple[int, int] = (0, 0), split: bool = False
) -> Config:
    cluster = ClusterConfig(
        kind="slurm",
        allocation="split" if split else "het",
        generators=NodesConfig(gpus_per_node=gpus[0]),
        trainers=NodesConfig(gpus_per_node=gpus[1]),
        shared=NodesConfig(gpus_per_node=gpus[0]),
    )
    return Config(
        generator=GeneratorConfig(n_engines=engines, engine=EngineConfig(tensor_parallel=width)),
        trainer=TrainerConfig(n_ranks=ranks),
        cluster=cluster,
    )


def test_ranks_follow_our_host_order_even_where_slurm_would_sort_them() -> None:
    seats = place(config(1, 4, gpus=(1, 2)), [["zeta"], ["train9", "alpha"]])
    assert [seats[f"trainer-{r}"].host for r in range(4)] == ["train9", "train9", "alpha", "alpha"]
    assert [seats[f"trainer-{r}"].local_rank for r in range(4)] == [0, 1, 0, 1]
    assert seats["trainer-3"].gpus == (0, 1)  # NCCL needs every GPU of the node
    assert {seat.component for name, seat in seats.items() if name.startswith("trainer")} == {1}


def test_an_engine_never_straddles_two_nodes() -> None:
    seats = place(config(2, 1, width=2, gpus=(3, 1)), [["a", "b"], ["t"]])
    assert seats["engine-0"] == Seat(0, "a", (0, 1), 0)
    assert seats["engine-1"] == Seat(0, "b", (0, 1), 0)


def test_one_node_is_cut_in_two() -> None:
    seats = place(config(3, 2, width=2, gpus=(8, 0), split=True), [["a"]])
    assert [seats[f"engine-{k}"].gpus for k in range(3)] == [(0, 1), (2, 3), (4, 5)]
    assert seats["trainer-1"] == Seat(0, "a", (6, 7), 1)


def test_trainers_begin_where_the_engines_end_and_go_on_to_the_next_node() -> None:
    seats = place(config(3, 5, gpus=(4, 0), split=True), [["a", "b"]])
    assert [seats[f"trainer-{r}"].host for r in range(5)] == ["a", "b", "b", "b", "b"]
    assert seats["trainer-0"].gpus == (3,)
    assert seats["trainer-4"] == Seat(0, "b", (0, 1, 2, 3), 3)


def test_without_gpus_engines_take_the_first_half_and_trainers_the_rest() -> None:
    seats = place(config(3, 2, split=True), [["a", "b", "c"]])
    assert [seats[f"engine-{k}"].host for k in range(3)] == ["a", "a", "a"]
    assert [seats[f"trainer-{r}"].host for r in range(2)] == ["b", "c"]
    alone = place(config(2, 2, split=True), [["a"]])
    assert {seat.host for seat in alone.values()} == {"a"}
    assert [alone[f"trainer-{r}"].local_rank for r in range(2)] == [0, 1]


@pytest.mark.parametrize(
    ("cfg", "hosts", "words"),
    [
        (
            config(5, 1, width=2, gpus=(4, 1)),
            [["a", "b"], ["t"]],
            "5 engines x tensor_parallel 2 = 10 GPUs, but cluster.generators has 2 node(s) x "
            "gpus_per_node 4 = 8, which hold 4 whole engine(s). Lower generator.n_engines to 4",
        ),
        (config(1, 3, gpus=(1, 2)), [["a"], ["t"]], "Lower trainer.n_ranks to 2"),
        (config(1, 1, width=4, gpus=(2, 1)), [["a"], ["t"]], "Add GPUs to each node."),
        (
            config(2, 1, width=3, gpus=(4, 0), split=True),
            [["a"]],
            "2 engines x tensor_parallel 3 + 1 trainer ranks = 7 GPUs, but there are 1 node(s) x "
            "gpus_per_node 4 = 4",
        ),
        (config(3, 2, gpus=(4, 0), split=True), [["a"]], "3 engines x tensor_parallel 1 + 2"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(
    cfg: Config, hosts: list[list[str]], words: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        place(cfg, hosts)
    assert words in str(refusal.value)


def test_every_gpu_is_given_once() -> None:
    for engines in range(1, 6):
        cfg = config(engines, 8 - engines, gpus=(4, 0), split=True)
        seats = place(cfg, [["a", "b"]])
        used = [(s.host, g) for name, s in seats.items() if "engine" in name for g in s.gpus]
        used += [(s.host, s.gpus[s.local_rank]) for n, s in seats.items() if "trainer" in n]
        assert len(set(used)) == len(used) == 8
