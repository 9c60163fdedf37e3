"""What a login node imports: no torch, vLLM, h5py or transformers, and in little time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIGHT = [
    *(ROOT / "slurm_grpo").glob("*.py"),
    *(ROOT / "slurm_grpo/slurm").glob("*.py"),
    *(ROOT / "slurm_grpo/commands").glob("*.py"),
    *(ROOT / "slurm_grpo/tasks").glob("*.py"),
    *(ROOT / "launch").glob("*.py"),
]
SCRIPT = """
import importlib.util, sys, time
heavy = {"torch", "vllm", "torchtitan", "transformers", "h5py", "tokenizers", "wandb"}
for number, path in enumerate(sys.argv[1:]):
    spec = importlib.util.spec_from_file_location(f"light_{number}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    start = time.process_time()
    spec.loader.exec_module(module)
    found = heavy & set(sys.modules)
    assert not found, f"{path} imports {sorted(found)}"
    if time.process_time() - start > 0.5:
        print(f"{path} takes long to import")
"""


def test_root_slurm_tasks_and_launch_import_nothing_heavy() -> None:
    command = [sys.executable, "-c", SCRIPT, *map(str, sorted(LIGHT))]

    def slow_ones() -> str:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "" in (slow_ones() for _ in range(3))


def test_package_init_files_are_empty_but_for_the_analysis_library() -> None:
    filled = [p for p in (ROOT / "slurm_grpo").rglob("__init__.py") if p.read_text()]
    assert filled == [ROOT / "slurm_grpo/analysis/__init__.py"]


def test_vllm_and_torchtitan_are_imported_where_they_belong() -> None:
    for path in (ROOT / "slurm_grpo").rglob("*.py"):
        place = str(path.relative_to(ROOT / "slurm_grpo"))
        lines = [line.strip() for line in path.read_text().splitlines()]
        if any(line.startswith(("import vllm", "from vllm")) for line in lines):
            assert place in ("generator/engine.py", "generator/weight_receiver.py")
        if any(line.startswith(("import torchtitan", "from torchtitan")) for line in lines):
            assert place.startswith("trainer/")


def test_naming_the_analysis_library_imports_no_pandas() -> None:
    code = "import sys, slurm_grpo.analysis; assert 'pandas' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_reading_a_run_needs_no_torch() -> None:
    code = """
import sys
from slurm_grpo.analysis import columns, diff, export, frame, schema, show, summary_table
found = {"torch", "vllm", "torchtitan", "transformers", "tokenizers"} & set(sys.modules)
assert not found, found
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_command_without_its_library_says_what_to_install() -> None:
    code = """
import sys
sys.modules["pandas"] = None  # as where it is not installed
from slurm_grpo.commands.main import main
sys.exit(main(["episodes", "summary", "runs/any"]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        "error: pandas is missing: pip install 'slurm_grpo[analysis]'\n",
    )
