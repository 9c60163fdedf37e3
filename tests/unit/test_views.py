"""Changes to a view lead from the old one to the new one."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from slurm_grpo.control.views import apply_changes, view_changes

KEYS = st.sampled_from("abcd")
VALUES = st.recursive(
    st.none() | st.integers(0, 2) | st.lists(st.integers(0, 2), max_size=2),
    lambda inner: st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
VIEWS = st.dictionaries(KEYS, VALUES, max_size=4)


@given(VIEWS, VIEWS)
def test_changes_lead_to_the_new_view_and_leave_the_old_one(
    old: dict[str, Any], new: dict[str, Any]
) -> None:
    before = json.dumps(old)
    changes = json.loads(json.dumps(view_changes(old, new)))
    assert apply_changes(old, changes) == new
    assert json.dumps(old) == before
    assert not view_changes(new, new)


def test_one_card_of_many_travels_alone() -> None:
    cards = {f"engine-{k}": {"version": 1, "groups": [k]} for k in range(256)}
    new = cards | {"engine-7": {"version": 2, "groups": [7]}}
    assert view_changes({"engines": cards}, {"engines": new}) == {
        "in": {"engines": {"in": {"engine-7": {"set": {"version": 2}}}}}
    }
