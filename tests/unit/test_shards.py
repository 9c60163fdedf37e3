"""Layout, checks and reading of shards."""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sample_episodes import assert_same_groups, make_group, make_header, make_run
from slurm_grpo.errors import SchemaVersionError, ShardError
from slurm_grpo.run.directory import RunDir
from slurm_grpo.staging import layout
from slurm_grpo.staging.shards import (
    ShardRef,
    publish_groups,
    quarantine_shard,
    read_groups,
    read_ref,
    verify_shard,
)
from slurm_grpo.types import Completion, Episode, Group, Prompt

texts = st.text(alphabet=st.characters(exclude_categories=()), max_size=8)  # NUL, surrogates, ...
names = st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=5)
floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
times = st.floats(0, 4e9)
targets = st.recursive(
    st.none() | st.booleans() | st.integers() | texts | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=4,
)


def _int32s(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


tokens = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(_int32s)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    token_ids = draw(tokens)
    n = len(token_ids)
    versions = draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n))
    return Completion(
        token_ids=token_ids,
        logprobs=np.array(draw(st.lists(floats32, min_size=n, max_size=n)), np.float32),
        policy_versions=_int32s(sorted(versions)),
        finish_reason=draw(st.sampled_from(layout.FINISH_REASONS)),
        text=draw(texts),
        t_submit=draw(times),
        t_first_token=draw(times),
        t_finish=draw(times),
    )


@st.composite
def group_lists(draw: st.DrawFn) -> list[Group]:
    ids = draw(st.lists(st.integers(0, 2**40), unique=True, max_size=3))
    groups = []
    for group_id in ids:
        prompt = Prompt(
            task=draw(texts), text=draw(texts), token_ids=draw(tokens), target=draw(targets)
        )
        group = []
        for index in range(draw(st.integers(1, 3))):
            scored = draw(st.booleans())
            group.append(
                Episode(
                    group_id=group_id,
                    sample_index=index,
                    sample_seed=draw(st.integers(-(2**63), 2**63 - 1)),
                    prompt=prompt,
                    completion=draw(completions()),
                    reward=draw(floats32) if scored else None,
                    reward_parts=draw(st.dictionaries(names, floats32, max_size=2)),
                    advantage=draw(floats32) if scored else None,
                    error=draw(st.none() | texts),
                )
            )
        groups.append(group)
    return groups


@given(group_lists())
@settings(max_examples=25, deadline=None, database=None)
def test_building_then_reading_is_identity(groups: list[Group]) -> None:
    columns = layout.build_columns(groups)
    image = layout.build_image(columns, make_header())
    with h5py.File(h5py.h5f.open_file_image(image)) as file:
        read = layout.read_all(file)
        slab = layout.read_slab(file, 0, len(groups))
    assert read.part_names == columns.part_names
    assert_same_groups(layout.groups_from(read), groups)
    assert_same_groups(layout.groups_from(slab), groups)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path)


def test_publish_then_read_is_identity(run: RunDir) -> None:
    groups = [make_group(5), make_group(2, n_episodes=3)]
    groups[1][1] = replace(groups[1][1], reward=None, advantage=None, error="no \0 answer \ud800")
    ref = publish_groups(run, groups, make_header())
    verify_shard(run, ref)
    assert read_ref(run, ref.path) == ref == ShardRef.from_json(ref.to_json())
    assert_same_groups(read_groups(run, ref, [5, 2]), groups)


def test_reading_some_groups_returns_them_in_the_order_asked(run: RunDir) -> None:
    groups = [make_group(i, n_tokens=i + 1, n_prompt_tokens=i + 2) for i in range(6)]
    ref = publish_groups(run, groups, make_header())
    assert_same_groups(read_groups(run, ref, [4, 2, 3]), [groups[4], groups[2], groups[3]])
    assert read_groups(run, ref, []) == []
    with pytest.raises(ShardError, match=r"v000000.*no group \[9\]; it has \[0, 1, 2, 3, 4, 5\]"):
        read_groups(run, ref, [1, 9])


def test_tokens_beyond_one_checksummed_chunk_read_back(run: RunDir) -> None:
    groups = [make_group(i, n_tokens=layout.CHUNK_TOKENS // 3) for i in range(4)]
    ref = publish_groups(run, groups, make_header())
    verify_shard(run, ref)
    assert_same_groups(read_groups(run, ref, [1, 2]), groups[1:3])


def test_ref_counts_tokens_versions_and_signal_of_each_group(run: RunDir) -> None:
    mixed = make_group(7, n_episodes=3, oldest_version=4, newest_version=6)
    failed = [replace(e, error="scorer died", reward=0.0) for e in make_group(8, n_episodes=3)]
    one_left = [failed[0], make_group(9)[1]]
    one_left = [replace(e, group_id=9, prompt=one_left[1].prompt) for e in one_left]
    ref = publish_groups(run, [mixed, failed, one_left], make_header(attempt=3, engine_id=2))
    assert (ref.attempt, ref.engine_id) == (3, 2)
    first, second, third = ref.groups
    assert (first.group_id, first.n_tokens) == (7, 5 + 3 * 3)
    assert (first.oldest_version, first.newest_version) == (4, 6)
    assert (first.zero_spread, first.n_trainable) == (False, 3)
    assert (second.zero_spread, second.n_trainable) == (True, 0)
    assert (third.zero_spread, third.n_trainable) == (True, 1)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda e: replace(e, reward=float("nan")), "not finite"),
        (lambda e: replace(e, advantage=float("inf")), "not finite"),
        (lambda e: replace(e, sample_index=layout.MAX_SAMPLES), "out of range"),
        (lambda e: replace(e, group_id=6), r"one group id, got ids \[5, 6\]"),
        (
            lambda e: replace(
                e, completion=replace(e.completion, logprobs=np.full(3, np.nan, np.float32))
            ),
            "non-finite log-prob",
        ),
    ],
)
def test_what_the_schema_cannot_hold_is_refused_before_writing(
    run: RunDir, spoil: Callable[[Episode], Episode], message: str
) -> None:
    good = make_group(5)
    with pytest.raises(ShardError, match=message):
        publish_groups(run, [[good[0], spoil(good[1])]], make_header())
    assert list(run.episodes.iterdir()) == []


def test_a_flipped_byte_in_token_data_is_detected_by_every_reader(run: RunDir) -> None:
    for path in (c.path for c in layout.COLUMNS if c.checksum):
        ref = publish_groups(run, [make_group(0)], make_header())
        file_path = run.root / ref.path
        with h5py.File(file_path, "r", locking=False) as file:
            offset = file[path].id.get_chunk_info(0).byte_offset
        _flip(file_path, offset)
        with pytest.raises(ShardError, match=r"v000000-.*CRC"):
            verify_shard(run, ref)
        if path in layout.NEEDED_TO_READ:
            with pytest.raises(ShardError, match=r"v000000-"):
                read_groups(run, ref, [0])
        file_path.unlink()


def test_a_flipped_byte_anywhere_is_detected_by_verify(run: RunDir) -> None:
    ref = publish_groups(run, [make_group(0)], make_header())
    path = run.root / ref.path
    for offset in np.random.default_rng(0).integers(0, ref.size_bytes, 50).tolist():
        _flip(path, offset)
        with pytest.raises(ShardError, match=r"v000000-.*CRC"):
            verify_shard(run, ref)
        _flip(path, offset)
    verify_shard(run, ref)


def test_a_truncated_or_missing_file_is_an_error_after_the_deadline(run: RunDir) -> None:
    ref = publish_groups(run, [make_group(0)], make_header())
    path = run.root / ref.path
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    for read in (
        lambda: verify_shard(run, ref, deadline_s=0.05),
        lambda: read_groups(run, ref, [0], deadline_s=0.05),
        lambda: read_ref(run, ref.path, deadline_s=0.05),
    ):
        with pytest.raises(ShardError, match=rf"{path.name}.*has {len(data) - 100} of {len(data)}"):
            read()
        path.rename(path.with_suffix(".gone"))
        with pytest.raises(ShardError, match=rf"{path.name}.*(No such file|unable to open)"):
            read()
        path.with_suffix(".gone").rename(path)
    path.write_bytes(data + b"x")
    with pytest.raises(ShardError, match=rf"{len(data) + 1} bytes, announced {len(data)}"):
        verify_shard(run, ref)


def test_a_file_other_than_announced_is_refused(run: RunDir) -> None:
    ref = publish_groups(run, [make_group(0)], make_header())
    wrong = replace(ref, groups=(replace(ref.groups[0], group_id=1),))
    with pytest.raises(ShardError, match=r"announced GroupRef\(group_id=1.*holds None"):
        verify_shard(run, wrong)
    with pytest.raises(ShardError, match="not the name of a shard"):
        read_ref(run, "episodes/other.h5")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.attrs.__setitem__("sequence", 7), "sequence is 7 in the file, 0 in its name"),
        (lambda f: _set(f, "episodes/episode_id", 1, 1_000_001), "episode_id names another group"),
        (lambda f: _set(f, "episodes/episode_id", 1, 0), "episode_id holds an episode twice"),
        (lambda f: f.attrs.__setitem__("schema", "other/1"), "not a file of episodes"),
        (lambda f: f.attrs.__setitem__("complete", 0), "no `complete` mark"),
        (lambda f: f.attrs.__delitem__("complete"), "no `complete` mark"),
        (lambda f: f.attrs.__setitem__("n_tokens", 5), "tokens/token_id has 6 rows, not 5"),
        (lambda f: f.__delitem__("episodes/reward"), "episodes/reward is missing"),
        (lambda f: _set(f, "episodes/token_offsets", 1, 9), "token_offsets does not run from 0"),
        (lambda f: _set(f, "groups/episode_offsets", 0, 1), "episode_offsets does not run from 0"),
        (lambda f: _set(f, "tokens/logprob", 2, np.inf), r"tokens/logprob\[2\] is not finite"),
        (lambda f: _set(f, "tokens/loss_mask", 2, 0), "loss_mask holds zeros"),
        (lambda f: _set(f, "tokens/policy_version", 0, 7), "policy_version_min disagrees"),
        (lambda f: _set(f, "episodes/finish_reason", 0, 9), "unknown code"),
    ],
)
def test_an_inconsistent_file_is_refused_saying_why(
    run: RunDir, change: Callable[[h5py.File], None], message: str
) -> None:
    ref = _changed(run, change)
    with pytest.raises(ShardError, match=message) as caught:
        verify_shard(run, ref)
    assert ref.path in str(caught.value)


def test_a_newer_minor_version_with_more_in_it_is_read(run: RunDir) -> None:
    def newer(file: h5py.File) -> None:
        file.attrs["schema_version"] = [1, 7]
        file.attrs["novelty"] = "yes"
        file["episodes/novelty"] = np.zeros(2)

    ref = _changed(run, newer)
    verify_shard(run, ref)
    assert_same_groups(read_groups(run, ref, [0]), [make_group(0)])


def test_a_newer_major_version_is_refused_by_all_readers(run: RunDir) -> None:
    ref = _changed(run, lambda f: f.attrs.__setitem__("schema_version", [2, 0]))
    for read in (verify_shard, partial(read_groups, group_ids=[0])):
        with pytest.raises(SchemaVersionError, match="use the program version that") as caught:
            read(run, ref)
        assert ref.path in str(caught.value)


def test_a_quarantined_shard_is_moved_next_to_its_reason(run: RunDir) -> None:
    ref = publish_groups(run, [make_group(0)], make_header())
    target = quarantine_shard(run, ref.path, "its CRC is wrong")
    assert not (run.root / ref.path).exists()
    assert target.parent == run.episodes / "quarantine"
    assert target.stat().st_size == ref.size_bytes
    assert target.with_suffix(".reason.txt").read_text() == "its CRC is wrong\n"


def test_the_schema_is_the_golden_one(
    run: RunDir, check_golden: Callable[[str, str], None]
) -> None:
    ref = publish_groups(run, [make_group(3), make_group(4)], make_header())
    with h5py.File(run.root / ref.path, "r", locking=False) as file:
        check_golden("schema.txt", _describe(file))


def test_staging_imports_no_torch() -> None:
    code = (
        "import sys, slurm_grpo.staging.manifest, slurm_grpo.staging.shards\n"
        "assert not {'torch', 'vllm', 'torchtitan', 'transformers'} & set(sys.modules)\n"
        "assert 'h5py' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import sys, slurm_grpo.fsio; assert not {'h5py', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def _set(file: h5py.File, path: str, index: int, value: float) -> None:
    file[path][index] = value


def _changed(run: RunDir, change: Callable[[h5py.File], None]) -> ShardRef:
    """A ref whose size and CRC fit a shard that `change` has edited."""
    ref = publish_groups(run, [make_group(0)], make_header())
    path = run.root / ref.path
    with h5py.File(path, "r+", locking=False) as file:
        change(file)
    data = path.read_bytes()
    return replace(ref, size_bytes=len(data), crc32=zlib.crc32(data))


def _describe(file: h5py.File) -> str:
    """Every name, type, shape and attribute; values where they are the same in each file."""
    varying = {"created_unix_ns", "shard_uuid"}
    lines = [
        f"/ @{name} {_type(value)}" + ("" if name in varying else f" = {value!s}")
        for name, value in sorted(file.attrs.items())
    ]

    def visit(name: str, item: h5py.Group | h5py.Dataset) -> None:
        if isinstance(item, h5py.Group):
            lines.append(f"{name}/")
            return
        enum = h5py.check_enum_dtype(item.dtype)
        kind = "utf-8" if h5py.check_string_dtype(item.dtype) else item.dtype.str.lstrip("<|")
        storage = f"chunks={item.chunks} fletcher32={item.fletcher32}"
        lines.append(f"{name} {kind}{enum or ''} {item.shape} {storage}")
        lines.extend(f"{name} @{key} = {value!s}" for key, value in sorted(item.attrs.items()))

    file.visititems(visit)
    return "\n".join(lines) + "\n"


def _type(value: object) -> str:
    return str(value.dtype) if isinstance(value, np.ndarray | np.generic) else type(value).__name__


def test_a_group_whose_rewards_were_not_computed_has_no_spread(run: RunDir) -> None:
    group = [replace(episode, reward=None, advantage=None) for episode in make_group(0)]
    (found,) = publish_groups(run, [group], make_header()).groups
    assert (found.zero_spread, found.n_trainable) == (True, 2)
