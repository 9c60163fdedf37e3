"""`slurm-grpo report RUN`: one HTML file that says how a run went.

It opens from disk, needs no network and no script, and answers on top: is it learning, on which
tasks, what do its worst answers look like, was it on-policy, where did the time go. Works on a run
that is still going on, has failed or has taken one step, and says what is missing. Numbers come
from `report_facts.py`, pictures from `report_charts.py`, answers to read from `report_episodes.py`.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from string import Template
from typing import Any

from slurm_grpo.analysis import report_charts as charts
from slurm_grpo.analysis.frame import open_run
from slurm_grpo.analysis.report_charts import Chart
from slurm_grpo.analysis.report_episodes import episodes_html
from slurm_grpo.analysis.report_facts import Change, Facts
from slurm_grpo.analysis.terminal import add_run, say
from slurm_grpo.config.schema import Config
from slurm_grpo.config.values import option_types
from slurm_grpo.errors import ExitCode
from slurm_grpo.fsio import write_durably
from slurm_grpo.run.checkpoints import read_resumed_from
from slurm_grpo.run.state import stand
from slurm_grpo.run.summary import read_json
from slurm_grpo.run.words import clock, duration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN, the file to write, and whose rewards to show."""
    add_run(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="by default report.html in the run"
    )
    parser.add_argument("--score", metavar="NAME", help="show the rewards of a rescoring instead")


def run(arguments: argparse.Namespace) -> int:
    """Write the file and say where it is."""
    output = arguments.output or arguments.run / "report.html"
    page = build_report(Facts(open_run(arguments.run), arguments.score))
    write_durably(output, page.encode("utf-8", "replace"))
    say(str(output))
    return ExitCode.OK


def build_report(facts: Facts) -> str:
    """The whole page."""
    standing = stand(facts.run.run)
    sections = {
        "In short": _cards(facts) + _notes(facts),
        "Learning": _figures(charts.learning_charts(facts)) + _tasks(facts),
        "Answers": episodes_html(facts),
        "Length": _figures(charts.length_charts(facts)),
        "On-policy": _figures(charts.policy_charts(facts)),
        "Training": _figures(charts.training_charts(facts)),
        "Time": _figures(charts.time_charts(facts)),
        "Attempts": _attempts(facts),
        "Configuration": _configuration(facts),
    }
    body = "\n".join(
        f'<section id="{_anchor(title)}"><h2>{title}</h2>\n{html}</section>'
        for title, html in sections.items()
    )
    config = facts.run.config
    about = [
        f"model {Path(str(config.get('model.path', '?'))).name}",
        f"task {config.get('task.name', '?')}",
        f"seed {config.get('run.seed', '?')}",
        f"{len(facts.run.index.manifests)} of {config.get('run.steps', '?')} steps",
        f"{len(facts.episodes):,} episodes on disk",
        *([f"rewards of the rescoring {facts.score}"] if facts.score else []),
        *([f"a replay of {config['run.replay_of']}"] if config.get("run.replay_of") else []),
    ]
    page = Template(files("slurm_grpo.analysis").joinpath("report_page.html").read_text("utf-8"))
    return page.substitute(
        title=escape(f"{facts.run.name}: report"),
        name=escape(facts.run.name),
        state=escape(standing.word),
        tone={"done": "good", "failed": "bad", "died": "bad"}.get(standing.word, ""),
        subtitle=escape(" · ".join(about)),
        detail=_paragraph(standing.detail, "bad"),
        links="".join(f'<li><a href="#{_anchor(t)}">{t}</a></li>' for t in sections),
        body=body,
        footer=escape(
            f"Written {time.strftime('%Y-%m-%d %H:%M:%S %Z')} from {facts.run.run.root.resolve()}"
        ),
    )


# In short


def _cards(facts: Facts) -> str:
    """The five questions, each with a number first."""
    answers = {
        "Is it learning?": _is_learning(facts),
        "On which tasks?": _on_which_tasks(facts),
        "What do its worst answers look like?": _worst(facts),
        "Was it on-policy?": _was_on_policy(facts),
        "Where did the time go?": _where_time_went(facts),
    }
    html = [
        f'<div class="card"><h3>{question}</h3><p class="big">{escape(big)}</p>'
        f"{''.join(map(_paragraph, lines))}</div>"
        for question, (big, *lines) in answers.items()
    ]
    more = '<p class="small"><a href="#answers">Read some of the answers</a></p>'
    return f'<div class="cards">{"".join(html)}</div>{more if len(facts.episodes) else ""}'


def _is_learning(facts: Facts) -> list[str]:
    answers: list[tuple[str, str]] = []
    for name, points in facts.evaluations.items():
        words = f"{name.replace('_', '-')} {points['metric']}"
        if None in (points["before"], points["after"]):
            when = "before training" if points["after"] is None else "after the last evaluated step"
            known = points["before"] if points["after"] is None else points["after"]
            answers.append((_number(known), f"{words} {when}"))
        else:
            answers.append((_arrow(points["before"], points["after"]), f"{words}, first and last"))
    change = facts.change()
    if change is not None:
        words = f"reward, earliest and latest fifth of the policies: {_difference(change)}"
        answers.append((_arrow(change.early, change.late), words))
    elif len(facts.episodes):
        mean = _number(facts.episodes["reward"].mean())
        answers.append((mean, "mean reward; one policy so far, nothing to compare with"))
    if facts.score is not None:
        answers.reverse()  # evaluations were judged by the run's own scorer
    first, *others = answers or [("-", "no episodes and no evaluation")]
    return [*first, *(f"{value} {words}" for value, words in others)]


def _on_which_tasks(facts: Facts) -> list[str]:
    table = facts.tasks
    if table.empty:
        return ["-", "no episodes on disk"]
    if len(table) == 1:
        row = table.iloc[0]
        words = f"{row['prompts']:,} prompts, {row['episodes']:,} episodes, one task"
        return [row["task"], words]
    changes = {row["task"]: row["change"] for row in table.to_dict("records") if row["change"]}
    ranked = sorted(changes.items(), key=lambda item: -item[1].difference)
    n_up = sum(change.difference > 2 * change.error for _, change in ranked)
    lines = [f"{n_up} of {len(table)}", "rose by more than two standard errors"]
    for word, item in (("most", ranked[:1]), ("least", ranked[-1:])):
        lines += [f"{word}: {task}, {_difference(change)}" for task, change in item]
    return lines


def _worst(facts: Facts) -> list[str]:
    episodes, late = facts.episodes, facts.windows[1]
    if episodes.empty:
        return ["-", "no episodes on disk"]
    latest = episodes[episodes["version"].isin(late)] if late else episodes
    scored = latest["reward"].dropna()
    lowest = scored.min() if len(scored) else math.nan
    return [
        _percent((scored == lowest).mean() if len(scored) else math.nan),
        f"of the latest policies' answers earn the least, {_number(lowest)}",
        f"{_percent(latest['is_cut'].mean())} of them cut short by the length limit",
        f"{int(episodes['is_error'].sum())} answers in the run could not be scored",
    ]


def _was_on_policy(facts: Facts) -> list[str]:
    ages = facts.trained["staleness"].dropna().astype("f8")
    lines = ["-"]
    if len(ages):
        bound = facts.run.config.get("algorithm.max_staleness", "?")
        lines = [
            f"{_percent((ages == 0).mean())} on-policy",
            f"of trained episodes; oldest {ages.max():.0f}, bound {bound}",
        ]
    if facts.steps:
        k3 = _number(facts.over_steps("trainer/mismatch_k3_nats"), 2)
        worst = _number(facts.over_steps("trainer/mismatch_max_nats", max), 2)
        clipped = _percent(facts.over_steps("trainer/clip_fraction"))
        lines += [
            f"mismatch {k3} nats (median k3), largest {worst} of a token",
            f"{clipped} of tokens clipped (median)",
        ]
    return lines if len(lines) > 1 else ["-", "no step yet"]


def _where_time_went(facts: Facts) -> list[str]:
    if not facts.steps:
        return ["-", "no step was logged yet"]
    seconds = facts.phases().sum().sort_values(ascending=False)
    share = seconds / seconds.sum()
    lines = [f"{_clock(seconds.sum())} in steps"]
    lines += [f"{_percent(v)} {n}" for n, v in share.items() if v >= 0.05]
    numbers = facts.run.run.attempt_numbers()
    wall = sum(read_json(facts.run.run.attempt(n).record).get("wall_s", 0) for n in numbers)
    if wall > seconds.sum():
        lines.append(f"{_clock(wall - seconds.sum())} outside: starting, evaluating, saving")
    return [*lines, f"median step {duration(facts.over_steps('trainer/step_s'))}"]


def _notes(facts: Facts) -> str:
    """What is missing or odd."""
    index, config = facts.run.index, facts.run.config
    notes = []
    if not index.manifests:
        notes.append("No step has been taken yet; most of this page is empty.")
    elif not facts.steps:
        notes.append("No metrics of steps (metrics/trainer.jsonl): curves and times are missing.")
    if not facts.evaluations:
        off = config.get("evaluation.n_prompts") == 0
        why = "is turned off (evaluation.n_prompts: 0)" if off else "has not happened yet"
        notes.append(f"An evaluation on held-out prompts {why}.")
    if index.n_gone:
        notes.append(
            f"{index.n_gone:,} prompts that were trained on are no longer on disk (retention); "
            "episode counts and distributions are of those that are."
        )
    if facts.run.damaged:
        names = ", ".join(list(facts.run.damaged)[:3])
        notes.append(f"{len(facts.run.damaged)} damaged files are left out: {names}.")
    if len(facts.episodes) and facts.tokenizer is None:
        notes.append(
            "Answers are not tinted by log-probability: that needs the `tokenizers` package, and "
            f"tokenizer.json in {config.get('model.path', 'the model directory')} or an export."
        )
    if config.get("run.replay_of"):
        notes.append(
            "A replay: episodes, their lengths and rewards are the replayed run's, and no engine "
            "ran. What is this run's own is under On-policy and Training."
        )
    if not notes:
        return ""
    return f'<div class="notes"><ul>{"".join(f"<li>{escape(n)}</li>" for n in notes)}</ul></div>'


# Tables


def _tasks(facts: Facts) -> str:
    table = facts.tasks
    if table.empty:
        return ""
    header = ["task", "prompts", "episodes", "reward", "early → late", "change", "length"]
    header += ["cut short", "equal rewards", "distinct answers", "errors"]
    rows = []
    for row in table.sort_values("task").to_dict("records"):
        change = row["change"]
        rows.append(
            [
                *(row["task"], f"{row['prompts']:,}", f"{row['episodes']:,}"),
                _number(row["reward"]),
                _arrow(change.early, change.late) if change else "-",
                _difference(change) if change else "-",
                f"{row['length']:.1f}",
                *(_percent(row[name]) for name in ("cut", "zero", "unique")),
                row["errors"],
            ]
        )
    return f"<h3>By task</h3>{_table(header, rows)}"


def _attempts(facts: Facts) -> str:
    run, starts = facts.run.run, read_resumed_from(facts.run.run)
    rows = []
    for n in run.attempt_numbers():
        record = read_json(run.attempt(n).record)
        codes = {p.stem: p.read_text().strip() for p in sorted(run.attempt(n).root.glob("*.exit"))}
        odd = [f"{peer} exit code {code}" for peer, code in codes.items() if code != "0"]
        versions = read_json(run.attempt(n).versions)
        rows.append(
            [
                *(n, record.get("status", "-")),
                _when(record.get("started_unix")),
                _clock(record["wall_s"]) if "wall_s" in record else "-",
                f"step {starts[n]}" if n in starts else "-",
                f"{record.get('peak_pss_bytes', 0) / 2**30:.2f} GiB",
                record.get("host", "-"),
                "; ".join(odd[:4]),
                ", ".join(f"{k} {v}" for k, v in list(versions.items())[:4]),
            ]
        )
    if not rows:
        return '<p class="missing">No attempt has begun.</p>'
    header = ["attempt", "ended", "began", "took", "from", "memory", "host", "exit codes but 0"]
    return _table([*header, "versions"], rows, texts=True)


def _configuration(facts: Facts) -> str:
    config, defaults = facts.run.config, Config()
    if not config:
        return '<p class="missing">The run has no config.yaml.</p>'
    known = option_types(Config)
    changed: list[list[str]] = []
    others: list[list[str]] = []
    for key, value in config.items():
        usual = attrgetter(key)(defaults) if key in known else None
        usual = list(usual) if isinstance(usual, tuple) else usual
        (others if value == usual else changed).append(
            [key, *("-" if v is None else str(v) for v in (value, usual))]
        )
    shown = _table(["key", "value", "default"], changed, texts=True)
    rest = _table(["key", "value"], [row[:2] for row in others], texts=True)
    return (
        f"{shown}<details><summary>{len(others)} keys with default values</summary>{rest}</details>"
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]], *, texts: bool = False) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows
    )
    kind = ' class="texts"' if texts else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(header[0])} table">'
        f"<table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _figures(charts: Sequence[Chart]) -> str:
    figures = [
        f"<figure><figcaption><b>{escape(chart.title)}</b>{escape(chart.caption)}</figcaption>"
        f"{chart.svg}</figure>"
        for chart in charts
    ]
    return f'<div class="charts">{"".join(figures)}</div>'


# Words


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>' if text else ""


def _number(value: float | None, digits: int = 3) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return (
        f"{value:.{digits}g}" if abs(value) < 1e-3 or abs(value) >= 1e4 else f"{value:.{digits}f}"
    )


def _arrow(before: float | None, after: float | None) -> str:
    return f"{_number(before)} → {_number(after)}"


def _difference(change: Change) -> str:
    error = f" ± {change.error:.3f}" if math.isfinite(change.error) else ""
    return f"{change.difference:+.3f}{error}"


def _percent(share: float) -> str:
    if not math.isfinite(share):
        return "-"
    return f"{100 * share:.0f} %" if share == 0 or share >= 0.1 else f"{100 * share:.2g} %"


def _clock(seconds: float) -> str:
    return duration(seconds) if seconds < 60 else clock(seconds)


def _when(unix: float | None) -> str:
    return "-" if unix is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))
