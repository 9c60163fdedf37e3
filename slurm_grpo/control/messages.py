"""Names of the peers and the messages they may send.

Peers send events upwards (`kind` and a JSON object, whose keys are the arguments of the scheduler's
`_on_<kind>`); the only thing that travels downwards is a peer's view. Engines are called by peer
name (`engine-0`) wherever a view or a message lists them. Knows neither sockets nor state.
"""

from __future__ import annotations

import re
from typing import Any, TypeAlias

from slurm_grpo.errors import SlurmGrpoError

Body: TypeAlias = dict[str, Any]

LEADER = "trainer-0"


class MessageError(SlurmGrpoError):
    """A peer sent something the control plane does not understand: a bug in that peer."""


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


_ANY_ROLE = frozenset(("hello", "heartbeat"))
_ENGINE = _ANY_ROLE | frozenset(
    "ready at_door received receive_failed installed announce eval_result".split()
)
_LEADER = _ANY_ROLE | frozenset(
    "trainer_store begin open_door sync_failed commit consumed lost evaluate progress "
    "finish".split()
)


def check_kind(peer: str, kind: str) -> None:
    """Raise MessageError unless `peer` may send messages of this `kind`."""
    role, _ = parse_peer(peer)
    known = _ENGINE if role == "engine" else _LEADER if peer == LEADER else _ANY_ROLE
    if kind not in known:
        raise MessageError(
            f"{peer}: unknown message {kind!r}; expected one of {', '.join(sorted(known))}."
        )
