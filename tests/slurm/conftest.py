"""The cluster that the tests of this directory share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slurm_cluster import Cluster, running_cluster, why_not


@pytest.fixture(scope="session")
def slurm_works() -> None:
    """Skips, saying why, where no cluster can run."""
    if reason := why_not():
        pytest.skip(f"NOT RUN, no Slurm here: {reason}")


@pytest.fixture(scope="session")
def cluster(slurm_works: None) -> Iterator[Cluster]:
    """A running cluster of six nodes; `cluster.sh` says which.

    Tests end their jobs. What is left in the queue at the end is cancelled, and a process of ours
    that survives it fails the session.
    """
    with running_cluster() as running:
        yield running
        running.cancel_all()
        running.check_nothing_survives()


@pytest.fixture(autouse=True)
def no_orphans(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test after which the queue is empty but processes of jobs are alive."""
    yield
    if "cluster" in request.fixturenames:
        running: Cluster = request.getfixturevalue("cluster")
        if not running.live_jobs():
            running.check_nothing_survives()
