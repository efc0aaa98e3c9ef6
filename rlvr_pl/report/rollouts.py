"""A few rollouts of each arm, early and late, as they were recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlvr_pl.errors import UserError
from rlvr_pl.report.content import Listing
from rlvr_pl.report.subject import ReportedRun, Subject

CHARACTERS = 1500
"""Of a rollout that are shown; a longer one is cut in the middle."""


def sample_listings(subject: Subject) -> list[Listing]:
    """Best and worst rollout of the first group of the first and the last update, of the first run of each arm."""
    listings = []
    for arm in subject.arms:
        run = subject.of(arm)[0]
        for update in dict.fromkeys((1, run.windows["updates"])):
            rows = [row for row in _rows(run, update) if row["group"] == 0 and row.get("text") is not None]
            if rows:
                listings.append(Listing(f"{run.label}, update {update}", _text(run, rows), subject.study is None))
    return listings


def _rows(run: ReportedRun, update: int) -> Iterator[dict[str, Any]]:
    """The recorded rollouts of one update."""
    mark = f'"update": {update},'
    for path in _files(run.path, update):
        with path.open(encoding="utf-8") as file:
            for line in file:
                if mark in line[: len(mark) + 2]:
                    yield json.loads(line)


def _files(path: Path, update: int) -> list[Path]:
    spans = [(file, *map(int, file.stem.split("-"))) for file in (path / "rollouts").glob("*-*.jsonl")]
    return [file for file, first, last in spans if first <= update <= last]


def _text(run: ReportedRun, rows: list[dict[str, Any]]) -> str:
    question = _problem(run, rows[0]["uid"])
    parts = [f"Question {rows[0]['uid']}" + (f": {question}" if question else "")]
    ranked = sorted(rows, key=lambda row: (-(row["reward"] or 0.0), row["sample"]))
    for row in dict.fromkeys((0, len(ranked) - 1)):
        found = ranked[row]
        kind = found["class"] if found["detector"] is None else f"{found['class']} ({found['detector']})"
        reward = "not scorable" if found["reward"] is None else f"reward {found['reward']:g}"
        parts.append(f"[{reward}, {found['length']} tokens, {kind}]\n{_cut(found['text'])}")
    return "\n\n".join(parts)


def _cut(text: str) -> str:
    half = CHARACTERS // 2
    return (
        text
        if len(text) <= CHARACTERS
        else f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
    )


def _problem(run: ReportedRun, uid: str) -> str | None:
    """The question's text, if its pool can still be read."""
    import yaml

    from rlvr_pl.data.pools import load_questions

    data = (yaml.safe_load(run.config) or {}).get("data", {}).get("init_args", {})
    if "train" not in data:
        return None
    try:
        pool = load_questions(data["train"], columns=data.get("columns"), drop_empty_gold=True)
    except UserError:
        return None
    return next((q.problem for q in pool if q.uid == uid), None)
