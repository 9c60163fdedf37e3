"""What a batch step's environment says about its job."""

from __future__ import annotations

import pytest

from slurm_grpo.errors import ConfigError
from slurm_grpo.slurm.allocation import expand_counts, expand_hosts, read_allocation

HET = {
    "SLURM_JOB_ID": "100",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "100",
    "SLURM_JOB_ID_HET_GROUP_1": "101",
    "SLURM_JOB_NODELIST": "zeta[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "zeta[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "alpha",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "4(x2)",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "16",
}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("gen[1-2],x[08-10]-ib", ["gen1", "gen2", "x08-ib", "x09-ib", "x10-ib"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("n[098-101],b", ["n098", "n099", "n100", "n101", "b"]),
    ],
)
def test_host_lists_are_expanded_in_slurms_order(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


def test_counts_are_expanded() -> None:
    assert expand_counts("4(x2),8") == [4, 4, 8]


def test_components_of_a_heterogeneous_job_have_their_own_hosts_ids_and_cpus() -> None:
    job = read_allocation(HET)
    assert job.hosts == [("zeta1", "zeta2"), ("alpha",)]
    assert [component.job_id for component in job.components] == ["100", "101"]
    assert [component.cpus for component in job.components] == [(4, 4), (16,)]
    assert (job.reference, job.restart_count) == ("100", 0)


def test_an_array_element_is_called_by_array_and_task() -> None:
    env = {
        "SLURM_JOB_ID": "7",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_RESTART_COUNT": "2",
        "SLURM_JOB_NODELIST": "a",
        "SLURM_JOB_CPUS_PER_NODE": "2",
    }
    job = read_allocation(env)
    assert (job.job_id, job.reference, job.restart_count) == ("7", "7_3", 2)
    assert job.hosts == [("a",)]


def test_outside_of_a_job_it_is_said_how_to_get_one() -> None:
    with pytest.raises(ConfigError, match=r"launch/submit\.py"):
        read_allocation({})
