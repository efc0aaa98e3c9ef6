"""Reading questions from files and data sets; every fault names the place and the remedy.

A question record has the fields ``uid``, ``problem``, ``answer`` and, where known, ``subject`` and ``level``; `columns`
maps them to a file's own names. Without a uid column a question is called ``<file stem>/<row>``, rows counted from 0.
"""

from __future__ import annotations

import csv
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rlvr_pl.data.rows import Rows, chosen
from rlvr_pl.errors import UserError
from rlvr_pl.jsonl import iter_jsonl
from rlvr_pl.text_file import read_json, read_text, refuse_devices
from rlvr_pl.types import Question

FIELDS = ("uid", "problem", "answer", "subject", "level")
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")

MAX_TEXT = 2**22
"""Characters of a problem or an answer; a longer one is no question, and tokenizers take 50 times its memory."""

ROLES = ("system", "developer", "user", "assistant", "tool")

_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?(:(?P<split>[\w.\-\[\]:%+]+))?")
_LINE = re.compile(r"[^\r\n]*(?:\r\n?|\n)|[^\r\n]+")
_LEVEL = re.compile(r"\s*(?:level\s*)?(\d{1,3}|\?)\s*", re.IGNORECASE)


def load_questions(
    name: str | os.PathLike[str],
    *,
    columns: Mapping[str, str] | None = None,
    split: str = "train",
    where: Mapping[str, Any] | None = None,
    prepare: str | None = None,
    stream: int | None = None,
    drop_empty_gold: bool = False,
    naming: str | None = None,
) -> list[Question]:
    """Read a set of questions that all have a gold answer.

    Args:
        name: ``embedded:train``, ``embedded:val350``, ``embedded:drift``, ``arithmetic:train``, ``arithmetic:val``; a
            JSON Lines, JSON (list of objects), Parquet or CSV file; a folder that `datasets` saved; or a data set on
            the Hugging Face hub as ``OWNER/NAME``, ``OWNER/NAME:CONFIG`` or ``OWNER/NAME:CONFIG:SPLIT``.
        columns: our field -> column of the file, for the fields whose column has another name. A problem may be text
            or a list of chat messages, ``{"role", "content"}`` each.
        split: split of a folder or hub data set.
        where: column -> value or list of values; other rows are left out (see `rlvr_pl.data.rows.chosen`).
        prepare: a function of the user's that changes a row or leaves it out, by its path (ditto).
        stream: read a hub data set as a stream and stop after this many questions; None loads all of it.
        drop_empty_gold: leave out questions whose answer is empty, instead of refusing the set.
        naming: how the user maps a column, as a message says it, ``{field}`` for the field.

    Returns:
        The questions in the order of the file. Columns that are no field of ours are kept in `Question.columns`.

    Raises:
        UserError: unreadable, empty, or a row of the wrong form; a uid that occurs twice; an empty gold.

    Example:
        >>> questions = load_questions("embedded:val350")
        >>> len(questions), questions[0].answer.isdigit()
        (350, True)
    """
    questions = read_questions(
        name, columns=columns, split=split, where=where, prepare=prepare, stream=stream, naming=naming
    )
    empty = [q.uid for q in questions if not q.answer.strip()]
    if empty and not drop_empty_gold:
        raise UserError(f"{name}: empty gold answers: {listed(empty)}; set drop_empty_gold to leave these out")
    if len(empty) == len(questions):
        raise UserError(f"{name}: every gold answer is empty")
    return [q for q in questions if q.answer.strip()]


def read_questions(
    name: str | os.PathLike[str],
    *,
    columns: Mapping[str, str] | None = None,
    split: str = "train",
    where: Mapping[str, Any] | None = None,
    prepare: str | None = None,
    stream: int | None = None,
    naming: str | None = None,
) -> list[Question]:
    """`load_questions` without its look at the golds: an answer may be the empty text."""
    name = os.fspath(name)
    task, colon, part = name.partition(":")
    if colon and task in ("embedded", "arithmetic"):
        from rlvr_pl.data import arithmetic, walk

        rows = (walk if task == "embedded" else arithmetic).questions(part)
        if not (where or prepare):
            return rows
        source = ((f"{name}: row {i}", {f: getattr(q, f) for f in FIELDS}) for i, q in enumerate(rows, 1))
    else:
        source = _rows(name, split, stream)
    read = _Reader(name, columns or {}, naming)
    questions = [read(place, row) for place, row in islice(chosen(source, where, prepare), stream)]
    if not questions:
        raise UserError(
            f"{name}: no questions in it{' that data.where and data.prepare leave' * bool(where or prepare)}"
        )
    _refuse_twice(name, [q.uid for q in questions], [q.place for q in questions])
    return questions


def read_uids(path: str | os.PathLike[str]) -> list[str]:
    """The uids of a JSON file: a list of uids, or of objects with a ``uid``. UserError when it is not that, is empty or
    names a uid twice."""
    content = read_json(path)
    if not isinstance(content, list) or not content:
        raise UserError(f"{path}: must be a JSON list of uids, not empty")
    uids = [x.get("uid") if isinstance(x, dict) else x for x in content]
    for row, uid in enumerate(uids, 1):
        if not isinstance(uid, (str, int)) or isinstance(uid, bool):
            raise UserError(f"{path}: row {row}: a uid must be a string or an integer, not {_short(uid)}")
    uids = [str(uid) for uid in uids]
    _refuse_twice(str(path), uids, [f"row {row}" for row in range(1, len(uids) + 1)])
    return uids


def listed(uids: list[str], limit: int = 5) -> str:
    """The first uids of a list for a message, and how many more there are."""
    shown = ", ".join(map(_short, uids[:limit]))
    return shown if len(uids) <= limit else f"{shown} and {len(uids) - limit} more"


# ---- rows of each format -------------------------------------------------------------------------------------------


def _rows(name: str, split: str, stream: int | None) -> Rows:
    path = Path(name)
    if path.suffix.lower() in SUFFIXES or os.path.lexists(name):
        if os.path.isdir(name):
            return _data_set(lambda: _open_folder(path, split), name)
        readers: dict[str, Callable[[Path], Rows]] = {
            ".jsonl": _jsonl_rows,
            ".ndjson": _jsonl_rows,
            ".json": _json_rows,
            ".parquet": _parquet_rows,
            ".csv": _csv_rows,
        }
        reader = readers.get(path.suffix.lower())
        if reader is None:
            raise UserError(f"{name}: the ending must be one of {', '.join(SUFFIXES)}")
        refuse_devices(path)
        return reader(path)
    hub = _HUB_NAME.fullmatch(name)
    if hub is None:
        raise UserError(f"{name}: no such file (a data set on the hub is OWNER/NAME)")
    streaming = stream is not None
    return _data_set(lambda: _open_hub(hub["name"], hub["config"], hub["split"] or split, streaming), name)


def _jsonl_rows(path: Path) -> Rows:
    for number, row in iter_jsonl(path):
        yield f"{path}:{number}", row


def _json_rows(path: Path) -> Rows:
    content = read_json(path)
    if not isinstance(content, list):
        raise UserError(f"{path}: must be a JSON list of question objects, not {_short(content)}")
    for number, row in enumerate(content, 1):
        if not isinstance(row, dict):
            hint = "; a list of uids is an order, not questions" if isinstance(row, str) else ""
            raise UserError(f"{path}: row {number}: must be an object, not {_short(row)}{hint}")
        yield f"{path}: row {number}", row


def _csv_rows(path: Path) -> Rows:
    lines = (match.group() for match in _LINE.finditer(read_text(path)))  # one at a time, with its ending
    reader = csv.DictReader(lines, strict=True)
    done = 0  # lines of the rows before
    try:
        names = reader.fieldnames or []
        if len(set(names)) < len(names):
            raise UserError(f"{path}:1: a column name occurs twice")
        done = reader.line_num
        for row in reader:
            if None in row or None in row.values():
                raise UserError(f"{path}:{reader.line_num}: not the {len(names)} cells that the first line names")
            done = reader.line_num
            yield f"{path}:{done}", {k: None if v == "" else v for k, v in row.items()}
    except csv.Error as error:
        raise UserError(f"{path}:{done + 1}: not CSV in the row that begins here: {error}") from None


def _parquet_rows(path: Path) -> Rows:
    import pyarrow.parquet

    try:
        with path.open("rb") as file:
            rows = pyarrow.parquet.read_table(file).to_pylist()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except Exception as error:  # pyarrow raises many kinds on damaged bytes
        raise UserError(f"{path}: not a readable Parquet file: {_one_line(error)}") from None
    for number, row in enumerate(rows, 1):
        yield f"{path}: row {number}", row


def _data_set(load: Callable[[], Any], name: str) -> Rows:
    try:
        import datasets
    except ImportError:
        raise UserError(f"{name}: folders and hub names need the package datasets: pip install datasets") from None
    datasets.disable_progress_bars()
    try:
        for number, row in enumerate(load(), 1):
            yield f"{name}: row {number}", dict(row)
    except UserError:
        raise
    except Exception as error:  # network, cache, file formats: each with errors of its own
        what = "is no data set" if os.path.isdir(name) else "no such file, and no data set"
        raise UserError(f"{name}: {what} that could be loaded: {_one_line(error)}") from error


def _open_folder(path: Path, split: str) -> Any:
    import datasets

    if (path / "dataset_dict.json").is_file():
        splits = datasets.load_from_disk(str(path))
        if split not in splits:
            raise UserError(f"{path}: no split {split!r}; it has {', '.join(map(str, splits))}")
        return splits[split]
    if (path / "state.json").is_file():
        return datasets.load_from_disk(str(path))
    return datasets.load_dataset(str(path), split=split)


def _open_hub(name: str, config: str | None, split: str, streaming: bool) -> Any:
    import datasets

    if streaming:
        return datasets.load_dataset(name, config, split=split, streaming=True)
    return datasets.load_dataset(name, config, split=split)


# ---- one row -> one question ---------------------------------------------------------------------------------------


class _Reader:
    """Turns rows into questions; called once a row, in order."""

    def __init__(self, name: str, columns: Mapping[str, str], naming: str | None) -> None:
        if unknown := sorted(set(columns) - set(FIELDS)):
            raise UserError(f"columns: unknown {', '.join(unknown)}; the fields are {', '.join(FIELDS)}")
        self.stem, self.naming = Path(name).stem, naming
        self.columns = {field: columns.get(field, field) for field in FIELDS}
        self.needed = {field for field in FIELDS if field in columns} | {"problem", "answer"}
        self.count = 0
        self.chat = False

    def __call__(self, where: str, row: dict[str, Any]) -> Question:
        if self.count == 0 and self.columns["uid"] in row:
            self.needed.add("uid")
        for field in sorted(self.needed):
            if self.columns[field] not in row:
                self._missing(where, field, row)
        if "uid" not in self.needed and self.columns["uid"] in row:
            raise UserError(f"{where}: has a {self.columns['uid']!r}, but the first row has none")
        values = {field: row.get(column) for field, column in self.columns.items()}
        if self.count == 0:  # a column has one form, that of its first row
            first = values["problem"]
            self.chat = isinstance(first, list) and any(isinstance(m, Mapping) for m in first)
        used = set(self.columns.values())
        uid = (
            _text_field(where, self.columns["uid"], values["uid"])
            if "uid" in self.needed
            else f"{self.stem}/{self.count}"
        )
        self.count += 1
        if not uid:
            raise UserError(f"{where}: the uid is empty")
        messages = ()
        if self.chat:
            messages = _messages(where, self.columns["problem"], values["problem"])
            values["problem"] = next(m["content"] for m in reversed(messages) if m["role"] == "user")
        problem = _text_field(where, self.columns["problem"], values["problem"])
        if not problem.strip():
            raise UserError(f"{where}: the problem is empty")
        answer, subject = values["answer"], values["subject"]
        return Question(
            uid=uid,
            problem=problem,
            answer="" if answer is None else _text_field(where, self.columns["answer"], answer),
            subject=None if subject is None else _text_field(where, self.columns["subject"], subject),
            level=_level(where, self.columns["level"], values["level"]),
            columns={str(key): value for key, value in row.items() if key not in used},
            messages=messages,
            renamed={c: row[c] for f, c in self.columns.items() if f not in (c, "problem") and c in row},
            place=where,
        )

    def _missing(self, where: str, field: str, row: dict[str, Any]) -> None:
        column, there = self.columns[field], ", ".join(map(repr, list(row)[:8])) or "none"
        remedy = (
            f"call yours {column!r}" if self.naming is None else f"name yours with {self.naming.format(field=field)}"
        )
        raise UserError(f"{where}: no column {column!r}; there are {there}; {remedy}")


def _messages(where: str, name: str, value: Any) -> tuple[Mapping[str, str], ...]:
    """Chat messages, of which one at least is the user's."""
    if not isinstance(value, list):
        raise UserError(f"{where}: {name!r} must be a list of chat messages, as in the first row, not {_short(value)}")
    found = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            raise UserError(
                f"{where}: {name!r}, message {number}: must be an object with a role ({', '.join(ROLES)}) and a content"
            )
        content = _text_field(where, f"{name}, message {number}, content", message.get("content"))
        found.append({"role": message["role"], "content": content})
    if not any(m["role"] == "user" for m in found):
        raise UserError(f"{where}: {name!r} holds no message of the user")
    return tuple(found)


def _text_field(where: str, name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise UserError(f"{where}: {name!r} must be text or a number, not {_short(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where}: {name!r} is {value}")
    try:
        text = str(value)
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{where}: {name!r} holds half of a surrogate pair, which is no character") from None
    except ValueError:  # Python writes no integer of more than 4,300 digits
        raise UserError(f"{where}: {name!r} is too long a number") from None
    if "\0" in text:
        raise UserError(f"{where}: {name!r} holds a NUL character")
    if len(text) > MAX_TEXT:
        raise UserError(f"{where}: {name!r} has {len(text):,} characters; a question has at most {MAX_TEXT:,}")
    return text


def _level(where: str, name: str, value: Any) -> int | None:
    """An integer, "Level 3", or nothing ("Level ?" of the MATH data, and the NaN of data frames)."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and (found := _LEVEL.fullmatch(value)):
        return None if found[1] == "?" else int(found[1])
    raise UserError(f"{where}: {name!r} must be a whole number or 'Level N', not {_short(value)}")


def _refuse_twice(name: str, uids: list[str], places: list[str]) -> None:
    if len(set(uids)) < len(uids):
        twice = [uid for uid, count in Counter(uids).items() if count > 1]
        again = [place for place, uid in zip(places, uids) if uid == twice[0]][1]
        raise UserError(f"{name}: uids that occur more than once: {listed(twice)} (again in {again})")


# ---- small things --------------------------------------------------------------------------------------------------


def _short(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _one_line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300]
