"""`from slurm_grpo.analysis import open_run, open_runs`; pandas is imported only then."""

from typing import Any

__all__ = ["open_run", "open_runs"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from slurm_grpo.analysis import frame

    return getattr(frame, name)
