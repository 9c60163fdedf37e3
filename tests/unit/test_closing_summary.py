"""The last lines of tests/run.sh, which people and CI read."""

from __future__ import annotations

from pathlib import Path

from closing_summary import summarize

PASSED = '<testcase classname="tests.unit.test_a" name="test_good"/>'
FAILED = '<testcase classname="tests.unit.test_a" name="test_bad"><failure/></testcase>'
SKIPPED = '<testcase classname="tests.unit.test_a" name="test_gone"><skipped/></testcase>'


def write(results: Path, checks: str, **junit: str) -> Path:
    (results / "checks.tsv").write_text(checks)
    for name, cases in junit.items():
        (results / f"{name}.xml").write_text(
            f"<testsuites><testsuite>{cases}</testsuite></testsuites>"
        )
    return results


def test_everything_fine_ends_with_the_totals(tmp_path: Path) -> None:
    results = write(tmp_path, "lint\t0\t1\nunit\t0\t30\n", unit=PASSED + PASSED + SKIPPED)
    text, ok = summarize(results)
    assert ok
    assert text.splitlines()[-1] == "2 passed, 0 failed, 1 skipped"


def test_failed_test_is_named_and_fails_the_run(tmp_path: Path) -> None:
    results = write(tmp_path, "unit\t1\t30\n", unit=PASSED + FAILED)
    text, ok = summarize(results)
    assert not ok
    assert "FAILED tests.unit.test_a::test_bad" in text.splitlines()
    assert text.splitlines()[-1] == "1 passed, 1 failed, 0 skipped"


def test_group_without_tests_is_no_failure_but_a_run_without_tests_is(tmp_path: Path) -> None:
    checks = "unit\t0\t3\nmodel\t5\t2\n"
    text, ok = summarize(write(tmp_path, checks, unit=PASSED, model=""))
    assert ok
    assert "no tests" in text
    assert not summarize(write(tmp_path, "lint\t0\t1\n"))[1]


def test_what_this_machine_cannot_run_is_said_and_fails_nothing(tmp_path: Path) -> None:
    results = write(tmp_path, "unit\t0\t3\n", unit=PASSED)
    (results / "not_run.tsv").write_text("slurm\tonly root can start slurmd\n")
    text, ok = summarize(results)
    assert ok
    assert "!!! NOT RUN: slurm: only root can start slurmd" in text.splitlines()


def test_check_that_fails_without_tests_fails_the_run(tmp_path: Path) -> None:
    assert not summarize(write(tmp_path, "types\t1\t9\nunit\t0\t3\n", unit=PASSED))[1]


def test_pytest_that_crashed_before_its_report_fails_the_run(tmp_path: Path) -> None:
    assert not summarize(write(tmp_path, "integration\t-9\t9\nunit\t0\t3\n", unit=PASSED))[1]
