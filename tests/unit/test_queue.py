"""What squeue and sacct print, read; the commands themselves are asked in tests/slurm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_commands import stub
from slurm_grpo.errors import SlurmUnavailable
from slurm_grpo.slurm.queue import (
    cancel_jobs,
    expand_indices,
    job_states,
    parse_sacct,
    parse_squeue,
)

# Recorded from Slurm 22.05.
SQUEUE = """\
1_0|4|COMPLETED|gen1|None|9:40|0:20|2026-11-30T05:18:34|/s/array.sh
1_4|1|PENDING||JobArrayTaskLimit|10:00|0:00|N/A|/s/array.sh
2+0|2|RUNNING|gen[1-2]|None|9:58|0:02|2026-11-30T05:28:55|/s/het.sh
2+1|3|PENDING||Resources|10:00|0:00|2026-11-30T05:28:55|/s/het.sh
9|9|RUNNING|a1|None|9:58|0:02|2026-11-30T05:18:55|/s/a|b.sh
"""
SACCT = """\
12+0|12|CANCELLED by 1000|gen1|None|00:00:05|2026-11-30T05:18:34
12+1|13|COMPLETED|train1|None|00:00:05|2026-11-30T05:18:34
14_[3-5,8%2]|14|PENDING|None assigned|JobArrayTaskLimit|00:00:00|Unknown
"""


def test_squeue_lines_are_told_apart_by_kind_of_job() -> None:
    states = parse_squeue(SQUEUE)
    assert [(s.job_id, s.component, s.task, s.own_id, s.state) for s in states] == [
        ("1", 0, 0, "4", "COMPLETED"),
        ("1", 0, 4, "1", "PENDING"),
        ("2", 0, None, "2", "RUNNING"),
        ("2", 1, None, "3", "PENDING"),
        ("9", 0, None, "9", "RUNNING"),
    ]
    assert states[2].nodes == "gen[1-2]"
    assert (states[3].reason, states[3].left, states[3].elapsed) == ("Resources", "10:00", "0:00")
    assert states[4].script == "/s/a|b.sh"
    assert [s.is_alive for s in states] == [False, True, True, True, True]


def test_sacct_lines_stand_for_every_element_they_name() -> None:
    states = parse_sacct(SACCT)
    assert [(s.job_id, s.component, s.task, s.state) for s in states] == [
        ("12", 0, None, "CANCELLED"),
        ("12", 1, None, "COMPLETED"),
        *(("14", 0, task, "PENDING") for task in (3, 4, 5, 8)),
    ]


NOTICE = "** Maintenance on Monday | all queues **"
HEADER = "JOBID|JOBID|STATE|NODELIST|REASON|TIME_LEFT|TIME|START_TIME|COMMAND"


def test_lines_that_slurm_did_not_write_are_skipped() -> None:
    assert parse_squeue(f"{NOTICE}\n{HEADER}\n\n{SQUEUE}{NOTICE}\n") == parse_squeue(SQUEUE)
    assert parse_sacct(f"{NOTICE}\n{SACCT}") == parse_sacct(SACCT)
    assert parse_squeue(SQUEUE.replace("1_4", "1_[x]")) == [
        s for s in parse_squeue(SQUEUE) if s.task != 4
    ]


def test_no_jobs_is_an_answer_and_a_notice_alone_is_none() -> None:
    assert parse_squeue(f"{NOTICE}\n{HEADER}\n") == []
    with pytest.raises(SlurmUnavailable, match=r"Slurm cannot be asked: squeue .*\n.*Maintenance"):
        parse_squeue(NOTICE)


def test_a_forgotten_job_is_unknown_whatever_else_squeue_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stub(tmp_path, "squeue", f"echo '{NOTICE}'; echo 'error: Invalid job id 7' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [s.state for s in job_states(["7"])["7"]] == ["UNKNOWN"]


def test_words_in_another_encoding_are_read_and_lead_back_to_their_paths(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = "9|9|RUNNING|a1|None|9:58|0:02|N/A|/r\\351seau/a.sh"
    stub(tmp_path, "squeue", f"printf 'Entretien pr\\351vu\\n{row}\\n'")
    monkeypatch.setenv("PATH", str(tmp_path))
    [job] = job_states(["9"])["9"]
    assert os.fsencode(job.script) == b"/r\xe9seau/a.sh"


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        ("0-3", [0, 1, 2, 3]),
        ("0-7%4", list(range(8))),
        ("1,3,5-9:2", [1, 3, 5, 7, 9]),
        ("12", [12]),
        ("", []),
    ],
)
def test_indices_are_expanded_as_sbatch_means_them(text: str, indices: list[int]) -> None:
    assert expand_indices(text) == indices


def test_without_slurm_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        SlurmUnavailable, match=r"squeue: no such command here\. Run this on a login"
    ):
        job_states(["1"])
    with pytest.raises(SlurmUnavailable, match="scancel: no such command"):
        cancel_jobs(["1"])


def test_nothing_asked_needs_no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert job_states([]) == {}
    cancel_jobs([])
