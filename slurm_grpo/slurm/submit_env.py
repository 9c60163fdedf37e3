"""Running `sbatch` as from a login shell, wherever it is called from.

Inside an allocation the surrounding job's variables would be flags of the new one (wrong CPU
binding, refused memory) or facts about it (its restart count). Knows nothing about scripts.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from slurm_grpo.errors import SlurmUnavailable, SubmissionRefused

# A surrounding Slurm step, mpirun or torchrun would make libraries in the role join the wrong
# party.
_LEFTOVER_PREFIXES = (
    "SLURM_",
    "SBATCH_",
    "SRUN_",
    "PMI_",
    "PMIX_",
    "OMPI_",
    "TORCHELASTIC_",
    "MASTER_",
)
_LEFTOVERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "WANDB_SERVICE",
    "WANDB_RUN_ID",
    "MKL_NUM_THREADS",
)
_KEPT = ("SLURM_CONF",)
_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
_TIMEOUT_S = 120.0


def is_leftover(name: str) -> bool:
    """Whether a surrounding job, mpirun or torchrun set this variable for its own processes."""
    return name not in _KEPT and (name.startswith(_LEFTOVER_PREFIXES) or name in _LEFTOVERS)


def clean_environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` without what a surrounding job, step or launcher has put there."""
    return {name: value for name, value in base.items() if not is_leftover(name)}


def leftovers(env: Mapping[str, str]) -> list[str]:
    """Names in `env` that a new job must not inherit, sorted."""
    return sorted(
        name
        for name in env
        if is_leftover(name)
        or name.startswith("SUBMITIT_")
        or (name in _DEVICES and "SLURM_JOB_ID" in env)  # numbers of another job's GPUs
    )


def require_sbatch() -> None:
    """Raise SlurmUnavailable where there is none."""
    if shutil.which("sbatch") is None:
        raise SlurmUnavailable(
            "sbatch: no such command here. Submit from a login node of the cluster, or put Slurm's "
            "bin directory on PATH; --dry-run works without Slurm, --cluster.kind local runs here."
        )


def run_sbatch(arguments: Sequence[str], *, script: str | None = None) -> str:
    """What `sbatch ARGUMENTS` says, on both streams; `script` is its standard input.

    Raises SubmissionRefused with Slurm's words, SlurmUnavailable where there is no sbatch.
    """
    require_sbatch()
    unwanted = leftovers(os.environ)
    try:
        done = subprocess.run(
            ["sbatch", *arguments],
            env={name: value for name, value in os.environ.items() if name not in unwanted},
            input=script or "",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise SlurmUnavailable(
            f"sbatch: no answer within {_TIMEOUT_S:.0f} s. The controller may be busy or down: try "
            "`sinfo`, and look with `squeue --me` whether the job was taken before trying again."
        ) from None
    if done.returncode:
        raise refusal(done.stdout)
    return done.stdout


def refusal(words: str) -> SubmissionRefused:
    """The error that passes on why sbatch refused."""
    advice = "Change cluster.* or site.* accordingly (--dry-run shows the script)"
    if "job array" in words:
        advice = (
            "Elements are numbered below MaxArraySize (`scontrol show config`); split the sweep"
        )
    return SubmissionRefused(
        f"sbatch refused the job:\n{words.strip()}\nNothing was submitted. {advice}, and submit "
        "again."
    )


def parse_job_id(text: str) -> str:
    """The id in what `sbatch --parsable` printed: `12` or `12;cluster`, whatever a site's banner
    says around it. Raises SubmissionRefused if there is none."""
    ids = re.findall(r"^(\d+)(?:;\S*)?$", text, flags=re.MULTILINE)
    if not ids:
        raise SubmissionRefused(
            f"sbatch printed no job id but:\n{text.strip()}\nLook with `squeue --me` whether the "
            "job is in the queue, and cancel it there before trying again."
        )
    return str(ids[-1])
