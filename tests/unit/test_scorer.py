"""Reward functions in their child process: judgements, failures, deadlines, speed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_grpo.config.schema import ScorerConfig
from slurm_grpo.errors import ConfigError, ScorerLimitExceeded
from slurm_grpo.run import proctree
from slurm_grpo.tasks.judges import exact, last_number, parse_number, regex_judge
from slurm_grpo.tasks.scorer import Scorer, ScoreResult

ROOT = Path(__file__).resolve().parents[2]
RIGHT = ScoreResult(reward=1.0, parts={"correct": 1.0}, error=None)
WRONG = ScoreResult(reward=0.0, parts={"correct": 0.0}, error=None)

REWARDS = '''
import os, sys, time

def length(text, target):
    return len(text)

def parts(text, target):
    return {"correct": float(text == target), "brief": 0.5}

def weighted(text, target):
    return {"correct": 1.0, "brief": 0.5, "reward": 3}

def by_text(text, target):
    """Does what the text says."""
    if text == "hang":
        time.sleep(3600)
    if text == "spin":
        while True:
            pass
    if text == "raise":
        raise RuntimeError("no idea")
    if text == "exit":
        sys.exit(3)
    if text == "die":
        os._exit(9)
    if text == "print":
        print("x" * 5_000_000)
    if text == "read":
        input()
    if text == "long error":
        raise ValueError("x" * 5_000_000)
    if text == "many parts":
        return {str(i): 0.0 for i in range(100_000)}
    if text == "nan":
        return float("nan")
    if text == "text":
        return "good"
    if text == "none":
        return None
    return text == target

def modules(text, target):
    return {name: float(name in sys.modules) for name in ("torch", "numpy", "vllm")}

def process(text, target):
    return os.getpid()
'''


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Scorer]]:
    """Makes scorers, with `rewards` as the user's module, and closes them."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    made: list[Scorer] = []

    def make(name: str, **settings: Any) -> Scorer:
        directory = str(tmp_path) if ":" in name else None
        made.append(Scorer(ScorerConfig(name=name, module_dir=directory, **settings)))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


@pytest.mark.parametrize(
    ("text", "target", "right"),
    [
        ("23 + 14 = 37", 37, True),
        ("23 + 14 = 37", "37", True),
        ("23 + 14=37.", 37, True),
        ("37\n", 37, True),
        ("It is **37**!", 37, True),
        ("= 1,024", 1024, True),
        ("$12,345,678.50", 12345678.5, True),
        ("1,2", 2, True),
        ("1, 2, 3", 3, True),
        ("5 - 12 = -7", -7, True),
        ("5 - 12 = \u22127", -7, True),
        ("20-13", 13, True),
        ("20 - 13", 13, True),
        ("x=-13", -13, True),
        ("(-13)", -13, True),
        ("37.0", 37, True),
        ("1,2", 12, False),
        ("1,5", 15, False),
        ("12,34", 1234, False),
        ("0,123", "0.123", False),
        ("= 12 345", 12345, True),
        ("= 12\u202f345", 12345, True),
        ("1{,}024", 1024, True),
        ("1e3", 1000, True),
        ("about 2.5E-1", 0.25, True),
        ("6 \\times 10^{3}", 6000, True),
        ("2 \u00d7 10\u00b3", 2000, True),
        ("- 5", -5, True),
        ("x = - 5", -5, True),
        ("Answers:\n- 5", 5, True),
        ("pages 10\u201320", 20, True),
        ("= \u20135", -5, True),
        ("-$5", -5, True),
        ("\u0663\u066b\u0661\u0664", 3.14, True),
        ("3.14", "3.14", True),
        ("about .5", 0.5, True),
        ("37%", 37, True),
        ("007", 7, True),
        ("37 + 1 = 38", 37, False),
        ("-37", 37, False),
        ("3.7", 37, False),
        ("3", 37, False),
        ("", 37, False),
        ("none", 37, False),
        ("1e400 is " + "9" * 400, 9, False),
    ],
)
def test_last_number_reads_numbers_as_people_write_them(
    text: str, target: Any, right: bool
) -> None:
    assert last_number(text, target) is right


@pytest.mark.parametrize("answer", ["1,5", "1,2", "12,34", "1.234.567", "0,123", "1e", ""])
def test_a_text_that_is_not_one_number_for_certain_is_none(answer: str) -> None:
    assert parse_number(answer) is None


def test_exact_compares_texts_up_to_outer_white_space() -> None:
    assert exact(" Paris\n", "Paris")
    assert exact("37", 37)
    assert not exact("paris", "Paris")
    assert not exact("Paris is", "Paris")


def test_regex_takes_the_first_group_of_the_last_match() -> None:
    judge = regex_judge(r"#### (\S+)")
    assert judge("#### 1\n#### 1,024", 1024)
    assert not judge("#### 1024\n#### 1", 1024)
    assert not judge("1024", 1024)
    assert regex_judge("yes|no")("yes, no", "no")
    assert not regex_judge("yes|(no)")("yes", "None")


@pytest.mark.parametrize("name", ["exact", "last_number", "regex"])
def test_built_in_scorers_give_one_for_a_right_answer(
    name: str, make: Callable[..., Scorer]
) -> None:
    scorer = make(name, regex="[0-9]+" if name == "regex" else None)
    assert scorer.score([("37", 37), ("38", 37), ("37", "37")]) == [RIGHT, WRONG, RIGHT]
    assert scorer.score([]) == []
    assert scorer.n_errors == 0


def test_a_users_function_returns_a_number_or_parts(make: Callable[..., Scorer]) -> None:
    assert make("rewards:length").score([("abc", None)]) == [
        ScoreResult(reward=3.0, parts={"score": 3.0}, error=None)
    ]
    assert make("rewards:parts").score([("a", "a")]) == [
        ScoreResult(reward=1.5, parts={"correct": 1.0, "brief": 0.5}, error=None)
    ]
    assert make("rewards:weighted").score([("a", {"any": ["json"]})]) == [
        ScoreResult(reward=3.0, parts={"correct": 1.0, "brief": 0.5}, error=None)
    ]
    assert make("rewards:by_text").score([("a", "a")]) == [RIGHT]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("hang", "the scorer took longer than task.scorer.timeout_s = 2 s"),
        ("spin", "the scorer took longer than task.scorer.timeout_s = 2 s"),
        ("raise", "RuntimeError: no idea"),
        ("exit", "SystemExit: 3"),
        ("die", "the scorer ended its process (exit code 9)"),
        ("read", "EOFError: EOF when reading a line"),
        ("long error", "ValueError: xxx"),
        ("many parts", "ValueError: 100000 reward parts; expected 1 to 64"),
        ("nan", "ValueError: reward part 'score' is nan"),
        ("text", "ValueError: could not convert string to float: 'good'"),
        ("none", "TypeError: float() argument must be"),
    ],
)
def test_a_function_that_fails_marks_its_episode_only(
    text: str, error: str, make: Callable[..., Scorer]
) -> None:
    # Ample for the others, on a machine with other work too.
    scorer = make("rewards:by_text", timeout_s=2.0 if text in ("hang", "spin") else 60.0)
    before, failed, after = scorer.score([("a", "a"), (text, "a"), ("b", "a")])
    assert (before, after) == (RIGHT, WRONG)
    assert failed.reward == 0.0
    assert failed.parts == {}
    assert failed.error is not None
    assert failed.error.startswith(error)
    assert len(failed.error) <= 500
    assert scorer.n_errors == 1


def test_what_a_function_prints_neither_blocks_nor_breaks_scoring(
    make: Callable[..., Scorer], capfd: pytest.CaptureFixture[str]
) -> None:
    assert make("rewards:by_text").score([("print", "print"), ("a", "a")]) == [RIGHT, RIGHT]
    assert "xxx" in capfd.readouterr().err


def test_a_catastrophic_regular_expression_meets_the_deadline(make: Callable[..., Scorer]) -> None:
    scorer = make("regex", regex=r"(a+)+$", timeout_s=0.5)
    [result] = scorer.score([("a" * 60 + "b", "a")])
    assert result.error is not None
    assert "took longer" in result.error


def test_more_failures_than_allowed_end_the_run(make: Callable[..., Scorer]) -> None:
    scorer = make("rewards:by_text", max_errors=2)
    scorer.score([("raise", None), ("raise", None)])
    with pytest.raises(
        ScorerLimitExceeded, match=r"3 episodes .*max_errors = 2.*no idea"
    ) as caught:
        scorer.score([("a", "a"), ("raise", None), ("raise", None)])
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("rewards:missing", "AttributeError: module 'rewards' has no attribute 'missing'"),
        ("no_such_module:f", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_function_that_cannot_be_imported_is_a_configuration_error(
    name: str, error: str, make: Callable[..., Scorer]
) -> None:
    with pytest.raises(ConfigError, match=error):
        make(name)


def test_one_child_serves_all_batches_and_a_killed_one_is_replaced(
    make: Callable[..., Scorer],
) -> None:
    scorer = make("rewards:process")
    pids = {scorer.score([("", None)])[0].reward for _ in range(3)}
    assert len(pids) == 1
    os.kill(int(pids.pop()), 9)
    first, second = scorer.score([("", None), ("", None)])
    assert first.error == "the scorer ended its process (exit code -9)"
    assert second.error is None


def test_the_child_imports_neither_torch_nor_numpy(make: Callable[..., Scorer]) -> None:
    [result] = make("rewards:modules").score([("", None)])
    assert result.parts == {"torch": 0.0, "numpy": 0.0, "vllm": 0.0}


def test_a_step_of_episodes_is_scored_in_milliseconds(make: Callable[..., Scorer]) -> None:
    scorer = make("last_number")
    items = [(f"23 + {i} = {23 + i}" + " and so on" * 10, 23 + i) for i in range(64)]
    assert scorer.score(items) == [RIGHT] * 64
    times = []
    for _ in range(20):
        start = time.perf_counter()
        scorer.score(items)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.010


def test_close_ends_the_child(make: Callable[..., Scorer]) -> None:
    scorer = make("rewards:process")
    pid = int(scorer.score([("", None)])[0].reward)
    scorer.close()
    scorer.close()
    assert proctree.start_ticks(pid) is None


def test_the_child_dies_with_a_killed_parent(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    script = (
        "import sys, time\n"
        "from slurm_grpo.config.schema import ScorerConfig\n"
        "from slurm_grpo.tasks.scorer import Scorer\n"
        "s = Scorer(ScorerConfig(name='rewards:by_text', module_dir=sys.argv[1], timeout_s=3600))\n"
        "print(s._process.pid, flush=True)\n"
        "s.score([('spin', None)])\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
    assert proctree.start_ticks(child) is not None
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while proctree.start_ticks(child) is not None:
        assert time.monotonic() < deadline, f"{child} does not end"
        time.sleep(0.01)
