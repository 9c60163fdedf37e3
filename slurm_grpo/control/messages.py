"""The messages that peers may send, and what each must hold.

Peers send events upwards (`kind` and a JSON object, whose keys are the arguments of the scheduler's
`_on_<kind>`); the only thing that travels downwards is a peer's view. Engines are called by peer
name (`engine-0`) wherever a view or a message lists them. Knows neither sockets nor state.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias, get_args, get_origin, get_type_hints

from slurm_grpo.errors import MessageError
from slurm_grpo.peers import LEADER, parse_peer

Body: TypeAlias = dict[str, Any]

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


def check_body(peer: str, kind: str, body: Any, handler: Callable[..., None]) -> None:
    """Raise MessageError unless `body` has what the method `handler` takes, and perhaps more."""
    if not isinstance(body, dict):
        raise MessageError(f"{peer}: {kind}: the body is no object: {str(body)[:200]}.")
    arguments = _arguments(getattr(handler, "__func__", handler))
    if missing := arguments.keys() - body.keys():
        raise MessageError(f"{peer}: {kind}: {', '.join(sorted(missing))} missing.")
    for name, expected in arguments.items():
        if not _fits(body[name], expected):
            raise MessageError(
                f"{peer}: {kind}: {name} has the unusable value {str(body[name])[:200]!r}."
            )


@functools.cache
def _arguments(handler: Callable[..., None]) -> dict[str, Any]:
    """The annotation of every argument that a message fills: those before the `/` are its own."""
    hints = get_type_hints(handler)
    parameters = inspect.signature(handler).parameters.values()
    return {p.name: hints[p.name] for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}


def _fits(value: Any, expected: Any) -> bool:
    """Whether a JSON value is what an annotation says; numbers that count are not negative."""
    if expected is Any:
        return True
    if expected is int:
        return type(value) is int and value >= 0
    if expected is float:
        return type(value) in (int, float)
    if expected == Body:  # a shard, as `ShardRef.to_json` writes it
        return (
            isinstance(value, dict)
            and isinstance(value.get("path"), str)
            and isinstance(value.get("groups"), list | tuple)
            and all(isinstance(g, dict) and _fits(g.get("group_id"), int) for g in value["groups"])
        )
    if get_origin(expected) is list:
        [item] = get_args(expected)
        return isinstance(value, list | tuple) and all(_fits(v, item) for v in value)
    return isinstance(value, expected)
