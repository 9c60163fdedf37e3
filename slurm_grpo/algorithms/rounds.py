"""How many groups to ask for at once, when some will turn out to carry no signal. Pure.

A step that drops groups would otherwise be generated in ever smaller rounds, each paying for a
whole decode. What is asked follows from the configuration and from committed manifests only, so
that a strict run repeats, and resumes, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

HISTORY_STEPS = 5
"""Steps that the share of useful groups is taken from: it drifts as the policy learns."""


def n_to_ask(missing: int, history: Sequence[tuple[int, int]], oversample: float) -> int:
    """Groups to generate so that `missing` useful ones may be expected among them.

    `history` holds (useful groups, groups looked at) of each step before; the last `HISTORY_STEPS`
    count. At least `missing`, at most `oversample` times as many; without a history, `missing`.
    """
    recent = history[-HISTORY_STEPS:]
    useful, looked_at = sum(u for u, _ in recent), sum(n for _, n in recent)
    if missing <= 0:
        return 0
    if not useful:
        return missing
    expected = -(-missing * looked_at // useful)
    return max(missing, min(expected, int(missing * oversample)))
