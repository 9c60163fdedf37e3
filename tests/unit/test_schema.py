"""The documentation of the file format says everything a file holds, and nothing else."""

from __future__ import annotations

from pathlib import Path

import h5py
import pytest

from sample_episodes import make_group, make_header, make_run
from slurm_grpo.analysis.schema import ATTRIBUTES
from slurm_grpo.commands import main as cli
from slurm_grpo.staging.shards import publish_groups


def test_the_documentation_matches_a_published_shard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    ref = publish_groups(run, [make_group(0)], make_header())
    assert cli.main(["episodes", "schema"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    with h5py.File(run.root / ref.path, locking=False) as file:
        assert set(file.attrs) == set(ATTRIBUTES)
        for group in file.values():
            for name, dataset in group.items():
                assert f"  {group.name[1:]}/{name}  " in text
                assert dataset.attrs["description"] in text
