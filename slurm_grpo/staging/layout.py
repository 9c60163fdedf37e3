"""The HDF5 layout `slurm_grpo.episodes/1`: groups to columns, columns to file image, and back.

Between the generator, which has `Group`s, and `shards.py`, which has files. Everything here is in
memory and pure; it promises that reading what was built gives the groups back, and that a file it
accepts is whole and consistent. It knows nothing of paths, publication or retries. Text columns
hold JSON (a string, or a document for `target_json` and `info_json`), because HDF5 strings end at
the first NUL and models do emit NUL.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import accumulate
from json.encoder import encode_basestring
from math import isfinite
from typing import Any, TypeAlias, get_args

import h5py
import numpy as np
import numpy.typing as npt

from slurm_grpo.errors import SchemaVersionError, ShardError
from slurm_grpo.types import Completion, Episode, FinishReason, Group, Prompt

SCHEMA = "slurm_grpo.episodes/1"
SCHEMA_VERSION = (1, 0)
FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
ERROR_CODE = FINISH_REASONS.index("error")
CHUNK_TOKENS = 16384
"""Checksummed chunk length; larger chunks make random access two to four times slower."""
MAX_SAMPLES = 1_000_000
SMALL_IMAGE_BYTES = 1 << 16

Array: TypeAlias = npt.NDArray[Any]
_encode = json.JSONEncoder(ensure_ascii=False).encode
TEXT = h5py.string_dtype("utf-8")
TEXT_ID = h5py.h5t.py_create(TEXT, logical=True)
SCALAR = h5py.h5s.create(h5py.h5s.SCALAR)
FINISH_REASON_TYPE = h5py.enum_dtype({name: i for i, name in enumerate(FINISH_REASONS)}, "u1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardHeader:
    """Who made a shard, and how. All but `sequence` stay the same over an engine's life."""

    run_id: str
    engine_id: int
    incarnation: int  # lives of this engine in this attempt, from 0
    attempt: int
    sequence: int  # shards this incarnation published before
    model_id: str
    tokenizer_sha256: str
    vocab_size: int
    logprobs_mode: str
    sampling_params_json: str
    code_version: str
    advantage_estimator: str
    """`algorithm.advantage` of the run."""


HEADER_ATTRIBUTES = tuple(f.name for f in fields(ShardHeader) if f.name != "advantage_estimator")
"""Those that are attributes of the file; the estimator is one of `episodes/advantage`."""


@dataclass(frozen=True, slots=True)
class Column:
    """One dataset. Its first axis is counted by `axis`."""

    path: str
    dtype: Any
    axis: str  # P groups, N episodes, Tp prompt tokens, T completion tokens; +1: offsets
    description: str
    units: str
    checksum: bool = False


COLUMNS = (
    Column("groups/group_id", "i8", "P", "Group (prompt) id, unique in the run", "1"),
    Column(
        "groups/prompt_offsets", "i8", "P+1", "Group p owns prompt_tokens[o[p]:o[p+1]]", "tokens"
    ),
    Column(
        "groups/prompt_tokens", "i4", "Tp", "Prompt token ids, once per group", "token id", True
    ),
    Column(
        "groups/episode_offsets", "i8", "P+1", "Group p owns episodes o[p] to o[p+1]", "episodes"
    ),
    Column("groups/task", TEXT, "P", "Task name, a JSON string", "text"),
    Column("groups/prompt_text", TEXT, "P", "The text that was tokenised, a JSON string", "text"),
    Column("groups/target_json", TEXT, "P", "The right answer as the scorer got it, JSON", "json"),
    Column("episodes/episode_id", "i8", "N", "group_id * 1000000 + index in the group", "1"),
    Column("episodes/sample_seed", "i8", "N", "Seed the completion was sampled with", "1"),
    Column("episodes/token_offsets", "i8", "N+1", "Episode n owns tokens/*[o[n]:o[n+1]]", "tokens"),
    Column("episodes/reward", "f4", "N", "Total reward; NaN: not computed", "reward"),
    Column("episodes/advantage", "f4", "N", "Advantage in the group; NaN: not computed", "reward"),
    Column("episodes/reward_parts", "f4", "N", "Unweighted rewards; NaN: not applicable", "reward"),
    Column("episodes/finish_reason", FINISH_REASON_TYPE, "N", "Why the completion ended", "enum"),
    Column(
        "episodes/policy_version_min", "i8", "N", "Oldest token's version; -1: no token", "step"
    ),
    Column(
        "episodes/policy_version_max", "i8", "N", "Newest token's version; -1: no token", "step"
    ),
    Column("episodes/t_submit", "f8", "N", "Unix time the engine got the prompt", "s"),
    Column("episodes/t_first_token", "f8", "N", "Unix time of the first token", "s"),
    Column("episodes/t_finish", "f8", "N", "Unix time of the last token", "s"),
    Column("episodes/completion_text", TEXT, "N", "The completion, a JSON string", "text"),
    Column("episodes/info_json", TEXT, "N", "Scoring error and the like, a JSON object", "json"),
    Column("tokens/token_id", "i4", "T", "Completion token ids", "token id", True),
    Column("tokens/logprob", "f4", "T", "Log-probability under the sampling policy", "nats", True),
    Column(
        "tokens/policy_version", "i4", "T", "Version of the policy that sampled it", "step", True
    ),
    Column("tokens/loss_mask", "u1", "T", "0: the policy did not write this token", "1", True),
)
BY_PATH = {c.path: c for c in COLUMNS}
NEEDED_TO_READ = tuple(
    c.path
    for c in COLUMNS
    if not c.path.startswith("episodes/policy_version") and c.path != "tokens/loss_mask"
)


@dataclass(frozen=True, slots=True)
class Columns:
    """The datasets of one file, or of some of its groups, by path; and the reward parts' names."""

    data: dict[str, Array]
    part_names: tuple[str, ...]

    def __getitem__(self, path: str) -> Array:
        return self.data[path]


def build_columns(groups: list[Group]) -> Columns:
    """Lay whole groups out as columns. Raises ShardError for what the schema cannot hold."""
    for group in groups:
        _check_group(group)
    episodes = [e for g in groups for e in g]
    completions = [e.completion for e in episodes]
    prompts = [g[0].prompt for g in groups]
    versions = _joined([c.policy_versions for c in completions], "i4")
    token_offsets = _offsets(len(c.token_ids) for c in completions)
    logprobs = _joined([c.logprobs for c in completions], "f4")
    if not np.isfinite(logprobs).all():
        first = np.flatnonzero(~np.isfinite(logprobs))[0]
        bad = episodes[int(np.searchsorted(token_offsets, first, "right")) - 1]
        raise ShardError(
            f"group {bad.group_id}: sample {bad.sample_index} has a non-finite log-prob"
        )
    part_names = tuple(sorted({name for e in episodes for name in e.reward_parts}))
    data: dict[str, Array] = {
        "groups/group_id": np.array([g[0].group_id for g in groups], "i8"),
        "groups/prompt_offsets": _offsets(len(p.token_ids) for p in prompts),
        "groups/prompt_tokens": _joined([p.token_ids for p in prompts], "i4"),
        "groups/episode_offsets": _offsets(len(g) for g in groups),
        "groups/task": _texts(p.task for p in prompts),
        "groups/prompt_text": _texts(p.text for p in prompts),
        "groups/target_json": _texts(p.target for p in prompts),
        "episodes/episode_id": np.array(
            [e.group_id * MAX_SAMPLES + e.sample_index for e in episodes], "i8"
        ),
        "episodes/sample_seed": np.array([e.sample_seed for e in episodes], "i8"),
        "episodes/token_offsets": token_offsets,
        "episodes/reward": _floats(e.reward for e in episodes),
        "episodes/advantage": _floats(e.advantage for e in episodes),
        "episodes/reward_parts": np.array(
            [[e.reward_parts.get(n, np.nan) for e in episodes] for n in part_names], "f4"
        )
        .reshape(len(part_names), len(episodes))
        .T.copy(),
        "episodes/finish_reason": np.array(
            [FINISH_REASONS.index(_disk_finish_reason(e)) for e in episodes], FINISH_REASON_TYPE
        ),
        "episodes/policy_version_min": _per_episode(np.minimum, versions, token_offsets),
        "episodes/policy_version_max": _per_episode(np.maximum, versions, token_offsets),
        "episodes/t_submit": np.array([c.t_submit for c in completions], "f8"),
        "episodes/t_first_token": np.array([c.t_first_token for c in completions], "f8"),
        "episodes/t_finish": np.array([c.t_finish for c in completions], "f8"),
        "episodes/completion_text": _texts(c.text for c in completions),
        "episodes/info_json": np.array([_info(e) for e in episodes], TEXT),
        "tokens/token_id": _joined([c.token_ids for c in completions], "i4"),
        "tokens/logprob": logprobs,
        "tokens/policy_version": versions,
        "tokens/loss_mask": np.ones(len(versions), "u1"),
    }
    return Columns(data, part_names)


def build_image(columns: Columns, header: ShardHeader) -> bytes:
    """The bytes of an HDF5 file that holds `columns`; `complete` is the last thing set."""
    shard_uuid = uuid.uuid4().hex
    # Memory grows by blocks, and each growth may copy all of it: one block for everything.
    n_bytes = sum(values.nbytes for values in columns.data.values())
    block_bytes = n_bytes + n_bytes // 4 + SMALL_IMAGE_BYTES
    with h5py.File(
        shard_uuid, "w", driver="core", backing_store=False, block_size=block_bytes
    ) as file:
        for name in ("groups", "episodes", "tokens"):
            file.create_group(name)
        for column in COLUMNS:
            _create(file, column, columns[column.path])
        file["episodes/advantage"].attrs["estimator"] = header.advantage_estimator
        file["episodes/reward_parts"].attrs["names"] = np.array(columns.part_names, TEXT)
        attributes = {
            "schema": SCHEMA,
            "schema_version": np.array(SCHEMA_VERSION, "i8"),
            "shard_uuid": shard_uuid,
            "created_unix_ns": time.time_ns(),
            **{name: getattr(header, name) for name in HEADER_ATTRIBUTES},
            "n_groups": len(columns["groups/group_id"]),
            "n_episodes": len(columns["episodes/episode_id"]),
            "n_tokens": len(columns["tokens/token_id"]),
        }
        for name, value in attributes.items():
            _set_attribute(file.id, name, value)
        _set_attribute(file.id, "complete", 1)
        file.flush()
        return bytes(file.id.get_file_image())


def check_header(file: h5py.File) -> None:
    """Raise ShardError unless `file` holds episodes and was finished, SchemaVersionError when its
    major version is another one than this program's."""
    schema, version = file.attrs.get("schema"), file.attrs.get("schema_version")
    if (
        not isinstance(schema, str)
        or not schema.startswith("slurm_grpo.episodes/")
        or version is None
    ):
        raise ShardError(f"schema is {schema!r}, not {SCHEMA!r}: not a file of episodes")
    if int(version[0]) != SCHEMA_VERSION[0]:
        raise SchemaVersionError(
            f"schema version {'.'.join(map(str, version))}, this program reads "
            f"{SCHEMA_VERSION[0]}.*: use the program version that wrote it"
        )
    if file.attrs.get("complete") != 1:
        raise ShardError("no `complete` mark: its writer did not finish it")


def read_header(file: h5py.File) -> ShardHeader:
    """Who made `file`, from its attributes. Raises KeyError for one that is missing."""
    values: dict[str, Any] = {
        name: value if isinstance(value := file.attrs[name], str) else int(value)
        for name in HEADER_ATTRIBUTES
    }
    estimator = str(file["episodes/advantage"].attrs["estimator"])
    return ShardHeader(**values, advantage_estimator=estimator)


def read_all(file: h5py.File) -> Columns:
    """Read and check every column of a whole file. Raises ShardError saying what is wrong."""
    check_header(file)
    columns = Columns({path: read_column(file, path) for path in BY_PATH}, part_names(file))
    _check_counts(file, columns)
    tokens = columns["episodes/token_offsets"]
    if not np.isfinite(columns["tokens/logprob"]).all():
        bad = int(np.flatnonzero(~np.isfinite(columns["tokens/logprob"]))[0])
        raise ShardError(f"tokens/logprob[{bad}] is not finite")
    if columns["episodes/finish_reason"].max(initial=0) >= len(FINISH_REASONS):
        raise ShardError("episodes/finish_reason holds an unknown code")
    if not (columns["tokens/loss_mask"] == 1).all():
        raise ShardError("tokens/loss_mask holds zeros, which completions cannot express")
    if len(np.unique(columns["groups/group_id"])) != len(columns["groups/group_id"]):
        raise ShardError("groups/group_id holds a group twice")
    group_of = np.repeat(columns["groups/group_id"], np.diff(columns["groups/episode_offsets"]))
    episode_ids = columns["episodes/episode_id"]
    if not np.array_equal(episode_ids // MAX_SAMPLES, group_of):
        raise ShardError("episodes/episode_id names another group than the one that holds it")
    if len(np.unique(episode_ids)) != len(episode_ids):
        raise ShardError("episodes/episode_id holds an episode twice")
    filled = np.diff(tokens) > 0
    first = columns["tokens/policy_version"][tokens[:-1][filled]]
    if not np.array_equal(first, columns["episodes/policy_version_min"][filled]):
        raise ShardError("episodes/policy_version_min disagrees with tokens/policy_version")
    return columns


def read_slab(file: h5py.File, first: int, stop: int) -> Columns:
    """Read groups `first` to `stop` (file indices), one slab per dataset, offsets rebased to 0."""
    spans = {"P": (first, stop), "P+1": (first, stop + 1)}
    data: dict[str, Array] = {}

    def span_of(path: str, span: tuple[int, int]) -> tuple[int, int]:
        offsets = read_column(file, path, span)
        data[path] = offsets - offsets[0]
        return int(offsets[0]), int(offsets[-1])

    spans["Tp"] = span_of("groups/prompt_offsets", spans["P+1"])
    spans["N"] = span_of("groups/episode_offsets", spans["P+1"])
    spans["T"] = span_of("episodes/token_offsets", (spans["N"][0], spans["N"][1] + 1))
    for path in NEEDED_TO_READ:
        if path not in data:
            data[path] = read_column(file, path, spans[BY_PATH[path].axis])
    return Columns(data, part_names(file))


def groups_from(columns: Columns) -> list[Group]:
    """Turn columns into groups; arrays are views into the columns."""
    offsets = columns["groups/episode_offsets"]
    return [
        [_episode(columns, p, n, prompt) for n in range(int(offsets[p]), int(offsets[p + 1]))]
        for p in range(len(offsets) - 1)
        for prompt in [_prompt(columns, p)]
    ]


def _prompt(columns: Columns, p: int) -> Prompt:
    offsets = columns["groups/prompt_offsets"]
    return Prompt(
        task=json.loads(columns["groups/task"][p]),
        text=json.loads(columns["groups/prompt_text"][p]),
        token_ids=columns["groups/prompt_tokens"][offsets[p] : offsets[p + 1]],
        target=json.loads(columns["groups/target_json"][p]),
    )


def _episode(columns: Columns, p: int, n: int, prompt: Prompt) -> Episode:
    offsets = columns["episodes/token_offsets"]
    tokens = slice(int(offsets[n]), int(offsets[n + 1]))
    info = json.loads(columns["episodes/info_json"][n])
    group_id = int(columns["groups/group_id"][p])
    parts = zip(columns.part_names, columns["episodes/reward_parts"][n].tolist(), strict=True)
    completion = Completion(
        token_ids=columns["tokens/token_id"][tokens],
        logprobs=columns["tokens/logprob"][tokens],
        policy_versions=columns["tokens/policy_version"][tokens],
        finish_reason=info.get(
            "finish_reason", FINISH_REASONS[columns["episodes/finish_reason"][n]]
        ),
        text=json.loads(columns["episodes/completion_text"][n]),
        t_submit=float(columns["episodes/t_submit"][n]),
        t_first_token=float(columns["episodes/t_first_token"][n]),
        t_finish=float(columns["episodes/t_finish"][n]),
    )
    return Episode(
        group_id=group_id,
        sample_index=int(columns["episodes/episode_id"][n]) - group_id * MAX_SAMPLES,
        sample_seed=int(columns["episodes/sample_seed"][n]),
        prompt=prompt,
        completion=completion,
        reward=_optional(columns["episodes/reward"][n]),
        reward_parts={name: value for name, value in parts if value == value},
        advantage=_optional(columns["episodes/advantage"][n]),
        error=info.get("error"),
    )


def _check_group(group: Group) -> None:
    """Refuse what could not be read back, naming the group, before any byte is written."""
    if not group:
        raise ShardError("a group needs episodes, got none")
    group_id = group[0].group_id
    for episode in group:
        if episode.group_id != group_id:
            ids = sorted({e.group_id for e in group})
            raise ShardError(f"a group needs episodes of one group id, got ids {ids}")
        if not 0 <= episode.sample_index < MAX_SAMPLES:
            raise ShardError(
                f"group {group_id}: sample index {episode.sample_index} is out of range"
            )
        values = (episode.reward, episode.advantage, *episode.reward_parts.values())
        for value in values:
            if value is not None and not isfinite(value):
                raise ShardError(
                    f"group {group_id}: reward, part or advantage is not finite: {list(values)}"
                )


def _check_counts(file: h5py.File, columns: Columns) -> None:
    """Columns are as long as stated; offsets start at 0, never fall and end at what they cut."""
    counts = {
        "P": int(file.attrs["n_groups"]),
        "N": int(file.attrs["n_episodes"]),
        "T": int(file.attrs["n_tokens"]),
        "Tp": len(columns["groups/prompt_tokens"]),
    }
    for column in COLUMNS:
        axis, _, extra = column.axis.partition("+")
        expected = counts[axis] + int(extra or 0)
        if len(columns[column.path]) != expected:
            raise ShardError(f"{column.path} has {len(columns[column.path])} rows, not {expected}")
    for path, axis in (
        ("groups/prompt_offsets", "Tp"),
        ("groups/episode_offsets", "N"),
        ("episodes/token_offsets", "T"),
    ):
        offsets = columns[path]
        if offsets[0] != 0 or (np.diff(offsets) < 0).any() or offsets[-1] != counts[axis]:
            raise ShardError(f"{path} does not run from 0 to {counts[axis]} without falling")


# h5py's `create_dataset`, `attrs` and indexing take longer than what they do here; hence its lower
# layer in the functions below.


def _create(file: h5py.File, column: Column, values: Array) -> None:
    """Write one dataset with its two attributes."""
    options = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    options.set_obj_track_times(False)
    if column.checksum and len(values) > 0:  # an empty dataset has no chunk to check
        options.set_chunk((min(CHUNK_TOKENS, len(values)),))
        options.set_fletcher32()
    kind = h5py.h5t.py_create(values.dtype, logical=True)
    space = h5py.h5s.create_simple(values.shape)
    dataset = h5py.h5d.create(file.id, column.path.encode(), kind, space, options)
    if values.size:
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, values)
    _set_attribute(dataset, "description", column.description)
    _set_attribute(dataset, "units", column.units)


def _set_attribute(owner: h5py.h5g.GroupID | h5py.h5d.DatasetID, name: str, value: Any) -> None:
    """A text, an integer or an array."""
    values = np.array(value, TEXT) if isinstance(value, str) else np.asarray(value)
    kind = TEXT_ID if values.dtype == TEXT else h5py.h5t.py_create(values.dtype, logical=True)
    space = h5py.h5s.create_simple(values.shape) if values.shape else SCALAR
    h5py.h5a.create(owner, name.encode(), kind, space).write(values)


def read_column(file: h5py.File, path: str, span: tuple[int, int] | None = None) -> Array:
    """The rows of `span` (None: all) in this program's type for the column; text as UTF-8 bytes."""
    try:
        dataset = h5py.h5d.open(file.id, path.encode())
    except KeyError as error:
        raise ShardError(f"dataset {path} is missing") from error
    n_rows, *rest = dataset.shape
    first, stop = span or (0, n_rows)
    values = np.empty((stop - first, *rest), BY_PATH[path].dtype)
    if values.size:
        rows = dataset.get_space()
        rows.select_hyperslab((first, *(0 for _ in rest)), values.shape)
        dataset.read(h5py.h5s.create_simple(values.shape), rows, values)
    return values


def part_names(file: h5py.File) -> tuple[str, ...]:
    """Names of the columns of `episodes/reward_parts`."""
    return tuple(str(name) for name in file["episodes/reward_parts"].attrs["names"])


def _disk_finish_reason(episode: Episode) -> FinishReason:
    return "error" if episode.error is not None else episode.completion.finish_reason


def _info(episode: Episode) -> str:
    """What has no column: on disk a scoring error takes the place of the finish reason."""
    if episode.error is None:
        return "{}"
    return _json({"error": episode.error, "finish_reason": episode.completion.finish_reason})


def _per_episode(reduce: np.ufunc, values: Array, offsets: Array) -> Array:
    """One value of each episode's; -1 where it has none."""
    found = np.full(len(offsets) - 1, -1, "i8")
    filled = np.diff(offsets) > 0
    if filled.any():
        found[filled] = reduce.reduceat(values, offsets[:-1][filled])
    return found


def _offsets(lengths: Iterable[int]) -> Array:
    return np.array([0, *accumulate(lengths)], "i8")


def _joined(parts: list[Array], dtype: str) -> Array:
    joined: Array = np.concatenate([np.zeros(0, dtype), *parts])
    return joined.astype(dtype, copy=False)


def _floats(values: Iterable[float | None]) -> Array:
    return np.array([np.nan if v is None else v for v in values], "f4")


def _optional(value: np.float32) -> float | None:
    return None if np.isnan(value) else float(value)


def _texts(values: Iterable[Any]) -> Array:
    return np.array([_json(v) for v in values], TEXT)


def _json(value: Any) -> str:
    """JSON that UTF-8 can carry; readable unless the text holds a lone surrogate."""
    text = encode_basestring(value) if isinstance(value, str) else _encode(value)
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text
