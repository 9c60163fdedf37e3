"""`slurm-grpo episodes export RUN out.parquet`: one row per episode for other tools.

Goes through the run shard by shard, so that memory holds one shard of it. The file gets its name
once it is whole.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from slurm_grpo.analysis.columns import OpenShard
from slurm_grpo.analysis.frame import TOKEN_COLUMNS, RunData, open_run
from slurm_grpo.analysis.terminal import add_run, say, warn_of_damage
from slurm_grpo.errors import AnalysisError, ExitCode
from slurm_grpo.fsio import storage_errors
from slurm_grpo.run.checkpoints import partial
from slurm_grpo.staging.layout import Array


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    suffixes = ", ".join(WRITERS)
    parser.add_argument("out", type=Path, metavar="OUT", help=f"file to write: {suffixes}")
    parser.add_argument("--columns", metavar="A,B", help="those to write (default: all)")
    parser.add_argument("--where", help="a condition, such as \"step >= 3 and task == 'addition'\"")
    parser.add_argument(
        "--tokens", action="store_true", help="also token ids, log-probs, versions, as lists"
    )


def run(arguments: argparse.Namespace) -> int:
    opened = open_run(arguments.run)
    columns = arguments.columns.split(",") if arguments.columns else None
    n_rows = export_episodes(
        opened, arguments.out, columns=columns, where=arguments.where, tokens=arguments.tokens
    )
    say(f"{arguments.out}: {n_rows:,} episodes, {arguments.out.stat().st_size / 1e6:,.1f} MB")
    warn_of_damage(opened)
    return ExitCode.OK


def export_episodes(
    run: RunData,
    out: Path,
    *,
    columns: Sequence[str] | None = None,
    where: str | None = None,
    tokens: bool = False,
) -> int:
    """Write the episodes that `RunData.episodes` would give to `out`, by its suffix; their number.

    NaN and what is missing become null. `tokens` adds the lists `token_id`, `logprob`,
    `policy_version` and `loss_mask`. Raises AnalysisError for an unknown suffix, an unknown column,
    lists in a CSV file, or when there is no episode to write.
    """
    if out.suffix not in WRITERS:
        raise AnalysisError(f"{out}: suffix {out.suffix!r}; expected one of {', '.join(WRITERS)}.")
    if tokens and out.suffix == ".csv":
        raise AnalysisError(f"{out}: CSV has no lists. Write tokens to .parquet or .jsonl.")
    tables = _tables(run, columns, where, tokens=tokens)
    first = next(tables, None)
    if first is None:
        raise AnalysisError(f"{run.run.root}: no episode to write to {out}.")
    n_rows, unfinished = 0, partial(out)
    with storage_errors("write", out):
        try:
            with closing(WRITERS[out.suffix](unfinished, first.schema)) as writer:
                for table in itertools.chain([first], tables):
                    writer.write_table(table)
                    n_rows += table.num_rows
            os.replace(unfinished, out)
        finally:
            unfinished.unlink(missing_ok=True)
    return n_rows


def _tables(
    run: RunData, columns: Sequence[str] | None, where: str | None, *, tokens: bool
) -> Iterator[pa.Table]:
    """One Arrow table per shard, all of one schema: types depend on the columns, not on values."""
    wanted = run.chosen(columns)

    def read(shard: OpenShard, rows: Array) -> pa.Table:
        frame = pd.DataFrame({name: c.read(shard, rows) for name, c in wanted.items()})
        schema = pa.schema([(name, _arrow_type(dtype)) for name, dtype in frame.dtypes.items()])
        table = pa.Table.from_pandas(frame, schema=schema, preserve_index=False)
        for name in TOKEN_COLUMNS if tokens else ():
            table = table.append_column(name, _lists(shard, name, rows))
        return table.replace_schema_metadata(None)

    return run.map_shards(read, where)


def _arrow_type(dtype: Any) -> Any:
    """Texts stay texts even in a shard where all are missing, and categories become texts."""
    if isinstance(dtype, pd.Int64Dtype):
        return pa.int64()
    return pa.from_numpy_dtype(dtype) if dtype.kind in "iufb" else pa.string()


def _lists(shard: OpenShard, name: str, rows: Array) -> Any:
    offsets = shard["episodes/token_offsets"]
    lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), shard[f"tokens/{name}"])
    return lists if len(rows) == len(lists) else lists.take(pa.array(rows))


class JsonLines:
    """A JSON object per row, with the methods of pyarrow's writers, which has none for it."""

    def __init__(self, path: Path, schema: Any) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write_table(self, table: Any) -> None:
        self._file.writelines(json.dumps(row) + "\n" for row in table.to_pylist())

    def close(self) -> None:
        self._file.close()


def _parquet(path: Path, schema: Any) -> Any:
    """Dictionaries for what repeats; they only cost time on tokens and texts."""
    repeating = [n for n in ("task", "shard", "finish_reason") if n in schema.names]
    return pa.parquet.ParquetWriter(
        path, schema, compression="zstd", compression_level=1, use_dictionary=repeating
    )


WRITERS = {".parquet": _parquet, ".csv": pa.csv.CSVWriter, ".jsonl": JsonLines}
"""By suffix of the file."""
