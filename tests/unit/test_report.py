"""The report as a file: whole, self-contained, escaped, and honest about what is missing."""

from __future__ import annotations

import math
import os
import re
from argparse import Namespace
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sample_episodes import make_group, make_header, make_run
from slurm_grpo.analysis import open_run
from slurm_grpo.analysis.report import build_report, run
from slurm_grpo.analysis.report_facts import Facts
from slurm_grpo.config.loading import freeze_config
from slurm_grpo.config.schema import Config
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.metrics import MetricsWriter
from slurm_grpo.run.plots import thinned
from slurm_grpo.staging.manifest import Manifest, publish_manifest
from slurm_grpo.staging.shards import publish_groups
from slurm_grpo.types import Group

HOSTILE = "</pre><script>alert(1)</script>\x00 \u202e & 'x'"
VOID = {"meta", "path", "use", "rect", "input", "br", "link"}


class Balance(HTMLParser):
    """Collects what does not close, and every attribute that could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.wrong += [f"{k}={v}" for k, v in attrs if k in ("src", "href") and v and v[0] != "#"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID and (not self.open or self.open.pop() != tag):
            self.wrong.append(f"</{tag}>")


def check_page(page: str) -> None:
    parser = Balance()
    parser.feed(page)
    assert parser.wrong == []
    assert parser.open == []
    assert not parser.seen & {"script", "img", "iframe", "object"}
    assert not re.search(r"https?://|@import|url\((?!#)", page)
    assert not re.search(r"#0d0[abc]", page)  # every colour of a chart is the page's
    assert len(page) < 1_000_000


def written(group: Group, task: str, text: str, rewards: tuple[float, float]) -> Group:
    prompt = replace(group[0].prompt, task=task)
    return [
        replace(
            e,
            prompt=prompt,
            completion=replace(e.completion, text=text),
            reward=reward,
            reward_parts={"correct": reward, "brevity": 0.5},
        )
        for e, reward in zip(group, rewards, strict=True)
    ]


@pytest.fixture
def trained(tmp_path: Path) -> RunDir:
    """Ten steps of two tasks: `up` gets better, `flat` does not."""
    rundir = make_run(tmp_path / "run & co")
    freeze_config(Config(), rundir.config)
    rundir.attempt(0).root.mkdir()
    rundir.attempt(0).resumed_from.write_text("0\n")
    metrics = MetricsWriter(rundir.metrics_file("trainer"), attempt=0)
    metrics.log(0, {"eval/held_out/accuracy": 0.25, "eval/held_out/reward": 0.25})
    for step in range(1, 11):
        up = (0.0, 1.0) if step < 6 else (1.0, 1.0)
        ids = [2 * step, 2 * step + 1]
        groups = [
            written(make_group(ids[0], oldest_version=step - 1), "up", HOSTILE, up),
            written(make_group(ids[1], oldest_version=step - 1), "flat", "x", (0.0, 0.5)),
        ]
        ref = publish_groups(rundir, groups, make_header(sequence=step))
        pairs = tuple((i, ref.path) for i in ids)
        publish_manifest(rundir, Manifest(step=step, attempt=0, groups=pairs, dropped=()))
        times = {"trainer/step_s": 2.0, "trainer/wait_for_groups_s": 1.5, "trainer/sync_s": 0.1}
        metrics.log(step, {"reward/mean": 0.1 * step, "trainer/loss": 0.01, **times})
    metrics.log(10, {"eval/held_out/accuracy": 0.75, "eval/held_out/reward": 0.75})
    metrics.close()
    return rundir


def test_the_page_is_whole_and_loads_nothing(trained: RunDir) -> None:
    page = build_report(Facts(open_run(trained.root)))
    check_page(page)
    assert "run &amp; co" in page
    assert "&lt;script&gt;alert(1)" in page
    assert r"\x00 \u202e" in page
    assert page.count("<svg") == len(re.findall(r'role="img"', page)) >= 8


def test_the_headline_answers_are_those_of_the_data(trained: RunDir) -> None:
    page = build_report(Facts(open_run(trained.root)))
    cards = re.sub(r"<[^>]+>", " ", page[page.index('class="cards"') : page.index("Learning</h2>")])
    assert "0.250 → 0.750" in cards
    assert "1 of 2" in cards
    assert "most: up, +0.500" in cards
    assert "100 % on-policy" in cards
    assert "75 % waiting for episodes" in cards
    assert "20.0 s in steps" in cards


def test_changes_weigh_prompts_alike_and_compare_the_ends(trained: RunDir) -> None:
    facts = Facts(open_run(trained.root))
    assert facts.windows == ([0, 1], [8, 9])
    change = facts.change(task="up")
    assert change is not None
    assert (change.early, change.late, change.error) == (0.5, 1.0, 0.0)
    flat = facts.change(task="flat")
    assert flat is not None
    assert flat.difference == 0.0


def test_phases_add_up_to_the_steps(trained: RunDir) -> None:
    table = Facts(open_run(trained.root)).phases()
    assert table.sum(axis=1).round(9).tolist() == [2.0] * 10
    assert table["other"].round(9).tolist() == [0.4] * 10


def test_a_run_that_has_only_begun_says_so(tmp_path: Path) -> None:
    rundir = make_run(tmp_path / "new")
    freeze_config(Config(), rundir.config)
    page = build_report(Facts(open_run(rundir.root)))
    check_page(page)
    assert "No step has been taken yet" in page
    assert "has not happened yet" in page


def test_a_single_step_whose_scoring_failed_everywhere_is_shown(tmp_path: Path) -> None:
    rundir = make_run(tmp_path / "one")
    rundir.attempt(0).root.mkdir()
    rundir.attempt(0).resumed_from.write_text("0\n")
    group = [
        replace(e, reward=0.0, reward_parts={}, advantage=None, error="boom <b>")
        for e in make_group(0)
    ]
    ref = publish_groups(rundir, [group], make_header())
    pairs = ((0, ref.path),)
    publish_manifest(rundir, Manifest(step=1, attempt=0, groups=pairs, dropped=()))
    metrics = MetricsWriter(rundir.metrics_file("trainer"), attempt=0)
    diverged = {"trainer/loss": math.nan, "trainer/mismatch_k3_nats": math.nan}
    metrics.log(1, {"trainer/step_s": 1.0, **diverged})
    metrics.close()
    page = build_report(Facts(open_run(rundir.root)))
    check_page(page)
    assert "boom &lt;b&gt;" in page
    assert not re.search(r"\bnan\b", page)
    assert "The run has no config.yaml" in page


def test_curves_of_a_long_run_keep_what_only_some_steps_have() -> None:
    steps, means = thinned(([1, 2, 3, 4, 5], [1.0, math.nan, math.nan, math.nan, 4.0]), 3)
    assert steps == [1.5, 3.5, 5.0]
    assert [str(m) for m in means] == ["1.0", "nan", "4.0"]


def test_a_run_that_died_says_why_it_is_taken_for_dead(trained: RunDir) -> None:
    os.utime(trained.attempt(0).root, (0, 0))
    page = build_report(Facts(open_run(trained.root)))
    check_page(page)
    assert '<span class="state bad">died</span>' in page
    assert "no sign of life for" in page


def test_gone_and_damaged_episodes_are_told(trained: RunDir) -> None:
    first, second, *_ = sorted(trained.episodes.glob("*.h5"))
    first.unlink()
    second.write_bytes(b"no HDF5")
    page = build_report(Facts(open_run(trained.root)))
    check_page(page)
    assert "no longer on disk" in page
    assert f"damaged files are left out: episodes/{second.name}" in page


def test_the_command_writes_into_the_run_unless_told_otherwise(
    trained: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(Namespace(run=trained.root, output=None, score=None)) == 0
    assert (trained.root / "report.html").read_text("utf-8").startswith("<!doctype html>")
    run(Namespace(run=trained.root, output=tmp_path / "elsewhere.html", score=None))
    assert str(tmp_path / "elsewhere.html") in capsys.readouterr().out
    assert (tmp_path / "elsewhere.html").is_file()
