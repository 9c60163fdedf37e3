"""Exceptions that a user meets, and the exit code that each one ends a process with.

The exit code is the only thing that crosses from a role process to the supervisor when a role dies,
so it says what may be done next: whether a requeue can help (`INFRASTRUCTURE`) or not (all others).
"""

from __future__ import annotations


class ExitCode:
    """Process exit codes of the roles and of the supervisor."""

    OK = 0
    FAILURE = 1
    """An exception nobody expected."""
    CONFIG = 2
    """Something the user wrote is wrong; a requeue would fail the same way."""
    NON_FINITE = 3
    """The loss or the gradient is not a finite number."""
    SCORER = 4
    """The reward functions failed more often than `task.scorer.max_errors` allows."""
    INFRASTRUCTURE = 5
    """A deadline passed, a peer vanished or the file system refused: trying again may help."""
    STOPPED = 6
    """Asked to stop before the end; the run can be resumed."""


class SlurmGrpoError(Exception):
    """Base of every error this package raises on purpose; its text is meant for the user."""

    exit_code = ExitCode.FAILURE


class ConfigError(SlurmGrpoError):
    """A configuration, prompt file or model directory cannot be used. The text lists every problem
    found."""

    exit_code = ExitCode.CONFIG


class NonFiniteError(SlurmGrpoError):
    """A loss or gradient norm is NaN or infinite."""

    exit_code = ExitCode.NON_FINITE


class ScorerLimitExceeded(SlurmGrpoError):
    """More episodes failed to score than the run tolerates."""

    exit_code = ExitCode.SCORER


class DeadlineExceeded(SlurmGrpoError):
    """A wait ended without what it waited for; the text names who was missing and which log to
    read."""

    exit_code = ExitCode.INFRASTRUCTURE


class StorageError(SlurmGrpoError):
    """A file operation failed; the text names the file and the operation."""

    exit_code = ExitCode.INFRASTRUCTURE


class ShardError(StorageError):
    """A shard or manifest on disk is missing, incomplete, damaged or of an unknown schema."""


class SchemaVersionError(StorageError):
    """A shard was written by a newer program: it is whole, so it is refused but never put aside."""

    exit_code = ExitCode.CONFIG


class AnalysisError(SlurmGrpoError):
    """A question about a run that cannot be answered as it was asked: no such run, column or
    episode."""

    exit_code = ExitCode.CONFIG


class SyncError(SlurmGrpoError):
    """A weight transfer failed or its two sides disagree about the bytes."""

    exit_code = ExitCode.INFRASTRUCTURE


class Stopped(SlurmGrpoError):
    """The control plane told this process to end before its work was done."""

    exit_code = ExitCode.STOPPED


class SlurmUnavailable(SlurmGrpoError):
    """Slurm's commands are not on this machine, or its controller does not answer."""

    exit_code = ExitCode.INFRASTRUCTURE


class SubmissionRefused(SlurmGrpoError):
    """Slurm did not take a job; the text has its words."""

    exit_code = ExitCode.CONFIG


class JobFailed(SlurmGrpoError):
    """A job that was waited for ended without success; the text ends with its last words."""


class LockLost(SlurmGrpoError):
    """Another supervisor has taken over this one's run directory."""

    exit_code = ExitCode.STOPPED


class MessageError(SlurmGrpoError):
    """A peer sent something the control plane does not understand: a bug in that peer."""
