"""Loading, overriding, checking and freezing configurations."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model_shell import make_model_shell
from slurm_grpo.checks.load import check_config, load_config
from slurm_grpo.config.loading import freeze_config, read_frozen
from slurm_grpo.config.schema import (
    AlgorithmConfig,
    Config,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
    ScorerConfig,
    TaskConfig,
)
from slurm_grpo.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
CheckGolden = Callable[[str, str], None]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a model directory that looks right in it."""
    make_model_shell(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, text: str, name: str = "c.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def refusal(path: Path, *overrides: str) -> str:
    """The report, with this machine's paths taken out."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value).replace(str(Path.cwd()), "CWD") + "\n"


CONFIGS = sorted(p for p in (ROOT / "configs").glob("*.yaml") if p.name != "sweep.yaml")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_shipped_configuration_loads(path: Path, folder: Path) -> None:
    cfg = load_config(path, ["--model.path", "model"])
    assert check_config(cfg) == []


def test_numbers_are_read_by_the_fields_type_not_by_yaml(folder: Path) -> None:
    text = """
model: {path: model}
run: {name: 2026, seed: "7", steps: 1e2}
trainer: {optimizer: {lr: 1e-6, max_grad_norm: 1, eps: 1E-8}}
generator: {sampling: {stop: ["\\n", 37]}, engine: {enforce_eager: off}}
task: {path: null}
evaluation:
"""
    cfg = load_config(write(folder, text))
    assert cfg.run == RunConfig(name="2026", seed=7, steps=100, runs_dir=str(folder / "runs"))
    assert cfg.trainer.optimizer == OptimizerConfig(lr=1e-6, max_grad_norm=1.0)
    assert isinstance(cfg.trainer.optimizer.max_grad_norm, float)
    assert cfg.generator.sampling.stop == ("\n", "37")
    assert cfg.generator.engine.enforce_eager is False
    assert cfg.task.path is None


def test_all_problems_of_a_file_are_reported_at_once(
    folder: Path, check_golden: CheckGolden
) -> None:
    text = """\
run: {steps: many, name: a/b}
model:
  path: model
algoritm:
  group_size: 4
algorithm:
  group_size: 1
  clip_low: 2
  order: newest
  order: strict
trainer:
  optimizer: {learning_rate: 1e-5, lr: .nan}
  tokens_per_microbatch: 100
  schedule: fast
lr: 1e-5
generator:
  n_engines: 9
  engine: {block_size: 16, max_model_len: 256, max_num_batched_tokens: [1, 2]}
  sampling: {temperature: 0, max_new_tokens: 256, stop: "###"}
task:
  name: addition
  path: rows.jsonl
  scorer: {name: best, timeout_s: }
cluster: {python: /no/such/python}
"""
    check_golden("errors/config_all_problems.txt", refusal(write(folder, text)))


def test_all_problems_of_the_options_are_reported_with_those_of_the_file(
    folder: Path, check_golden: CheckGolden
) -> None:
    path = write(folder, "model: {path: nowhere}\nrun: {step: 3}\n")
    options = [
        "stray",
        "--trainer.optimiser.lr", "1e-5",
        "--trainer.optimizer.lr=fast",
        "--run.seed", "1", "2",
        "--wandb.enabled", "true",
        "--task.name", "additon",
        "--algorithm.group-size", "1",
    ]  # fmt: skip
    check_golden("errors/config_options.txt", refusal(path, *options))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("empty", ""),
        ("not_yaml", "run: [1, 2\nmodel: {path: x}\n"),
        ("not_a_mapping", "- run\n- model\n"),
        ("tab", "run:\n\tsteps: 3\n"),
        ("unsupported_variable", "model: {path: $NOT_SET_ANYWHERE/m}\n"),
        ("long_model_len", "model: {path: model}\ngenerator: {engine: {max_model_len: 4096}}\n"),
        ("unused_settings", "model: {path: model}\ntask: {scorer: {regex: a}, eval_path: e}\n"
         "trainer: {schedule: {min_lr_ratio: 0.1}}\n"),
    ],
)  # fmt: skip
def test_error_texts(name: str, text: str, folder: Path, check_golden: CheckGolden) -> None:
    check_golden(f"errors/config_{name}.txt", refusal(write(folder, text)))


def test_a_missing_file_is_named(folder: Path) -> None:
    assert "nowhere.yaml: No such file" in refusal(Path("nowhere.yaml"))
    assert "model: Is a directory" in refusal(Path("model"))


def test_an_unsupported_architecture_is_refused_by_name(folder: Path) -> None:
    (folder / "model/config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    text = refusal(write(folder, "model: {path: model}"))
    assert "c.yaml:1: model.path:" in text
    assert "GPT2LMHeadModel" in text
    assert "LlamaForCausalLM" in text


def test_options_win_over_the_file_in_either_spelling(folder: Path) -> None:
    path = write(folder, "model: {path: model}\nrun: {seed: 3}\nwandb: {enabled: true}\n")
    options = [
        "--trainer.optimizer.lr", "1e-5",
        "--run.seed=4",
        "--generator.sampling.stop", "a", "b c",
        "--algorithm.group-size", "4",
        "--task.eval_path", "None",
        "--wandb.no-enabled",
    ]  # fmt: skip
    cfg = load_config(path, options)
    assert cfg.trainer.optimizer.lr == 1e-5
    assert cfg.run.seed == 4
    assert cfg.generator.sampling.stop == ("a", "b c")
    assert cfg.algorithm.group_size == 4
    assert cfg.task.eval_path is None
    assert not cfg.wandb.enabled


def test_an_option_replaces_a_value_that_is_wrong_in_the_checks_only(folder: Path) -> None:
    path = write(folder, "model: {path: nowhere}\n")
    assert load_config(path, ["--model.path", "model"]).model.path == str(folder / "model")


def test_paths_are_relative_to_who_gives_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "configs").mkdir()
    path = write(folder, "model: {path: ../model}\nrun: {runs_dir: out}\n", "configs/c.yaml")
    cfg = load_config(path)
    assert cfg.model.path == str(folder / "model")
    assert cfg.run.runs_dir == str(folder / "out")
    assert load_config(path, ["--model.path", "model"]).model.path == str(folder / "model")


def test_variables_defaults_and_the_home_directory_are_expanded_in_paths(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("MODELS", str(folder))
    monkeypatch.delenv("ELSEWHERE", raising=False)
    for text in ("$MODELS/model", "${MODELS}/model", "${ELSEWHERE:-~}/model", "~/model"):
        assert load_config(write(folder, f"model: {{path: '{text}'}}")).model.path == str(
            folder / "model"
        )


def test_a_run_without_a_name_gets_one_from_file_seed_and_time(folder: Path) -> None:
    path = write(folder, "model: {path: model}", "sums.yaml")
    name = load_config(path, ["--run.seed", "2"]).run.name
    assert re.fullmatch(r"sums-seed2-\d{8}-\d{6}", name)


def test_a_frozen_configuration_reads_back_equal(folder: Path) -> None:
    cfg = load_config(write(folder, "model: {path: model}\nrun: {name: r}\n"))
    cfg = dataclasses.replace(
        cfg,
        run=dataclasses.replace(cfg.run, runs_dir="/data/$HOME/ä: #x"),
        task=TaskConfig(scorer=ScorerConfig(name="regex", regex=r"#### (-?\d+)\s*$")),
    )
    freeze_config(cfg, folder / "frozen.yaml")
    assert read_frozen(folder / "frozen.yaml") == cfg
    assert [p.name for p in folder.glob("*frozen*")] == ["frozen.yaml"]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@settings(
    max_examples=50,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    name=TEXTS,
    stop=st.lists(TEXTS, max_size=3),
    lr=st.floats(allow_nan=False, allow_infinity=False),
    regex=st.none() | TEXTS,
)
def test_freezing_then_reading_is_identity(
    tmp_path: Path, name: str, stop: list[str], lr: float, regex: str | None
) -> None:
    cfg = Config(run=RunConfig(name=name), task=TaskConfig(scorer=ScorerConfig(regex=regex)))
    generator = dataclasses.replace(cfg.generator, sampling=SamplingConfig(stop=tuple(stop)))
    trainer = dataclasses.replace(cfg.trainer, optimizer=OptimizerConfig(lr=lr))
    cfg = dataclasses.replace(cfg, generator=generator, trainer=trainer)
    freeze_config(cfg, tmp_path / "frozen.yaml")
    assert read_frozen(tmp_path / "frozen.yaml") == cfg


def test_strict_order_may_be_combined_with_staleness(folder: Path) -> None:
    path = write(folder, "model: {path: model}\nalgorithm: {max_staleness: 1, order: strict}\n")
    assert not load_config(path).strict_mode


def test_check_config_names_the_key_first() -> None:
    problems = check_config(Config(algorithm=AlgorithmConfig(group_size=1)))
    assert [p.partition(":")[0] for p in problems] == ["algorithm.group_size", "model.path"]


def rows_config(folder: Path, rows: str, **scorer: Any) -> Path:
    (folder / "rows.jsonl").write_text(rows)
    settings = json.dumps(scorer)
    return write(
        folder,
        f"model: {{path: model}}\ntask: {{name: jsonl, path: rows.jsonl, scorer: {settings}}}\n",
    )


def test_malformed_rows_are_refused_with_file_line_and_reason(
    folder: Path, check_golden: CheckGolden
) -> None:
    rows = [
        '{"prompt": "1 + 1", "answer": 2, "source": "kept out"}',
        "",
        '{"prompt": "1 + 1", "answer": 2',
        '["prompt", "answer"]',
        '{"prompt": "1 + 1"}',
        '{"prompt": " ", "answer": 2}',
        '{"prompt": 11, "answer": 2}',
        '{"prompt": "1 + 1", "answer": null}',
        '{"prompt": "1 + 1", "answer": "two"}',
        '{"prompt": "1 + 1", "answer": [2]}',
        '{"prompt": [], "answer": 2}',
        '{"prompt": [{"role": "user"}], "answer": 2}',
        '{"prompt": [{"role": "me", "content": "1"}], "answer": 2}',
        '{"prompt": [{"role": "user", "content": 1}], "answer": 2}',
        '{"prompt": [{"role": "assistant", "content": "1"}], "answer": 2}',
    ]
    text = refusal(rows_config(folder, "\n".join(rows)))
    check_golden("errors/config_rows.txt", text)


def test_many_malformed_rows_are_counted_not_listed(folder: Path) -> None:
    text = refusal(rows_config(folder, "[]\n" * 100))
    assert text.count("\n") == 22
    assert "80 more rows have such problems" in text


def test_a_file_without_rows_is_refused(folder: Path) -> None:
    assert "rows.jsonl: has no rows" in refusal(rows_config(folder, "\n\n"))
    path = write(folder, "model: {path: model}\ntask: {name: jsonl}\n")
    assert "task.path: missing" in refusal(path)
    assert "gone.jsonl: cannot be read" in refusal(path, "--task.path", "gone.jsonl")


def test_a_row_that_cannot_fit_is_refused(folder: Path) -> None:
    rows = '{"prompt": "1 + 1", "answer": 2}\n{"prompt": "' + "x" * 300 + '", "answer": 2}\n'
    text = refusal(
        rows_config(folder, rows),
        "--generator.engine.max_model_len",
        "256",
    )
    assert "rows.jsonl:2: the prompt has 300 tokens; expected at most 232" in text
    assert "rows.jsonl:1" not in text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("best", "'best' given; expected exact, last_number, regex or module:function"),
        ("my rewards:f", "expected exact, last_number, regex or module:function"),
        ("no_such_module_anywhere:f", "no module 'no_such_module_anywhere'"),
        ("rewards:no_such", "defines no 'no_such'; its functions: length"),
        ("rewards.inner:f", "no module 'rewards.inner'"),
        ("broken:f", "is not valid Python"),
        ("regex", "missing; task.scorer.name = regex needs a pattern"),
    ],
)
def test_a_scorer_that_would_not_load_is_refused(name: str, expected: str, folder: Path) -> None:
    (folder / "rewards.py").write_text("raise SystemExit('never run')\ndef length(t, a): ...\n")
    (folder / "broken.py").write_text("def f(:\n")
    path = write(folder, f"model: {{path: model}}\ntask: {{scorer: {{name: '{name}'}}}}\n")
    assert expected in refusal(path)


def test_a_users_scorer_is_found_next_to_the_configuration_and_remembered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, "from base import*\n", "own/star.py")
    write(folder, "try:\n    import a as f\nexcept ImportError:\n    f = None\n", "own/rewards.py")
    write(folder, "model: {path: ../model}\ntask: {scorer: {name: 'rewards:f'}}\n", "own/c.yaml")
    monkeypatch.chdir("/")
    cfg = load_config(folder / "own/c.yaml", ["--run.runs_dir", str(folder)])
    assert cfg.task.scorer.module_dir == str(folder / "own")
    load_config(folder / "own/c.yaml", ["--task.scorer.name", "star:whatever_base_has"])


def test_a_bad_regular_expression_is_refused(folder: Path) -> None:
    path = write(folder, "model: {path: model}\ntask: {scorer: {name: regex, regex: '(1'}}\n")
    assert "task.scorer.regex: '(1' is no regular expression: missing )" in refusal(path)
