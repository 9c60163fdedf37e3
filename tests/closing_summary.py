"""What tests/run.sh prints last: each check with its time, each failed test, the totals.

Reads `checks.tsv` (name, exit code, seconds), one JUnit file per pytest call, and `not_run.tsv`
(name, reason) where this machine cannot run some. Exits with 1 if anything failed, or if no test
ran at all.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

_NO_TESTS_COLLECTED = 5


def summarize(results: Path) -> tuple[str, bool]:
    """The text, and whether everything passed."""
    lines, failures = ["", "=== summary"], []
    totals: Counter[str] = Counter()
    all_ok = True
    for line in (results / "checks.tsv").read_text().splitlines():
        name, code, seconds = line.split("\t")
        counts, failed = _read_junit(results / f"{name}.xml")
        totals += counts
        failures += failed
        is_empty = int(code) == _NO_TESTS_COLLECTED and not counts
        ok = int(code) == 0 or is_empty
        all_ok &= ok
        outcome = "no tests" if is_empty else "ok" if ok else f"FAILED (exit code {code})"
        told = ", ".join(f"{n} {what}" for what, n in counts.items() if n)
        lines.append(f"{name:<12} {int(seconds):>5} s  {outcome:<9} {told}".rstrip())
    lines += [f"FAILED {test}" for test in failures]
    if (not_run := results / "not_run.tsv").is_file():
        for line in not_run.read_text().splitlines():
            name, reason = line.split("\t", 1)
            lines.append(f"!!! NOT RUN: {name}: {reason}")
    n_failed = totals["failed"]
    lines.append(f"{totals['passed']} passed, {n_failed} failed, {totals['skipped']} skipped")
    return "\n".join(lines), all_ok and totals["passed"] > 0


def _read_junit(path: Path) -> tuple[Counter[str], list[str]]:
    """Tests of one pytest call by outcome, and the names of those that failed."""
    counts: Counter[str] = Counter()
    failed = []
    if path.is_file():
        for case in ET.parse(path).iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                counts["failed"] += 1
                failed.append(f"{case.get('classname')}::{case.get('name')}")
            elif case.find("skipped") is not None:
                counts["skipped"] += 1
            else:
                counts["passed"] += 1
    return counts, failed


if __name__ == "__main__":
    text, ok = summarize(Path(sys.argv[1]))
    print(text)
    sys.exit(not ok)
