"""What every test may ask for: tiny models, the real one, golden files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from tiny_models import Family, make_tiny_model

# Before torch, vLLM or wandb is imported; inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("WANDB_MODE", "offline")

# An example takes as long as the machine's other work lets it; CI finds what its last run found.
hypothesis.settings.register_profile(
    "tests",
    deadline=None,
    derandomize=os.environ.get("CI") == "true",
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tests")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden")


@pytest.fixture(autouse=True)
def _whole_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each integration test, on Slurm too, ends with an audit of the episodes of its runs."""
    if request.path.parent.name not in ("integration", "slurm"):
        yield
        return
    folder: Path = request.getfixturevalue("tmp_path")
    yield
    import runs  # h5py

    runs.assert_whole(folder)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    """Makes, once per session and family, a random model of some 0.1 M parameters."""
    root = tmp_path_factory.mktemp("tiny_models")

    def model_dir(family: Family = "llama") -> Path:
        path = root / family
        return path if path.exists() else make_tiny_model(path, family)

    return model_dir


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The quickstart's model; only for tests marked `model`."""
    cache = os.environ.get("SLURM_GRPO_CACHE") or "~/.cache/slurm_grpo"
    path = Path(cache).expanduser() / "SmolLM2-135M-Instruct"
    if not (path / "config.json").is_file():
        pytest.fail(f"{path} is not there. `bash tests/run.sh` prepares it.")
    return path


@pytest.fixture
def check_golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a whole text with `tests/golden/<name>`; only --update-golden writes."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"{path} is missing: look at the text, then run with --update-golden"
        assert text == path.read_text(encoding="utf-8")

    return check
