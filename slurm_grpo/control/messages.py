"""Names of the peers and the messages they may send; checked once, where a message enters the
scheduler.

Peers send events upwards (`kind` and a JSON object); the only thing that travels downwards is a
peer's view. Engines are called by peer name (`engine-0`) wherever a view or a message lists them.
Knows neither sockets nor state.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from slurm_grpo.errors import SlurmGrpoError

Body: TypeAlias = dict[str, Any]
Check: TypeAlias = Callable[[Any], bool]

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


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _anything(value: Any) -> bool:
    return True


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_count, value))


def _shard(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and _text(value.get("path"))
        and isinstance(value.get("groups"), (list, tuple))
        and all(isinstance(g, dict) and _count(g.get("group_id")) for g in value["groups"])
    )


def _shards(value: Any) -> bool:
    return isinstance(value, list) and all(map(_shard, value))


_HELLO: Mapping[str, Check] = {"host": _text, "pid": _count, "log": _text}
_ANY_ROLE: Mapping[str, Mapping[str, Check]] = {
    "hello": _HELLO,
    "heartbeat": {},
}

ENGINE_MESSAGES: Mapping[str, Mapping[str, Check]] = {
    **_ANY_ROLE,
    "ready": {"probe": _counts},
    "at_door": {"epoch": _count, "version": _count},
    "received": {"epoch": _count, "version": _count, "digest": _anything},
    "receive_failed": {"epoch": _count, "version": _count, "error": _text},
    "installed": {"version": _count},
    "announce": {"shard": _shard},
    "eval_result": {
        "eval_id": _text,
        "start": _count,
        "stop": _count,
        "n": _count,
        "n_judged": _count,
        "n_correct": _count,
        "reward_sum": _number,
        "n_tokens": _count,
        "n_truncated": _count,
    },
}
LEADER_MESSAGES: Mapping[str, Mapping[str, Check]] = {
    **_ANY_ROLE,
    "trainer_store": {"address": _text},
    "begin": {
        "next_group": _count,
        "n_dropped": _count,
        "consumed": _counts,
        "available": _shards,
    },
    "open_door": {"version": _count, "store": _text},
    "sync_failed": {"epoch": _count, "version": _count, "reason": _text},
    "commit": {"epoch": _count, "version": _count},
    "consumed": {"step": _count, "group_ids": _counts, "dropped": _counts},
    "lost": {"group_ids": _counts},
    "evaluate": {"eval_id": _text, "version": _count, "n": _count},
    "progress": {},
    "finish": {"status": _text},
}


def check_message(peer: str, kind: str, body: Any) -> None:
    """Raise MessageError unless `peer` may send `kind` with this body. Unknown keys are let
    through.
    """
    role, _ = parse_peer(peer)
    known = (
        ENGINE_MESSAGES if role == "engine" else LEADER_MESSAGES if peer == LEADER else _ANY_ROLE
    )
    if kind not in known:
        raise MessageError(
            f"{peer}: unknown message {kind!r}; expected one of {', '.join(sorted(known))}."
        )
    if not isinstance(body, dict):
        raise MessageError(
            f"{peer}: {kind}: the body is a {type(body).__name__}, expected an object."
        )
    for key, check in known[kind].items():
        if key not in body:
            raise MessageError(f"{peer}: {kind}: key {key!r} is missing.")
        if not check(body[key]):
            raise MessageError(
                f"{peer}: {kind}: {key} has the unusable value {str(body[key])[:200]!r}."
            )
