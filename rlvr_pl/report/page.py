"""Puts a report together and writes it as one self-contained HTML file and as Markdown."""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rlvr_pl.errors import UserError
from rlvr_pl.records import atomic_write_text
from rlvr_pl.report import figures, tables
from rlvr_pl.report.content import Cell, Figure, Grid, Listing, Section, command
from rlvr_pl.report.rollouts import sample_listings
from rlvr_pl.report.subject import ReportedRun, Subject, read_subject
from rlvr_pl.study.resolve import difference_words

MARKS = {True: "held", False: "did not hold", None: "open"}
CLASSES = {"held": "held", "did not hold": "missed", "open": "open"}
"""Style of each mark in the HTML."""


def write_report(path: Path, out: Path) -> list[Section]:
    """Report on the run or study in `path`: HTML to `out`, Markdown beside it. Gives what is in them."""
    subject = read_subject(path)
    title = f"{subject.name}: {'a study' if subject.study else 'a run'}"
    sections = make_sections(subject)
    atomic_write_text(out, html(title, sections))
    atomic_write_text(out.with_suffix(".md"), markdown(title, sections))
    return sections


def make_sections(subject: Subject) -> list[Section]:
    """The whole report."""
    sections = [
        overview(subject),
        *([fixed_beforehand(subject), arms(subject)] if subject.study else []),
        accuracy(subject),
        drift(subject),
        rollouts(subject),
        entropy_gradient(subject),
        noise(subject),
        costs(subject),
        samples(subject),
        again(subject),
    ]
    return [s for s in sections if s.text or s.parts]


def overview(subject: Subject) -> Section:
    """What came of it, in a few lines."""
    section = Section("Overview")
    study = subject.study
    if study is None:
        run = subject.runs[0]
        state, verdict = run.state, run.verdict
        section.text.append(
            f"{state['objective']} from {state['start']}: {state['updates']} of {state['planned_updates']} updates, "
            f"{state['state']}."
        )
        validation = run.records.validation()
        if len(validation) > 1:
            first, last = min(validation), max(validation)
            section.text.append(
                f"Correct on held-out questions: {validation[first]} at update {first}, {validation[last]} at update "
                f"{last}."
            )
        if verdict is not None:
            section.text.append(f"Collapsed by its frozen rule: {tables.collapse_words(run)}.")
        return section
    content, frozen = study.content, study.content["frozen"]
    if content["about"]:
        section.text.append(content["about"])
    plan = content["plan"]
    planned = len(content["arms"]) * len(content["seeds"])
    section.text.append(
        f"The start answers {frozen['start_correct']} of {frozen['n']} held-out questions. {len(subject.runs)} of "
        f"{planned} runs finished; each planned {plan['updates']} updates and {plan['rollouts']:,} rollouts."
    )
    collapsed = Counter(run.arm for run in subject.runs if (run.verdict or {}).get("collapsed"))
    fallen = [f"{arm} ({collapsed[arm]} of {len(subject.of(arm))} seeds)" for arm in subject.arms if collapsed[arm]]
    stable = [arm for arm in subject.arms if not collapsed[arm]]
    section.text.append(
        f"Collapsed by the frozen rule: {', '.join(fallen) or 'none'}. Not: {', '.join(stable) or 'none'}."
    )
    counts = Counter(j.held for _, j in study.judgements())
    if counts:
        section.text.append(
            f"Of {sum(counts.values())} expectations written beforehand {counts[True]} held, {counts[False]} did not, "
            f"{counts[None]} are open."
        )
    return section


def fixed_beforehand(subject: Subject) -> Section:
    """The rule, the hashes and the expectations, all from before update 1."""
    assert subject.study is not None
    content = subject.study.content
    frozen, rule = content["frozen"], content["frozen"]["criterion"]
    section = Section("Fixed before the first update")
    section.text.append(
        f"On {content['frozen_at']}, with the SHA-256 {content['sha256'][:16]} over all of it (study.json). One rule "
        f"judges every arm: a {rule['mode']} window of {rule['window']} updates with a truncation rate of at least "
        f"{rule['truncation']:g}, or a validation with at most {rule['val_floor']} correct answers."
    )
    rows: list[Sequence[Cell]] = [
        ["Start", f"{frozen['start']} ({frozen['start_sha256'][:16]})"],
        ["Questions and their order", frozen["order_sha256"][:16]],
        ["Rule", frozen["criterion_sha256"][:16]],
    ]
    section.add(Grid("Identities", "SHA-256 of what all arms share.", ["What", "SHA-256"], rows))
    said = [[str(e), MARKS[j.held], j.detail] for e, j in subject.study.judgements()]
    if said:
        section.add(
            Grid(
                "Expectations",
                "Statements written in the study file before its first run, and whether they held in every seed.",
                ["Expected", "Outcome", "Found"],
                said,
                [command("study", content["file"], "--out", subject.path)],
            )
        )
    return section


def arms(subject: Subject) -> Section:
    """What the arms share, and what differs: their confounds."""
    assert subject.study is not None
    content = subject.study.content
    first = next(iter(content["arms"]))
    rows = [
        [name, difference_words(arm["commands"], arm["differences"]) or "–"] for name, arm in content["arms"].items()
    ]
    section = Section("Arms")
    section.text.append(
        "All arms that are settings of fit have the same start, questions and order, rollouts of an update, cap, "
        "grader and validations; anything else in which an arm differs is listed. An arm that differs in several "
        "things at once is no single-factor intervention."
    )
    section.add(
        Grid(
            "Differences",
            f"Settings in which an arm differs from {first}.",
            ["Arm", "Differs in"],
            rows,
            [command("study", content["file"], "--dry-run")],
        )
    )
    return section


def accuracy(subject: Subject) -> Section:
    """Held-out accuracy."""
    section = Section("Held-out accuracy")
    section.add(tables.table_1(subject), tables.over_seeds(subject), figures.validation_figure(subject))
    return section


def drift(subject: Subject) -> Section:
    """Drift on fixed contexts."""
    section = Section("Drift")
    section.add(tables.table_3(subject), figures.drift_figure(subject))
    return section


def rollouts(subject: Subject) -> Section:
    """Rollouts, signed mass, gradients and collapse."""
    section = Section("Rollouts and collapse")
    section.add(
        tables.table_4(subject) if subject.study else None,
        tables.table_4b(subject),
        figures.class_figure(subject),
        figures.mass_figure(subject),
    )
    return section


def entropy_gradient(subject: Subject) -> Section:
    """First-order link between losses and entropy, if it was measured."""
    section = Section("First-order effect on the entropy")
    section.add(*tables.table_5(subject))
    return section


def noise(subject: Subject) -> Section:
    """What differences of this size mean."""
    section = Section("Noise and power")
    section.add(tables.table_2(subject), tables.power_table(subject))
    return section


def costs(subject: Subject) -> Section:
    """What it took."""
    section = Section("Costs")
    section.add(tables.cost_table(subject))
    return section


def samples(subject: Subject) -> Section:
    """Rollouts as they were sampled."""
    section = Section("Sampled rollouts")
    section.add(*sample_listings(subject))
    if section.parts:
        section.text.append(
            "Best and worst rollout of a question, at the first and the last update of each arm, as recorded."
        )
    return section


def again(subject: Subject) -> Section:
    """How to make all of it again."""
    section = Section("To make this again")
    if subject.study is not None:
        section.add(Listing("The study", command("study", subject.study.content["file"], "--out", subject.path), True))
    commands = [f"# {run.label}\n{_run_command(run)}" for run in subject.runs]
    section.add(Listing("The runs", "\n".join(commands), True))
    section.add(
        Grid(
            "Runs",
            "Config: SHA-256 of config.yaml, which holds every setting with its default.",
            ["Run", "Config", "Start", "Order", "Engine", "Deterministic"],
            [
                [
                    run.label,
                    run.config_sha256[:12],
                    run.state["start_sha256"][:12],
                    run.state["order_sha256"][:12],
                    run.state["engine"],
                    "yes" if run.state["deterministic"] else "no",
                ]
                for run in subject.runs
            ],
        )
    )
    for versions, names in _versions(subject).items():
        section.add(Listing(f"Versions ({names})", versions, True))
    if subject.study is not None:
        section.add(Listing("study.yaml", (subject.path / "study.yaml").read_text(encoding="utf-8")))
    first = subject.runs[0]
    section.add(Listing(f"config.yaml of {first.label}", first.config))
    return section


def _run_command(run: ReportedRun) -> str:
    words = run.state["command"]
    return command(*words[1:]) if words[:1] == ["rlvr-pl"] else command(*words)


def _versions(subject: Subject) -> dict[str, str]:
    """Versions as text -> the runs that had them."""
    groups: dict[str, list[str]] = {}
    for run in subject.runs:
        lines = [f"{name} {version}" for name, version in run.state["versions"].items()]
        groups.setdefault("\n".join([*lines, f"threads {run.state['threads']}"]), []).append(run.label)
    if len(groups) == 1:
        return {text: "of every run" if len(subject.runs) > 1 else "of the run" for text in groups}
    return {text: ", ".join(names) for text, names in groups.items()}


# ---- two ways to write it ------------------------------------------------------------------------------------------


def html(title: str, sections: Sequence[Section]) -> str:
    """One HTML document with everything inside it."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError:
        raise UserError("the report needs jinja2; `pip install jinja2`") from None
    environment = Environment(
        loader=PackageLoader("rlvr_pl.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.tests |= {
        "grid": lambda part: isinstance(part, Grid),
        "figure": lambda part: isinstance(part, Figure),
        "listing": lambda part: isinstance(part, Listing),
    }
    environment.filters["data_uri"] = _data_uri
    environment.filters["anchor"] = lambda text: text.lower().replace(" ", "-")
    environment.filters["numeric"] = _numeric
    return environment.get_template("page.html.jinja").render(title=title, sections=sections, marks=CLASSES) + "\n"


def markdown(title: str, sections: Sequence[Section]) -> str:
    """The same without the pictures."""
    lines = [f"# {title}"]
    for section in sections:
        lines += ["", f"## {section.title}"]
        for text in section.text:
            lines += ["", _plain(text)]
        for part in section.parts:
            lines += ["", *_markdown(part)]
    return "\n".join(lines) + "\n"


def _markdown(part: Grid | Figure | Listing) -> list[str]:
    if isinstance(part, Listing):
        fence = "`" * max(3, _longest_run(part.text, "`") + 1)
        return [f"**{_plain(part.title)}**", "", f"{fence}text", part.text.rstrip("\n"), fence]
    if isinstance(part, Figure):
        return [f"**{part.name}** (in the HTML report): {_plain(part.caption)}", *_again(part.commands)]
    head = "| " + " | ".join(map(_cell, part.columns)) + " |"
    rule = "|" + "|".join("---:" if _numeric(part, i) else "---" for i in range(len(part.columns))) + "|"
    rows = ["| " + " | ".join(map(_cell, row)) + " |" for row in part.rows]
    return [f"**{part.name}.** {_plain(part.caption)}", "", head, rule, *rows, *_again(part.commands)]


def _again(commands: Sequence[str]) -> list[str]:
    """The commands that make the numbers again, each once."""
    lines = list(dict.fromkeys(commands))
    if len(lines) < 2:
        return [x for line in lines for x in ("", f"Again: `{line}`")]
    return ["", "Again:", "", "```text", *lines, "```"]


def _cell(value: Cell) -> str:
    return _plain("" if value is None else str(value)).replace("|", "\\|").replace("\n", " ")


def _plain(text: str) -> str:
    """Text that Markdown leaves alone."""
    for mark in "\\*_<>[]":
        text = text.replace(mark, f"\\{mark}")
    return text


def _longest_run(text: str, mark: str) -> int:
    longest = run = 0
    for letter in text:
        run = run + 1 if letter == mark else 0
        longest = max(longest, run)
    return longest


def _numeric(grid: Grid, column: int) -> bool:
    """Whether a column holds figures, which are set right-aligned."""
    cells = [str(row[column]) for row in grid.rows if row[column] not in (None, "", "–")]
    return (
        column > 0 and bool(cells) and all(re.match(r"[+−]?\d", x) and not re.search(r"[a-zA-Z]{2}", x) for x in cells)
    )


def _data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
