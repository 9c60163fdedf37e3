"""Writers killed at random instants leave whole shards and manifests, or none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sample_episodes import assert_same_groups, make_group, make_run
from slurm_grpo.fsio import sweep_temporaries
from slurm_grpo.staging.manifest import read_manifest
from slurm_grpo.staging.shards import list_shards, read_groups, read_ref

# Forks writers, so that imports are paid once; a writer names what it has published in a pipe.
WRITERS = """
import json, os, random, signal, sys, time
from pathlib import Path
from sample_episodes import make_group, make_header
from slurm_grpo.run.directory import RunDir
from slurm_grpo.staging.manifest import Manifest, publish_manifest
from slurm_grpo.staging.shards import publish_groups

run, rng, announced = RunDir(Path(sys.argv[1])), random.Random(0), []
for life in range(int(sys.argv[2])):
    read_end, write_end = os.pipe()
    writer = os.fork()
    if writer == 0:
        for n in range(10_000):
            group = make_group(life * 10_000 + n)
            ref = publish_groups(run, [group], make_header(incarnation=life, sequence=n))
            os.write(write_end, ref.path.encode() + b"\\n")
            step = life * 10_000 + n + 1
            groups = ((group[0].group_id, ref.path),)
            publish_manifest(run, Manifest(step=step, attempt=0, groups=groups, dropped=()))
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        first = pipe.readline()
        time.sleep(rng.uniform(0.0, 0.08))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        announced += [line.decode().strip() for line in (first, *pipe) if line.endswith(b"\\n")]
print(json.dumps(announced))
"""


@pytest.mark.parametrize("n_kills", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_a_writer_killed_at_any_instant_leaves_whole_files_or_none(
    tmp_path: Path, n_kills: int
) -> None:
    run = make_run(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", WRITERS, str(tmp_path), str(n_kills)],
        env={"PYTHONPATH": ":".join(sys.path)},
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    )
    announced = json.loads(done.stdout)
    shards = list_shards(run)
    assert len(shards) >= len(announced) >= n_kills
    assert {path for path, _ in shards} >= set(announced)
    for path, name in shards:
        ref = read_ref(run, path, deadline_s=0)
        group = make_group(name.incarnation * 10_000 + name.sequence)
        assert_same_groups(read_groups(run, ref, [group[0].group_id]), [group])

    manifests = [p for p in run.manifests.iterdir() if p.suffix == ".json"]
    assert len(manifests) >= len(announced) - n_kills
    for manifest in map(read_manifest, manifests):
        assert [run.root / path for _, path in manifest.groups if (run.root / path).exists()]

    n_left = len(list(run.episodes.iterdir())) - len(shards)
    assert n_left <= n_kills
    assert sweep_temporaries(run.episodes, older_than_s=-1) == n_left
