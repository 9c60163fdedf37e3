"""One GRPO step here against one of TRL's GRPOTrainer: same model, prompts, batch, threads.

Both train SmolLM2-135M-Instruct on `addition`, 8 prompts x 8 episodes of up to 24 new tokens,
with the quickstart's optimizer and loss settings. TRL gets what suits it best on this hardware: it
generates the whole step at once by transformers with a KV cache (its vLLM modes need CUDA), trains
in micro-batches of --trl-microbatch sequences without gradient checkpointing (all 64 at once need
11 GB), has no reference model (beta 0), no second forward pass for old log-probabilities (one
iteration), and the fused AdamW. Every precision asked for is measured and the fastest taken:

  autocast  float32 weights under bf16 autocast, what TRL's bf16=True does and nearest to ours
  float32   float32 throughout
  bfloat16  bf16 weights and optimizer states: not the same training, an outer bound (not counted)

Runs alone on the machine: python tests/bench/bench_trl.py [--steps 8] [--side both|trl|ours]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_line import print_bench_line, spread
from slurm_grpo.config.schema import TaskConfig
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.metrics import read_metrics
from slurm_grpo.tasks.judges import last_number
from slurm_grpo.tasks.registry import build_prompt_source
from slurm_grpo.tasks.render import render_prompt

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("SLURM_GRPO_CACHE") or "~/.cache/slurm_grpo").expanduser()
N_PROMPTS, GROUP_SIZE, MAX_NEW_TOKENS = 8, 8, 24
N_WARMUP = 2
COUNTED = ("autocast", "float32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=CACHE / "SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=8, help="measured steps a variant")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--side", choices=["both", "trl", "ours"], default="both")
    parser.add_argument("--precisions", nargs="+", default=["autocast", "float32"])
    parser.add_argument("--trl-microbatch", type=int, default=16, help="sequences, divides 64")
    parser.add_argument("--trl-child", metavar="PRECISION", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trl_child:
        print(json.dumps(train_with_trl(args)))
        return
    line: dict[str, Any] = {"threads": args.threads}
    if args.side in ("both", "ours"):
        line["ours"] = measure_ours(args.model, args.steps, args.threads)
    if args.side in ("both", "trl"):
        line["trl"] = {p: measure_trl(args, p) for p in args.precisions}
    if args.side == "both":
        best = min(line["trl"][p]["step_s"]["median"] for p in args.precisions if p in COUNTED)
        line["trl_step_s_median"] = best
        line["ratio"] = round(line["ours"]["step_s"]["median"] / best, 4)
    print_bench_line("trl", line)


def measure_ours(model: Path, steps: int, threads: int) -> dict[str, Any]:
    """A real run of the quickstart, shortened, without evaluations, on TRL's batch."""
    with tempfile.TemporaryDirectory(prefix="bench_trl_") as runs_dir:
        options = {
            "model.path": model,
            "run.runs-dir": runs_dir,
            "run.name": "ours",
            "run.steps": steps + N_WARMUP,
            "evaluation.n-prompts": 0,
            "trainer.checkpoint.every-steps": 0,
            "generator.threads": threads,
            "trainer.threads": threads,
            "algorithm.groups-per-step": N_PROMPTS,
            "algorithm.group-size": GROUP_SIZE,
            "generator.sampling.max-new-tokens": MAX_NEW_TOKENS,
        }
        command = [sys.executable, "launch/submit.py", "configs/quickstart.yaml"]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        # TRL trains on the 64 episodes it samples, whatever they say; here so do we.
        command.append("--algorithm.no-drop-zero-spread")
        _run(command, timeout_s=3600)
        run = RunDir(Path(runs_dir) / "ours")
        summary = json.loads(run.summary.read_text())
        rows = [r for r in read_metrics(run.metrics_file("trainer")) if "trainer/step_s" in r]
        # From the end of one step to the end of the next: whatever lies between steps counts.
        ends = [row["time_unix"] for row in rows]
        return {
            "step_s": spread(_gaps(ends)[N_WARMUP - 1 :]),
            "step_s_median_of_summary": summary["step_s_median"],
            "phase_s_median": summary["phase_s_median"],
        }


def measure_trl(args: argparse.Namespace, precision: str) -> dict[str, Any]:
    """`train_with_trl` in the environment that has TRL."""
    command = [_trl_python(), __file__, "--trl-child", precision, "--model", args.model]
    command += ["--steps", args.steps, "--threads", args.threads]
    command += ["--trl-microbatch", args.trl_microbatch]
    out = _run([str(part) for part in command], timeout_s=7200)
    return dict(json.loads(out.splitlines()[-1]))


def _trl_python() -> Path:
    """An environment that sees this one's packages and adds TRL; this one stays as it is."""
    requirements = Path(__file__).with_name("requirements-trl.txt")
    venv = CACHE / "bench-trl-venv"
    python, done = venv / "bin" / "python", venv / "done"
    wanted = f"{sys.prefix}\n{requirements.read_text()}"
    if not done.is_file() or done.read_text() != wanted:
        _run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(venv)])
        (site,) = venv.glob("lib/python*/site-packages")
        (here,) = Path(sys.prefix).glob("lib/python*/site-packages")
        (site / "base.pth").write_text(f"{here}\n")
        pip = [sys.executable, "-m", "pip", "--python", str(python)]
        _run([*pip, "install", "--quiet", "--no-deps", "-r", str(requirements)])
        done.write_text(wanted)
    return python


def _run(command: Sequence[str], timeout_s: float = 600) -> str:
    """Standard output of a command; its error output is shown if it fails."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=timeout_s, check=False
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n"
            f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return done.stdout


def _gaps(times: Sequence[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise(times)]


def train_with_trl(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds per step of TRL's trainer, end of step to end of step, without the warm-up."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    n_steps = args.steps + N_WARMUP
    ends, lengths, rewards = [], [], []

    def reward(
        completions: list[str], target: list[int], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        scores = [float(last_number(t, a)) for t, a in zip(completions, target, strict=True)]
        lengths.append(sum(map(len, completion_ids)) / len(completion_ids))
        rewards.append(sum(scores) / len(scores))
        return scores

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append((time.monotonic(), time.process_time()))

    with tempfile.TemporaryDirectory(prefix="bench_trl_") as output_dir:
        trl.GRPOTrainer(
            model=str(args.model),
            args=_trl_config(args, output_dir, n_steps),
            reward_funcs=reward,
            train_dataset=Dataset.from_list(_prompt_rows(tokenizer, N_PROMPTS * n_steps)),
            processing_class=tokenizer,
            callbacks=[Clock()],
        ).train()
    wall, cpu = ([e[i] for e in ends] for i in (0, 1))
    return {
        "step_s": spread(_gaps(wall)[N_WARMUP - 1 :]),
        "cpu_s": spread(_gaps(cpu)[N_WARMUP - 1 :]),
        "completion_tokens_mean": round(sum(lengths) / len(lengths), 1),
        "reward_mean": round(sum(rewards) / len(rewards), 3),
        "trl": trl.__version__,
    }


def _prompt_rows(tokenizer: Any, n_groups: int) -> list[dict[str, Any]]:
    """The quickstart's prompts as texts that TRL turns into the very same tokens."""
    source = build_prompt_source(TaskConfig(name="addition"), seed=0)
    prompts = [render_prompt(source.train_prompt(g), tokenizer) for g in range(n_groups)]
    assert all(tokenizer(p.text)["input_ids"] == p.token_ids.tolist() for p in prompts)
    return [{"prompt": p.text, "target": p.target} for p in prompts]


def _trl_config(args: argparse.Namespace, output_dir: str, n_steps: int) -> Any:
    import torch
    import trl

    precision = args.trl_child
    return trl.GRPOConfig(
        output_dir=output_dir,
        use_cpu=not torch.cuda.is_available(),
        bf16=precision == "autocast",
        model_init_kwargs={"dtype": "bfloat16" if precision == "bfloat16" else "float32"},
        max_steps=n_steps,
        per_device_train_batch_size=args.trl_microbatch,
        gradient_accumulation_steps=N_PROMPTS * GROUP_SIZE // args.trl_microbatch,
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_NEW_TOKENS,
        gradient_checkpointing=False,
        use_cache=True,
        optim="adamw_torch_fused",
        learning_rate=3e-5,
        adam_beta2=0.95,
        warmup_steps=3,
        lr_scheduler_type="constant_with_warmup",
        epsilon=0.2,
        epsilon_high=0.28,
        shuffle_dataset=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1000,
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main()
