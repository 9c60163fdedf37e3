"""What changed in a peer's view, so that a view of hundreds of engines is not sent again for each
of their messages. Pure: the server makes changes, the client applies them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

View: TypeAlias = dict[str, Any]
"""A JSON object; its values are replaced, never changed."""

Changes: TypeAlias = dict[str, Any]
"""`set`: values by key; `in`: changes to objects by key; `gone`: keys. Empty ones are left out."""


def view_changes(old: View, new: View) -> Changes:
    """What turns `old` into `new`; empty if they are equal."""
    values: View = {}
    inner: dict[str, Changes] = {}
    for key, value in new.items():
        before = old.get(key)
        if before is value and key in old:
            continue
        if isinstance(value, dict) and isinstance(before, dict):
            if changes := view_changes(before, value):
                inner[key] = changes
        elif before != value or key not in old:
            values[key] = value
    gone = [key for key in old if key not in new]
    return {name: part for name, part in (("set", values), ("in", inner), ("gone", gone)) if part}


def apply_changes(old: View, changes: Changes) -> View:
    """The view that `changes` lead to; `old` stays as it is."""
    inner = {key: apply_changes(old[key], c) for key, c in changes.get("in", {}).items()}
    new = {**old, **inner, **changes.get("set", {})}
    for key in changes.get("gone", ()):
        del new[key]
    return new
