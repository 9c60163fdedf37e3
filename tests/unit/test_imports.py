"""What a login node imports: no torch, vLLM, h5py or transformers, and in little time."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    ("errors", "types", "peers", "fsio"),
    ("config",),
    ("slurm",),
    ("run",),
    ("tasks", "algorithms"),
    ("checks", "control"),
    ("weights", "staging"),
    ("generator", "trainer"),
    ("supervisor",),
    ("jobs", "sweeps"),
    ("analysis",),
    ("commands",),
)
"""A room imports from those above it, never from those below or beside it."""
LIGHT = [
    *(ROOT / "slurm_grpo").glob("*.py"),
    *(
        path
        for room in ("config", "slurm", "tasks", "checks", "supervisor", "jobs", "sweeps")
        for path in (ROOT / "slurm_grpo" / room).glob("*.py")
    ),
    *(ROOT / "slurm_grpo/commands").glob("*.py"),
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


def test_imports_run_one_way_from_room_to_room() -> None:
    floor = {name: i for i, names in enumerate(ROOMS) for name in names}
    places = {p.stem if p.is_file() else p.name for p in (ROOT / "slurm_grpo").glob("[a-z]*")}
    assert places == set(floor)
    upwards = [
        f"{path.relative_to(ROOT)} imports slurm_grpo.{target}"
        for path in (ROOT / "slurm_grpo").rglob("*.py")
        for target in imported_rooms(path)
        if (room := room_of(path)) != target and floor[room] <= floor[target]
        if room not in ROOMS[0] or target not in ROOMS[0]
    ]
    assert upwards == []


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "slurm_grpo").parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """Of the package, also inside functions; by the module that a name comes from."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("slurm_grpo.")}


def test_package_init_files_are_empty_but_for_the_analysis_library() -> None:
    filled = [p for p in (ROOT / "slurm_grpo").rglob("__init__.py") if p.read_text()]
    assert filled == [ROOT / "slurm_grpo/analysis/__init__.py"]


def test_vllm_and_torchtitan_are_imported_where_they_belong() -> None:
    for path in (ROOT / "slurm_grpo").rglob("*.py"):
        place = str(path.relative_to(ROOT / "slurm_grpo"))
        lines = [line.strip() for line in path.read_text().splitlines()]
        if any(line.startswith(("import vllm", "from vllm")) for line in lines):
            assert place in ("generator/engine.py", "weights/receiver.py")
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
