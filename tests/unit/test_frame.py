"""Runs as tables: what counts, lazy columns, damage that is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sample_episodes import begin_attempt, make_group, make_header, make_run, train_step
from slurm_grpo.analysis import open_run, open_runs
from slurm_grpo.config.schema import Config, OptimizerConfig, RunConfig, TrainerConfig
from slurm_grpo.errors import AnalysisError
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.metrics import MetricsWriter
from slurm_grpo.staging import layout
from slurm_grpo.staging.ledger import record_retired
from slurm_grpo.staging.shards import publish_groups
from slurm_grpo.sweeps.directory import Element, write_elements


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Two groups trained on in step 1, one in step 2, one never."""
    run = make_run(tmp_path / "test")
    begin_attempt(run, 0, 0)
    first = publish_groups(run, [make_group(0), make_group(1)], make_header())
    second = publish_groups(
        run, [make_group(2, oldest_version=1, n_tokens=4)], make_header(sequence=1)
    )
    publish_groups(run, [make_group(3, oldest_version=1)], make_header(sequence=2, engine_id=1))
    train_step(run, 1, first)
    train_step(run, 2, second)
    return run


def test_an_episode_table_holds_what_was_published(run: RunDir) -> None:
    table = open_run(run.root).episodes()
    assert list(table.group_id) == [0, 0, 1, 1, 2, 2, 3, 3]
    episode = make_group(2, oldest_version=1, n_tokens=4)[1]
    row = table[table.episode_id == 2 * layout.MAX_SAMPLES + 1].iloc[0]
    assert (row.reward, row.advantage, row.part_correct) == (1.0, 1.0, 1.0)
    assert (row.task, row.prompt_text, row.target_json) == ("addition", "prompt 2", "2")
    assert (row.completion_text, row.finish_reason) == ("completion 1", "stop")
    assert (row.n_tokens, row.n_prompt_tokens, row.sample_index) == (4, 5, 1)
    assert (row.sample_seed, row.policy_version_min, row.engine_id) == (episode.sample_seed, 1, 0)
    assert pd.isna(row.error)


def test_an_episode_says_the_step_that_trained_on_it(run: RunDir) -> None:
    table = open_run(run.root).episodes(["group_id", "step", "staleness"]).drop_duplicates()
    assert dict(zip(table.group_id, table.step.fillna(-1), strict=True)) == {
        0: 1,
        1: 1,
        2: 2,
        3: -1,
    }
    assert list(table.staleness.dropna()) == [0, 0, 0]


def test_only_the_columns_asked_for_are_read(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_run(run.root)
    read = []
    whole = layout.read_column

    def recording(file: object, path: str, span: object = None) -> object:
        read.append(path)
        return whole(file, path, span)  # type: ignore[arg-type]

    monkeypatch.setattr(layout, "read_column", recording)
    table = opened.episodes(["reward"], where="n_tokens == 4 and task == 'addition'")
    assert list(table.reward) == [0.0, 1.0]
    assert set(read) == {"episodes/reward", "episodes/token_offsets", "groups/task"}


def test_a_condition_may_name_columns_of_the_group_and_the_step(run: RunDir) -> None:
    opened = open_run(run.root)
    where = "task == 'addition' and policy_version_min >= 1 and step == 2"
    assert list(opened.episodes(["group_id"], where).group_id) == [2, 2]
    assert len(opened.episodes(["group_id"], "step.isna()")) == 2
    assert len(opened.episodes(["group_id"], "completion_text == 'completion 1'")) == 4
    assert len(opened.episodes(["group_id"], "`part_correct` > 0.5")) == 4
    assert list(opened.episodes(["reward", "task"], "reward > 5").columns) == ["reward", "task"]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("rewrad > 1", "no column 'rewrad'. Did you mean reward?"),
        ("`part of` > 1", "no column 'part of'"),
        ("reward >", "invalid syntax"),
        ("reward > 'a'", "where \"reward > 'a'\""),
    ],
)
def test_a_condition_that_is_none_says_what_is_wrong(run: RunDir, where: str, message: str) -> None:
    with pytest.raises(AnalysisError) as caught:
        open_run(run.root).episodes(["reward"], where)
    assert message in str(caught.value)
    assert not open_run(run.root).damaged


def test_work_that_a_later_attempt_went_back_over_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    begin_attempt(run, 0, 0)
    kept = publish_groups(run, [make_group(0)], make_header())
    undone = publish_groups(run, [make_group(1, oldest_version=2)], make_header(sequence=1))
    train_step(run, 1, kept)
    train_step(run, 3, undone)
    begin_attempt(run, 1, 1)
    again = publish_groups(run, [make_group(1, oldest_version=1)], make_header(attempt=1))
    train_step(run, 2, again)
    opened = open_run(run.root)
    table = opened.episodes(["group_id", "attempt", "step"])
    assert table.drop_duplicates().to_numpy().tolist() == [[0, 0, 1], [1, 1, 2]]
    everything = opened.episodes(["group_id", "superseded", "step"], include_superseded=True)
    assert list(everything.superseded) == [False, False, True, True, False, False]
    assert everything.step.isna().sum() == 2
    assert list(opened.steps().step) == [1, 2]


def test_what_a_resumed_replay_trained_on_counts_whichever_attempt_made_it(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    begin_attempt(run, 0, 0)
    refs = [
        publish_groups(run, [make_group(v, oldest_version=v)], make_header(sequence=v))
        for v in range(3)
    ]
    train_step(run, 1, refs[0])
    begin_attempt(run, 1, 1)
    for step in (2, 3):
        train_step(run, step, refs[step - 1])
    assert list(open_run(run.root).groups(["step"]).step) == [1, 2, 3]


def test_of_two_valid_copies_of_a_group_the_one_trained_on_counts(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    begin_attempt(run, 0, 0)
    publish_groups(run, [make_group(0)], make_header())
    trained = publish_groups(run, [make_group(0)], make_header(sequence=1, engine_id=7))
    train_step(run, 1, trained)
    table = open_run(run.root).episodes(["engine_id", "episode_id"])
    assert list(table.engine_id) == [7, 7]
    assert table.episode_id.is_unique


def test_a_shard_retired_since_the_run_was_opened_is_no_damage_but_a_vanished_one_is(
    run: RunDir,
) -> None:
    opened = open_run(run.root)
    retired, vanished = (shard.path for shard in opened.index.shards[:2])
    record_retired(run, [retired], step=1, attempt=0)
    for path in (retired, vanished):
        (run.root / path).unlink()
    assert set(opened.episodes().group_id).isdisjoint({0, 1, 2})
    assert list(opened.damaged) == [vanished]


def test_damaged_shards_are_named_and_left_out(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    short, flipped, _ = sorted(run.episodes.glob("*.h5"))
    with short.open("r+b") as file:
        file.truncate(short.stat().st_size - 1)
    opened = open_run(run.root)
    assert len(opened.episodes()) == 4
    image = bytearray(flipped.read_bytes())
    token = np.array(make_group(2, oldest_version=1, n_tokens=4)[0].completion.token_ids).tobytes()
    image[image.index(token)] ^= 1
    flipped.write_bytes(image)
    first = opened.episodes(["episode_id"]).episode_id
    n_tokens = [len(opened.tokens(i)) for i in first]
    assert sorted(n_tokens) == [0, 0, 3, 3]
    assert {Path(path).name for path in opened.damaged} == {short.name, flipped.name}
    assert [short.name in r.getMessage() for r in caplog.records] == [True, False]
    assert opened.index.n_gone == 2


def test_tokens_come_in_the_order_asked_for(run: RunDir) -> None:
    opened = open_run(run.root)
    ids = [2 * layout.MAX_SAMPLES, 1]
    table = opened.tokens(ids)
    assert list(table.episode_id) == [ids[0]] * 4 + [1] * 3
    completion = make_group(0)[1].completion
    tail = table[table.episode_id == 1]
    assert np.array_equal(tail.token_id, completion.token_ids)
    assert np.array_equal(tail.logprob, completion.logprobs)
    assert list(opened.episodes(["sample_index"], episode_ids=ids).sample_index) == [0, 1]
    for unknown in (99 * layout.MAX_SAMPLES, 5):
        with pytest.raises(AnalysisError, match=f"no episode {unknown}"):
            opened.tokens(unknown)
        with pytest.raises(AnalysisError, match=f"no episode {unknown}"):
            opened.episodes(episode_ids=[unknown])


def test_a_group_is_summed_up_without_its_errors(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    group = make_group(4, n_episodes=4)
    group[3] = replace(group[3], error="boom", reward=0.0)
    group[2] = replace(group[2], completion=replace(group[2].completion, text="completion 1"))
    publish_groups(run, [group, make_group(5, n_episodes=1)], make_header())
    table = open_run(run.root).groups()
    row = table.iloc[0]
    assert (row.n_episodes, row.n_errors, row.n_unique_answers, row.n_tokens) == (4, 1, 3, 12)
    assert row.reward_mean == pytest.approx(1 / 3)
    assert row.reward_std == pytest.approx(np.std([0, 1, 0]))
    assert (row.reward_min, row.reward_max) == (0, 1)
    assert list(table.zero_spread) == [False, True]
    errors = open_run(run.root).episodes(["error", "finish_reason"], where="error.notna()")
    assert errors.to_numpy().tolist() == [["boom", "stop"]]


def test_a_text_that_no_column_can_hold_is_replaced_not_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    group = make_group(0, n_episodes=3)
    texts = ["lone \ud800", 'a "quoted" \\ line\n', "nul \0 \N{GRINNING FACE}"]
    for i, text in enumerate(texts):
        group[i] = replace(group[i], completion=replace(group[i].completion, text=text))
    publish_groups(run, [group], make_header())
    opened = open_run(run.root)
    found = list(opened.episodes(["completion_text"]).completion_text)
    assert found == ["lone \N{REPLACEMENT CHARACTER}", *texts[1:]]
    assert not opened.damaged


def test_steps_join_manifests_and_the_trainers_metrics(run: RunDir) -> None:
    writer = MetricsWriter(run.metrics_file("trainer"), attempt=0)
    writer.log(0, {"eval/held_out/reward": 0.1})
    writer.log(1, {"trainer/loss": 0.5})
    writer.log(1, {"eval/held_out/reward": 0.2})
    writer.close()
    opened = open_run(run.root)
    steps = opened.steps()
    assert list(steps.n_groups) == [2, 1]
    assert (steps["trainer/loss"][0], steps["eval/held_out/reward"][0]) == (0.5, 0.2)
    assert steps["trainer/loss"].isna()[1]
    assert list(opened.metrics().step) == [0, 1, 1]
    assert set(opened.metrics("trainer").process) == {"trainer"}


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AnalysisError, match="no run directory"):
        open_run(tmp_path)


def test_an_empty_run_gives_empty_tables_with_their_columns(tmp_path: Path) -> None:
    opened = open_run(make_run(tmp_path).root)
    assert "reward" in opened.episodes().columns
    assert "reward_mean" in opened.groups().columns
    assert list(opened.steps().columns)[:2] == ["step", "attempt"]
    assert len(opened.metrics()) == 0


def test_a_sweep_adds_the_keys_that_vary(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    elements = []
    for index, lr in enumerate((1e-5, 3e-5, 1e-4)):
        run = RunDir(tmp_path / f"run-{index}")
        config = Config(
            run=RunConfig(name=run.root.name, seed=3),
            trainer=TrainerConfig(optimizer=OptimizerConfig(lr=lr)),
        )
        elements.append(Element(index=index, run=run, config=config, changes={}))
    write_elements(tmp_path, elements)
    for element in elements[:2]:
        begin_attempt(element.run, 0, 0)
        publish_groups(element.run, [make_group(element.index)], make_header())
    table = open_runs(tmp_path).episodes(["reward"])
    assert list(table.columns) == ["run", "trainer.optimizer.lr", "reward"]
    assert list(table.run) == ["run-0", "run-0", "run-1", "run-1"]
    assert list(table["trainer.optimizer.lr"]) == [1e-5, 1e-5, 3e-5, 3e-5]
    assert "1 of 3 have not begun" in caplog.text
    elements[2].run.config.unlink()
    assert len(open_runs(tmp_path).runs) == 2
    runs = open_runs([element.run.root for element in elements])
    assert list(runs.groups(["reward_mean"])["trainer.optimizer.lr"]) == [1e-5, 3e-5]
    for run, stop in zip([e.run for e in elements[:2]], ("[]", "[a, b]"), strict=True):
        run.config.write_text(f"generator: {{sampling: {{stop: {stop}}}}}")
    stops = open_runs([e.run.root for e in elements[:2]]).episodes(["reward"])[
        "generator.sampling.stop"
    ]
    assert list(stops) == ["[]", "[]", "['a', 'b']", "['a', 'b']"]
