"""The words for the ends of processes."""

from __future__ import annotations

import pytest

from slurm_grpo.run.outcome import describe


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "killed by SIGKILL"),
        (-50, "killed by signal 50"),  # a real-time signal, which Python has no name for
        (2, "exit code 2, the configuration cannot be used"),
        (255, "exit code 255, unknown"),
    ],
)
def test_every_exit_code_has_words(code: int, words: str) -> None:
    assert describe(code) == words
