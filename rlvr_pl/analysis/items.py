"""Item and sample records as the statistics commands need them: the same questions in every file, or an error.

Item record: ``{uid, correct, subject, level, length, stop_reason, boxed, ...}``, one a question. Sample record: the
same with ``sample``, several a question. The first line may be a header that says how the answers came about.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rlvr_pl.errors import UserError
from rlvr_pl.jsonl import Kind, iter_jsonl, read_records

_FLAG = frozenset({0, 1})
_OPTIONAL: dict[str, Kind] = {
    "subject": str,
    "level": (int, str),
    "length": int,
    "boxed": _FLAG,
    "stop_reason": frozenset({"eos", "length"}),
}
_MUST_AGREE = ("engine", "batch_size")  # greedy outcomes depend on them: the paper, section 4.2
_SHOULD_AGREE = ("grader", "max_new_tokens")
_LISTED = 20


@dataclass(frozen=True)
class Run:
    """One file of item records, reordered to the questions of its panel. Arrays are [n]; `boxed` and `terminated` are
    None when the file does not have them in every row."""

    name: str
    header: dict[str, Any] | None
    correct: np.ndarray
    boxed: np.ndarray | None
    terminated: np.ndarray | None


@dataclass(frozen=True)
class Panel:
    """Runs on the same n questions; `columns` holds the subject and level of each question, or None where unknown."""

    uids: tuple[str, ...]
    columns: Mapping[str, tuple[Any, ...]]
    runs: tuple[Run, ...]

    @property
    def correct(self) -> np.ndarray:
        """[runs, n] outcomes."""
        return np.stack([run.correct for run in self.runs])

    def strata(self, column: str) -> list[tuple[Any, np.ndarray]]:
        """Each value of `column` with the indices of its questions, in order; UserError where one is unknown."""
        values = self.columns[column]
        unknown = [uid for uid, value in zip(self.uids, values) if value is None]
        if unknown:
            raise UserError(f"{self.runs[0].name}: --by {column}: no {column} for {_list(unknown)}")
        return [
            (value, np.array([i for i, x in enumerate(values) if x == value]))
            for value in sorted(set(values), key=lambda x: (str(type(x)), x))
        ]


@dataclass(frozen=True)
class Samples:
    """Sample records of one policy: ``(samples, correct ones)`` of each question; None where a row lacks the field."""

    name: str
    header: dict[str, Any] | None
    counts: dict[str, tuple[int, int]]
    mean_length: float | None
    boxed: dict[str, tuple[int, int]] | None  # (boxed, boxed and correct) of each question


def load_panel(paths: Sequence[str | Path], *, allow_mixed: bool = False) -> Panel:
    """Read item files and match them by uid.

    Args:
        paths: the files; the first one gives the order of the questions.
        allow_mixed: accept headers that differ in engine or batch size.

    Raises:
        UserError: a file is faulty; its uids are not those of the first file (they are listed); subject or level of a
            question differ between files; headers disagree.
    """
    first: dict[str, int] = {}
    columns: dict[str, list[Any]] = {}
    runs = []
    for path in paths:
        header, rows = _read(path, "items", {"uid": str, "correct": _FLAG}, ("uid",))
        if any("sample" in row for row in rows):
            raise UserError(f"{path}: holds sample records (several a question), where item records are needed")
        if not first:
            first = {row["uid"]: i for i, row in enumerate(rows)}
            columns = {name: [row.get(name) for row in rows] for name in ("subject", "level")}
        else:
            match_uids(paths[0], first, path, [row["uid"] for row in rows])
            rows.sort(key=lambda row: first[row["uid"]])
            _merge(columns, rows, path)
        runs.append(
            Run(
                str(path),
                header,
                np.array([row["correct"] for row in rows], dtype=bool),
                _flags(rows, "boxed", 1),
                _flags(rows, "stop_reason", "eos"),
            )
        )
    check_headers([(run.name, run.header) for run in runs], allow_mixed)
    return Panel(tuple(first), {name: tuple(values) for name, values in columns.items()}, tuple(runs))


def load_samples(path: str | Path) -> Samples:
    """Read sample records; a repeated (uid, sample) pair is a UserError."""
    required: dict[str, Kind] = {"uid": str, "sample": int, "correct": _FLAG}
    header, rows = _read(path, "samples", required, ("uid", "sample"))
    counts: dict[str, tuple[int, int]] = {}
    boxed: dict[str, tuple[int, int]] | None = {} if all(row.get("boxed") is not None for row in rows) else None
    for row in rows:
        n, c = counts.get(row["uid"], (0, 0))
        counts[row["uid"]] = (n + 1, c + row["correct"])
        if boxed is not None:
            b, right = boxed.get(row["uid"], (0, 0))
            boxed[row["uid"]] = (b + row["boxed"], right + (row["boxed"] and row["correct"]))
    lengths = [row["length"] for row in rows if row.get("length") is not None]
    mean = float(np.mean(lengths)) if len(lengths) == len(rows) else None
    return Samples(str(path), header, counts, mean, boxed)


def holds_samples(path: str | Path) -> bool:
    """Whether the first row after a header is a sample record."""
    return any("sample" in row for _, row in islice(iter_jsonl(path), 2))


def match_uids(first_path: str | Path, first: Iterable[str], path: str | Path, uids: Iterable[str]) -> None:
    """UserError that counts and lists the questions found in one file only."""
    one, other = set(first), set(uids)
    faults = []
    if one - other:
        faults.append(f"{len(one - other)} only in {first_path}: {_list(sorted(one - other))}")
    if other - one:
        faults.append(f"{len(other - one)} only in {path}: {_list(sorted(other - one))}")
    if faults:
        raise UserError(f"{path}: its questions are not those of {first_path}; " + "; ".join(faults))


def check_headers(headers: Sequence[tuple[str, dict[str, Any] | None]], allow_mixed: bool) -> None:
    """Refuse files made with different engines or batch sizes; warn of missing headers and of other differences."""
    missing = [name for name, header in headers if header is None]
    if missing:
        warn(f"no header in {_list(missing)}: engine and batch size unknown, and 8% of items can hang on them")
    known = [(name, header) for name, header in headers if header is not None]
    for key in (*_MUST_AGREE, *_SHOULD_AGREE):
        values = [(name, header[key]) for name, header in known if key in header]
        odd = next(((name, value) for name, value in values if value != values[0][1]), None)
        if odd is None:
            continue
        message = f"{odd[0]} has {key} {odd[1]!r} but {values[0][0]} has {values[0][1]!r}"
        if key in _SHOULD_AGREE:
            warn(message)
        elif not allow_mixed:
            raise UserError(f"{message}: outcomes are not comparable; evaluate again, or pass --allow-mixed")


def add_resample_arguments(parser: argparse.ArgumentParser, unit: str) -> None:
    """``--resamples`` and ``--seed`` of a bootstrap over `unit`."""
    parser.add_argument(
        "--resamples", type=_at_least(1), default=4000, metavar="R", help=f"resamples of the {unit} (default 4000)"
    )
    parser.add_argument("--seed", type=_at_least(0), default=0, help="names the bootstrap draws (default 0)")


def _at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: must be at least {least}")
        return int(text)

    return whole_number


def warn(message: str) -> None:
    """One line on stderr; stdout belongs to the result."""
    print(f"rlvr-pl: warning: {message}", file=sys.stderr)


def as_user_error(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`call` with the ValueError of a wrong argument turned into a UserError."""
    try:
        return call(*args, **kwargs)
    except ValueError as error:
        raise UserError(str(error)) from None


def _read(
    path: str | Path, record: str, required: dict[str, Kind], unique: tuple[str, ...]
) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    keep = {*required, "sample", *_OPTIONAL}
    return read_records(path, record, required=required, optional=_OPTIONAL, unique=unique, keep=keep)


def _merge(columns: dict[str, list[Any]], rows: list[dict[str, Any]], path: str | Path) -> None:
    for name, values in columns.items():
        for i, row in enumerate(rows):
            value = row.get(name)
            if values[i] is None:
                values[i] = value
            elif value is not None and value != values[i]:
                raise UserError(f"{path}: {name} of {row['uid']!r} is {value!r}, but {values[i]!r} in an earlier file")


def _flags(rows: list[dict[str, Any]], name: str, true: Any) -> np.ndarray | None:
    values = [row.get(name) for row in rows]
    return None if None in values else np.array([value == true for value in values], dtype=bool)


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"
