"""A run directory as tables: episodes, groups, tokens, steps, metrics.

    run = open_run("runs/quickstart")
    run.episodes(columns=["reward", "n_tokens"], where="task == 'addition' and step >= 3")

For notebooks, the `episodes` commands and the report; needs h5py and pandas, not torch. A table is
read when it is asked for, shard by shard, and only the columns that are asked for. The run may
still be going on: it is seen as it was when it was opened.
"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import h5py
import numpy as np
import pandas as pd
import yaml

from slurm_grpo.analysis.columns import (
    EPISODE_COLUMNS,
    GROUP_COLUMNS,
    PART,
    OpenShard,
    TableColumn,
    part_column,
)
from slurm_grpo.analysis.index import RunIndex, ShardEntry, read_index
from slurm_grpo.analysis.rescored import rescored_columns
from slurm_grpo.config.values import nearest
from slurm_grpo.errors import AnalysisError
from slurm_grpo.run.checkpoints import read_resumed_from
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.metrics import Row, read_metrics, valid_rows
from slurm_grpo.run.state import MANIFEST
from slurm_grpo.staging.layout import BY_PATH, MAX_SAMPLES, Array
from slurm_grpo.sweeps.directory import read_manifest

logger = logging.getLogger(__name__)
T = TypeVar("T")
Rows: TypeAlias = Callable[[OpenShard, Array], Array]
"""Some of the rows given."""

TOKEN_COLUMNS = ("token_id", "logprob", "policy_version", "loss_mask")


def open_run(path: str | Path) -> RunData:
    """The run in the directory `path`. Raises AnalysisError when it is no run directory."""
    return RunData(read_index(Path(path)))


def open_runs(paths: str | Path | Iterable[str | Path]) -> RunSet:
    """Several runs: their directories, or the directory of a sweep, whose elements that have not
    begun are left out. Raises AnalysisError when a path is neither, or nothing is left."""
    if isinstance(paths, str | Path):
        if not (Path(paths) / MANIFEST).is_file():
            return RunSet([open_run(paths)])
        folder = Path(paths).absolute()
        elements = [RunDir(folder / Path(row["run_dir"]).name) for row in read_manifest(folder)]
        paths = [run.root for run in elements if run.attempt_numbers()]
        if len(paths) < len(elements):
            logger.warning("%d of %d have not begun", len(elements) - len(paths), len(elements))
    runs = [open_run(path) for path in paths]
    if not runs:
        raise AnalysisError("no run to open: none was named, or none of the sweep has begun.")
    return RunSet(runs)


class RunData:
    """One run. Tables leave out what a later attempt went back over, unless asked not to."""

    def __init__(self, index: RunIndex) -> None:
        self.index = index
        self.run = index.run

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.run.root.resolve().name

    @property
    def damaged(self) -> Mapping[str, str]:
        """What is wrong, by path of each shard or manifest found unreadable so far."""
        return self.index.damaged

    @cached_property
    def config(self) -> dict[str, Any]:
        """The frozen configuration by dotted key; empty when the run has none."""
        if not self.run.config.is_file():
            return {}
        return dict(_flat(yaml.safe_load(self.run.config.read_text()) or {}))

    @property
    def part_names(self) -> list[str]:
        """Names of all reward parts."""
        return sorted({name for shard in self.index.shards for name in shard.part_names})

    def episode_columns(self) -> dict[str, TableColumn]:
        """Every column that `episodes` can give, by name."""
        parts = {PART + name: part_column(name) for name in self.part_names}
        return EPISODE_COLUMNS | parts | rescored_columns(self.run)

    def chosen(self, columns: Sequence[str] | None) -> dict[str, TableColumn]:
        """The episode columns of these names, None: all. Raises AnalysisError."""
        return _chosen(self.episode_columns(), columns)

    def episodes(
        self,
        columns: Sequence[str] | None = None,
        where: str | None = None,
        *,
        episode_ids: Sequence[int] | None = None,
        include_superseded: bool = False,
    ) -> pd.DataFrame:
        """One row per episode, by attempt, then as published.

        `columns`: those to read, by default all, texts too. `where`: a condition on any columns in
        the language of `DataFrame.query`, such as "reward < 0 and finish_reason == 'length'"; a
        name that is no Python name stands in backticks.
        `episode_ids`: these episodes, in this order, and no other file is opened. Raises
        AnalysisError for a name that is no column and for an id that is no episode's.
        """
        if episode_ids is not None:
            return self._pick(np.atleast_1d(episode_ids).tolist(), columns, where)
        batches = self.episode_batches(columns, where, include_superseded=include_superseded)
        names = list(columns) if columns is not None else list(self.episode_columns())
        return _joined(list(batches), names)

    def episode_batches(
        self,
        columns: Sequence[str] | None = None,
        where: str | None = None,
        *,
        include_superseded: bool = False,
    ) -> Iterator[pd.DataFrame]:
        """`episodes` as one frame per shard, to go through a run that does not fit into memory."""
        read = partial(_table, columns=self.chosen(columns))
        return self.map_shards(read, where, include_superseded=include_superseded)

    def map_shards(
        self,
        action: Callable[[OpenShard, Array], T],
        where: str | None = None,
        *,
        include_superseded: bool = False,
    ) -> Iterator[T]:
        """`action` of each open shard and the rows of its episodes that `where` lets through, if
        there are any. For readers that want more of a shard than columns."""
        keep = _condition(where, self.episode_columns())
        for shard in self.index.shards:
            counts = include_superseded | ~shard.superseded
            rows = np.flatnonzero(np.repeat(counts, np.diff(shard.episode_offsets)))
            result = self._apply(shard, rows, keep, action)
            if result is not None:
                yield result

    def groups(
        self,
        columns: Sequence[str] | None = None,
        where: str | None = None,
        *,
        include_superseded: bool = False,
    ) -> pd.DataFrame:
        """One row per group (prompt); arguments as for `episodes`."""
        wanted, keep = _chosen(GROUP_COLUMNS, columns), _condition(where, GROUP_COLUMNS)
        read = partial(_table, columns=wanted)
        frames = [
            self._apply(shard, np.flatnonzero(include_superseded | ~shard.superseded), keep, read)
            for shard in self.index.shards
        ]
        return _joined([frame for frame in frames if frame is not None], list(wanted))

    def tokens(self, episode_id: int | Sequence[int]) -> pd.DataFrame:
        """One row per completion token of an episode, or of several, in the order asked for.

        Columns episode_id, position, token_id, logprob (nats), policy_version, loss_mask. Raises
        AnalysisError for an id that is no episode's.
        """
        ids = np.atleast_1d(episode_id).tolist()
        found: dict[int, dict[str, Array]] = {}
        for part in self._at(ids, _tokens_of):
            found |= part
        self._refuse_unknown(ids, found)
        ids = [i for i in ids if i in found]
        lengths = [len(found[i]["token_id"]) for i in ids]
        columns = {
            "episode_id": np.repeat(np.array(ids, "i8"), lengths),
            "position": np.concatenate([np.arange(n) for n in [0, *lengths]]),
        }
        for name in TOKEN_COLUMNS:
            none = np.empty(0, BY_PATH[f"tokens/{name}"].dtype)
            columns[name] = np.concatenate([none, *(found[i][name] for i in ids)])
        return pd.DataFrame(columns)

    def steps(self) -> pd.DataFrame:
        """One row per committed step: step, attempt, n_groups, n_dropped, and the trainer's metrics
        of that step, its evaluation's too."""
        facts = [
            {"step": step, "attempt": m.attempt, "n_groups": len(m.groups)}
            | {"n_dropped": len(m.dropped)}
            for step, m in self.index.manifests.items()
        ]
        table = pd.DataFrame(facts, columns=["step", "attempt", "n_groups", "n_dropped"])
        metrics = self.metrics("trainer").drop(columns=["process", "attempt"])
        return table.merge(metrics.groupby("step").last().reset_index(), on="step", how="left")

    def metrics(self, process: str | None = None) -> pd.DataFrame:
        """Every row that a process (by default each) logged, as it logged it: process, step,
        attempt, time_unix, and one column per metric. Steps taken again are there once."""
        names = [process] if process else sorted(p.stem for p in self.run.metrics.glob("*.jsonl"))
        starts = read_resumed_from(self.run)
        rows: list[Row] = []
        for name in names:
            logged = valid_rows(read_metrics(self.run.metrics_file(name)), starts)
            rows += [{"process": name} | row for row in logged]
        columns = dict.fromkeys(["process", "step", "attempt", "time_unix"])
        columns |= dict.fromkeys(key for row in rows for key in row)
        return pd.DataFrame(rows, columns=list(columns))

    def _apply(
        self,
        shard: ShardEntry,
        rows: Array,
        keep: Rows,
        action: Callable[[OpenShard, Array], T],
    ) -> T | None:
        """`action` of those `rows` that `keep` lets through; None if there are none, or the shard
        is damaged."""

        def read(file: h5py.File) -> T | None:
            opened = OpenShard(file, shard)
            chosen = keep(opened, rows)
            return action(opened, chosen) if len(chosen) else None

        return self.index.read(shard.path, read) if len(rows) else None

    def _pick(
        self, ids: list[int], columns: Sequence[str] | None, where: str | None
    ) -> pd.DataFrame:
        """The episodes of `ids`, in that order."""
        known = self.episode_columns()
        wanted, keep = _chosen(known, columns), _condition(where, known)
        names, wanted = list(wanted), {"episode_id": known["episode_id"], **wanted}
        batches = self._at(ids, lambda of, rows: _table(of, keep(of, rows), wanted))
        found = _joined(batches, list(wanted)).set_index("episode_id", drop=False)
        if where is None:
            self._refuse_unknown(ids, found.index)
        return found.loc[[i for i in ids if i in found.index], names].reset_index(drop=True)

    def _at(self, ids: list[int], action: Callable[[OpenShard, Array], T]) -> list[T]:
        """`action` of each shard that holds some of the episodes `ids`, open, and their rows."""
        groups: dict[int, set[int]] = {}
        for episode_id in ids:
            place = self._places.get(episode_id // MAX_SAMPLES)
            if place is None:
                raise self._no_episode(episode_id)
            groups.setdefault(place[0], set()).add(place[1])

        def keep(shard: OpenShard, rows: Array) -> Array:
            return rows[np.isin(shard["episodes/episode_id"][rows], ids)]

        results = []
        for number, places in groups.items():
            shard = self.index.shards[number]
            spans = [np.arange(*shard.episode_offsets[[p, p + 1]]) for p in sorted(places)]
            results.append(self._apply(shard, np.concatenate(spans), keep, action))
        return [result for result in results if result is not None]

    def _refuse_unknown(self, ids: list[int], found: Container[int]) -> None:
        """Raise for an id that is in none of its group's places, unless that shard is damaged."""
        for i in ids:
            shard = self.index.shards[self._places[i // MAX_SAMPLES][0]]
            if i not in found and shard.path not in self.damaged:
                raise self._no_episode(i)

    def _no_episode(self, episode_id: int) -> AnalysisError:
        return AnalysisError(
            f"{self.run.root}: no episode {episode_id}. An id is group_id * {MAX_SAMPLES} + the "
            "index in the group; episodes(['episode_id']) lists those there are."
        )

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """Number of the shard and index in it of every group that counts, by group id."""
        return {
            group_id: (number, p)
            for number, shard in enumerate(self.index.shards)
            for p, (group_id, superseded) in enumerate(
                zip(shard.group_ids.tolist(), shard.superseded.tolist(), strict=True)
            )
            if not superseded
        }


class RunSet:
    """Several runs as one: the tables of `RunData`, with the column `run` and one column for each
    dotted key in which their configurations differ."""

    def __init__(self, runs: Sequence[RunData]) -> None:
        self.runs = list(runs)

    @cached_property
    def varied(self) -> list[str]:
        """Dotted keys whose values differ between the runs, names and places apart."""
        keys = dict.fromkeys(key for run in self.runs for key in run.config)
        ignored = ("run.name", "run.runs_dir")
        values = {key: {repr(run.config.get(key)) for run in self.runs} for key in keys}
        return [key for key in keys if len(values[key]) > 1 and key not in ignored]

    def episodes(
        self, columns: Sequence[str] | None = None, where: str | None = None
    ) -> pd.DataFrame:
        """As `RunData.episodes`."""
        return self._joined([run.episodes(columns, where) for run in self.runs])

    def groups(
        self, columns: Sequence[str] | None = None, where: str | None = None
    ) -> pd.DataFrame:
        """As `RunData.groups`."""
        return self._joined([run.groups(columns, where) for run in self.runs])

    def steps(self) -> pd.DataFrame:
        """As `RunData.steps`."""
        return self._joined([run.steps() for run in self.runs])

    def metrics(self, process: str | None = None) -> pd.DataFrame:
        """As `RunData.metrics`."""
        return self._joined([run.metrics(process) for run in self.runs])

    def _joined(self, frames: list[pd.DataFrame]) -> pd.DataFrame:
        for run, frame in zip(self.runs, frames, strict=True):
            for at, key in enumerate(self.varied):
                value = run.config.get(key)
                frame.insert(at, key, str(value) if isinstance(value, list) else value)
            frame.insert(0, "run", run.name)
        filled = [frame for frame in frames if len(frame)]
        return pd.concat(filled or frames[:1], ignore_index=True)


def _chosen(
    known: Mapping[str, TableColumn], names: Sequence[str] | None
) -> dict[str, TableColumn]:
    if names is None:
        return dict(known)
    for name in names:
        if name not in known:
            raise AnalysisError(f"no column {name!r}. {nearest(name, known)}")
    return {name: known[name] for name in names}


def _condition(where: str | None, known: Mapping[str, TableColumn]) -> Rows:
    """What lets the rows through for which `where` holds; all without. Raises AnalysisError."""
    if where is None:
        return lambda shard, rows: rows
    quoted = re.findall(r"`([^`]+)`", where)
    try:
        tree = ast.parse(re.sub(r"`[^`]+`", "0", where), mode="eval")
    except SyntaxError as error:
        raise AnalysisError(
            f'where {where!r}: {error.msg}. Expected a condition such as "reward > 0.5 and '
            "task == 'addition'\"."
        ) from error
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    columns = _chosen(known, sorted(names.union(quoted)))

    def keep(shard: OpenShard, rows: Array) -> Array:
        try:
            frame = _table(shard, rows, columns).query(where, engine="python")
        except (ValueError, TypeError, AttributeError, KeyError, NotImplementedError) as error:
            raise AnalysisError(f"where {where!r}: {error}.") from error
        kept: Array = rows[frame.index.to_numpy()]
        return kept

    return keep


def _table(shard: OpenShard, rows: Array, columns: Mapping[str, TableColumn]) -> pd.DataFrame:
    return pd.DataFrame({name: column.read(shard, rows) for name, column in columns.items()})


def _joined(batches: list[pd.DataFrame], names: list[str]) -> pd.DataFrame:
    """One frame of frames with the same columns; empty, with the columns, of none."""
    if not batches:
        return pd.DataFrame(columns=names)
    columns: dict[str, Any] = {}
    for name in batches[0].columns:
        pieces = [batch[name] for batch in batches]
        if isinstance(pieces[0].dtype, pd.CategoricalDtype):  # of which each shard has its own
            columns[name] = pd.api.types.union_categoricals(pieces)
        else:
            columns[name] = pd.concat(pieces, ignore_index=True)
    return pd.DataFrame(columns)


def _tokens_of(shard: OpenShard, rows: Array) -> dict[int, dict[str, Array]]:
    """The token columns of each episode in `rows`, by its id."""
    ids, offsets = shard["episodes/episode_id"][rows], shard["episodes/token_offsets"]
    return {
        int(i): {name: shard.span(f"tokens/{name}", *offsets[[r, r + 1]]) for name in TOKEN_COLUMNS}
        for i, r in zip(ids, rows, strict=True)
    }


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
