"""Keeping a peer's view up to date by sending what changed: one of hundreds of engines is not sent
again for each of their messages.

Pure. The server has a `SentView` for each connection, the client a `HeldView`. Whatever is lost on
the way, the peer holds the newest view after its next heartbeat, which says what it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

View: TypeAlias = dict[str, Any]
"""A JSON object; its values are replaced, never changed."""

Changes: TypeAlias = dict[str, Any]
"""`set`: values by key; `in`: changes to objects by key; `gone`: keys. Empty ones are left out."""


class SentView:
    """The view that a peer was sent last."""

    def __init__(self) -> None:
        self._view: View | None = None
        self.number = 0

    def news(self, view: View, have: int | None = None) -> dict[str, Any]:
        """What to tell a peer whose view is this now: its number, and all of it, changes, or
        nothing.

        `have` is the number of the view it holds, by its heartbeat.
        """
        before = self._view
        is_held = have in (None, self.number)
        if view is before and is_held:
            return {"number": self.number}
        self._view = view
        self.number += 1
        if before is None or not is_held:
            return {"number": self.number, "view": view}
        changes = view_changes(before, view)
        return {"number": self.number, "since": self.number - 1, "changes": changes}


class HeldView:
    """The view that a peer holds."""

    def __init__(self) -> None:
        self.view: View | None = None
        """A new object whenever it changed."""
        self.number = 0

    def take(self, news: Mapping[str, Any]) -> bool:
        """Bring the view up to date; False if what was sent before this never arrived."""
        if "view" in news:
            view = news["view"]
        elif self.view is not None and news.get("since") == self.number:
            view = apply_changes(self.view, news["changes"])
        else:
            return bool(news["number"] == self.number)
        self.number = news["number"]
        if view != self.view:
            self.view = view
        return True


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
