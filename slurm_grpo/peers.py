"""What the processes of a run are called: `engine-3`, `trainer-0`."""

from __future__ import annotations

import re

from slurm_grpo.errors import MessageError

LEADER = "trainer-0"


def engine_name(engine_id: int) -> str:
    return f"engine-{engine_id}"


def trainer_name(trainer_rank: int) -> str:
    return f"trainer-{trainer_rank}"


def parse_peer(peer: str) -> tuple[str, int]:
    """`engine-3` to ("engine", 3); raises MessageError for anything that is not a role's name."""
    match = re.fullmatch(r"(engine|trainer)-(\d{1,6})", peer)
    if match is None:
        raise MessageError(
            f"control plane: no peer is called {peer!r}; expected engine-<k> or trainer-<rank>."
        )
    return match[1], int(match[2])
