"""Records that grow question by question and survive a kill at any byte."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from rlvr_pl.cost import CostLedger, ledger_path
from rlvr_pl.errors import RunFailure, UserError
from rlvr_pl.records import atomic_write_text, canonical_json, check_place
from rlvr_pl.types import Question

VERSION = 1
SAMPLES, RATIONALES, SOLUTIONS = "samples", "rationales", "solutions"
"""What the records of a file may be, as its header says."""
NAMES_ONLY = ("checkpoint",)
"""Fields of a header that tell a reader where something came from; its hash beside it is what counts."""
BULKY = ("token_ids", "text")
"""Fields that are on disk only."""

Row = dict[str, Any]


class QuestionFile:
    """An append-only JSON Lines file: a header, then the rows of one question after another, in the order of a plan.

    A question's rows are one write, forced to disk. Opening the file again cuts off what a kill left of an unfinished
    question, so that the continued file has the bytes of one that was never interrupted. One process at a time.

    Args:
        path: the file; its folder must exist.
        header: everything that the rows depend on. A file with any other header is refused.
        plan: the uids of the questions, in order.
        size: how many rows a question has, told by the first ones (at least one).

    Attributes:
        done: questions of the plan that are in the file.
        rows: their rows, without the fields named in `BULKY`.
    """

    def __init__(
        self, path: Path, header: Mapping[str, Any], plan: Sequence[str], size: Callable[[Sequence[Row]], int]
    ) -> None:
        self.path = path
        self.header = dict(header)
        self.plan = plan
        self.done = 0
        self.rows: list[Row] = []
        self._size = size

    def __enter__(self) -> QuestionFile:
        check_place(self.path, "--out")
        if not self.path.parent.is_dir():
            raise UserError(f"--out {self.path}: the folder {self.path.parent} does not exist")
        if not self.path.exists():
            atomic_write_text(self.path, _line(self.header))
        self._file = self.path.open("r+b")
        try:
            self._lock()
            self._resume()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._file.close()  # and with it what a full disk has not taken yet
        except OSError:
            if error is None:
                raise

    def append(self, rows: Sequence[Row]) -> None:
        """Write all rows of the next question of the plan."""
        assert rows[0]["uid"] == self.plan[self.done] and len(rows) == self._size(rows)
        try:
            self._file.write("".join(map(_line, rows)).encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise RunFailure(
                f"{self.path}: {error.strerror or error}; {self.done} of {len(self.plan)} questions are recorded; once "
                "this is mended, the same command goes on"
            ) from error
        self._keep(rows)

    def _keep(self, rows: Iterable[Row]) -> None:
        self.done += 1
        self.rows += [{key: value for key, value in row.items() if key not in BULKY} for row in rows]

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--out {self.path}: another process is writing it") from None

    def _resume(self) -> None:
        end = 0
        open_rows: list[Row] = []
        for place, number, row in _whole_lines(self._file, self.path):
            if number == 1:
                self._check_header(row)
            else:
                self._check_uid(row, number)
                open_rows.append(row)
                if len(open_rows) == self._size(open_rows):
                    self._keep(open_rows)
                    open_rows = []
            if not open_rows:
                end = place
        if end == 0:
            raise UserError(f"--out {self.path}: exists and does not begin with a header; choose another name")
        if self._file.seek(0, os.SEEK_END) > end:
            print(f"rlvr-pl: {self.path}: dropped a question that was cut off; it is made again", file=sys.stderr)
            self._file.truncate(end)
            self._file.seek(end)

    def _check_header(self, found: Row) -> None:
        if found.get("record") != self.header["record"]:
            kind = self.header["record"]
            raise UserError(f"--out {self.path}: exists and is not a file of {kind} records; choose another name")
        names = [n for n in {**self.header, **found} if n not in NAMES_ONLY and found.get(n) != self.header.get(n)]
        if names:
            told = "; ".join(f"{n} was {_short(found.get(n))}, now {_short(self.header.get(n))}" for n in names)
            raise UserError(f"--out {self.path}: was made with other settings ({told}); choose another name")

    def _check_uid(self, row: Row, number: int) -> None:
        if self.done >= len(self.plan) or row.get("uid") != self.plan[self.done]:
            raise UserError(f"{self.path}:{number}: not a row of the question that comes here in the plan; damaged?")


@dataclass(frozen=True)
class Filled:
    """A finished file: all its rows (without the fields named in `BULKY`), how many of them are new, what they cost."""

    rows: list[Row]
    added: int
    cost: CostLedger


def fill(
    file: QuestionFile,
    parts: Iterable[Sequence[Question]],
    make: Callable[[Sequence[Question]], Mapping[str, Sequence[Row]]],
    cost: Callable[[Sequence[Row]], CostLedger],
) -> Filled:
    """Make and append what the file lacks of its plan, and keep its ledger beside it.

    Args:
        file: an open file.
        parts: the plan cut into parts that are sampled together. A part that was interrupted is made again as a whole,
            since rounding depends on what is sampled together; what the file has of it is not written twice.
        make: the rows of each question of a part, by uid.
        cost: what rows cost, without time.
    """
    path = ledger_path(file.path)
    before = CostLedger.read(path).wall_seconds if file.rows and path.exists() else 0.0
    ledger = cost(file.rows) + CostLedger(wall_seconds=before)
    old, seen = len(file.rows), 0
    for part in parts:
        seen += len(part)
        missing = part[len(part) - max(0, seen - file.done) :]
        if not missing:
            continue
        begin = time.perf_counter()
        rows = make(part)
        for question in missing:
            file.append(rows[question.uid])
            ledger += cost(rows[question.uid])
        ledger += CostLedger(wall_seconds=time.perf_counter() - begin)
        ledger.write(path)
    ledger.write(path)
    return Filled(file.rows, len(file.rows) - old, ledger)


def questions_sha256(questions: Iterable[Question]) -> str:
    """Of uids, problems and answers in order."""
    content = canonical_json([[q.uid, q.problem, q.answer] for q in questions])
    return hashlib.sha256(content.encode()).hexdigest()


def tokenizer_sha256(tokenizer: Any) -> str:
    """Of the meaning of every token id: two tokenizers with the same hash read the same text out of stored ids."""
    return hashlib.sha256(canonical_json(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def _whole_lines(file: IO[bytes], path: Path) -> Iterator[tuple[int, int, Row]]:
    """(offset of the line's end, its number, its object) of every line that ends; one that does not is left out."""
    end = 0
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            return
        end += len(line)
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise UserError(f"--out {path}: line {number} is no record; choose another name")
        yield end, number, row


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:12] + '..."'
