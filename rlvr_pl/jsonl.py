"""Strict reading of JSON Lines: every fault of a file is a `UserError` that names the file and the line."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from rlvr_pl.errors import UserError
from rlvr_pl.text_file import lone_surrogate

MAX_LINE_BYTES = 64 * 2**20
"""A longer line is refused: it is a file of another kind (one JSON array, a binary), and would fill the memory."""

Kind = type | tuple[type, ...] | frozenset
"""What a JSON value may be: types (str, int, float with integers, bool, list, dict, type(None)), or a frozenset
of the values allowed; ``frozenset({0, 1})`` takes true and false as well."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of UTF-8, as spreadsheets and editors write it
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_NAMES = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def iter_jsonl(path: str | PathLike[str], *, lone_surrogates: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield ``(line number, object)`` of each line; lines of white space are skipped, numbers count every line from 1.

    A byte-order mark of UTF-8 is taken off. Raises UserError for a file that cannot be read, is empty or is not UTF-8,
    and for a line that is not one JSON object, is longer than `MAX_LINE_BYTES`, or holds NUL bytes, NaN, infinities,
    duplicated keys or lone surrogates (unless these are allowed). A last line that was cut off (no newline, not JSON)
    is reported as torn.
    """
    path = Path(path)
    number = 0
    try:
        with path.open("rb") as file:
            while raw := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if number == 1:
                    raw = _without_byte_order_mark(path, raw)
                if not raw or raw.isspace():
                    continue
                yield number, _parse(raw, path, number, lone_surrogates)
    except OSError as error:
        reason = "is a folder, not a file" if path.is_dir() else f"cannot be read ({error.strerror or error})"
        raise UserError(f"{path}: {reason}") from None
    if number == 0:
        raise UserError(f"{path}: the file is empty")


def read_jsonl(
    path: str | PathLike[str],
    *,
    required: Mapping[str, Kind] | None = None,
    optional: Mapping[str, Kind] | None = None,
    unique: tuple[str, ...] = (),
    lone_surrogates: bool = False,
) -> list[dict[str, Any]]:
    """All objects of a JSON Lines file, checked row by row.

    Args:
        path: the file.
        required: fields that every row must have, with their types. ``True`` is not an integer.
        optional: fields whose type is checked where they are present and not null.
        unique: fields whose values together may occur once in the file.
        lone_surrogates: accept strings with half of a surrogate pair (what a broken tokenizer may have produced).

    Raises:
        UserError: what `iter_jsonl` raises; a file without rows; a field that is missing or of another type; a row
            that repeats the `unique` fields of an earlier one (both lines are named).
    """
    return read_records(
        path, None, required=required, optional=optional, unique=unique, lone_surrogates=lone_surrogates
    )[1]


def read_records(
    path: str | PathLike[str],
    record: str | None,
    *,
    required: Mapping[str, Kind] | None = None,
    optional: Mapping[str, Kind] | None = None,
    unique: tuple[str, ...] = (),
    lone_surrogates: bool = False,
    keep: Collection[str] | None = None,
) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """`read_jsonl` for a file whose first row may be a header ``{"record": record, ...}``: ``(header or None, rows)``.

    A header of another kind of record is a UserError. With `record` None no header is looked for. `keep` names the
    fields to keep of each row, where texts and token ids would fill the memory; None keeps all.
    """
    header = None
    rows: list[dict[str, Any]] = []
    check = _RowCheck(Path(path), required or {}, optional or {}, unique)
    for number, row in iter_jsonl(path, lone_surrogates=lone_surrogates):
        if record is not None and not rows and header is None and "record" in row:
            if row["record"] != record:
                raise UserError(f"{path}:{number}: a file of {row['record']!r} records, where {record!r} are needed")
            header = row
            continue
        check(number, row)
        rows.append(row if keep is None else {name: row[name] for name in keep if name in row})
    if not rows:
        raise UserError(f"{path}: the file has no rows")
    return header, rows


class _RowCheck:
    """Kinds and uniqueness of rows; called once a row, in file order."""

    def __init__(
        self, path: Path, required: Mapping[str, Kind], optional: Mapping[str, Kind], unique: tuple[str, ...]
    ) -> None:
        self.path = path
        self.fields = [(name, *_kind(kind), True) for name, kind in required.items()]
        self.fields += [(name, *_kind(kind), False) for name, kind in optional.items()]
        self.unique = unique
        self.seen: dict[tuple[Any, ...], int] = {}

    def __call__(self, number: int, row: dict[str, Any]) -> None:
        for name, types, values, required in self.fields:
            value = row.get(name)
            if type(value) in types and (values is None or value in values):
                continue
            if value is None and not required:
                continue
            if name not in row:
                raise UserError(f"{self.path}:{number}: the field {name!r} is missing")
            raise UserError(f"{self.path}:{number}: {name!r} must be {_wanted(types, values)}, not {_short(value)}")
        if self.unique:
            key = tuple([row[name] for name in self.unique])
            first = self.seen.setdefault(key, number)
            if first != number:
                what = ", ".join(f"{name} {value!r}" for name, value in zip(self.unique, key))
                raise UserError(f"{self.path}:{number}: {what} is already in line {first}")


def _kind(kind: Kind) -> tuple[frozenset[type], frozenset | None]:
    """The exact types that JSON parsing may give (so that True is no int, and 1 is a float), and the values allowed."""
    if isinstance(kind, frozenset):
        types = frozenset(type(value) for value in kind)
        return types | ({bool} if int in types else set()), kind
    types = frozenset(kind if isinstance(kind, tuple) else (kind,))
    return types | ({int} if float in types else set()), None


def _wanted(types: frozenset[type], values: frozenset | None) -> str:
    if values is not None:
        return " or ".join(sorted(json.dumps(value) for value in values))
    names = [text for kind, text in _NAMES.items() if kind in types]
    return " or ".join(x for x in names if x != "an integer" or "a number" not in names)


def _without_byte_order_mark(path: Path, raw: bytes) -> bytes:
    if raw.startswith(_UTF16):
        raise UserError(f"{path}:1: starts with a UTF-16 byte-order mark; save the file as UTF-8")
    return raw.removeprefix(_BYTE_ORDER_MARK)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON; write null")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_object)


def _parse(raw: bytes, path: Path, number: int, lone_surrogates: bool) -> dict[str, Any]:
    where = f"{path}:{number}"
    if len(raw) > MAX_LINE_BYTES:
        raise UserError(f"{where}: the line is longer than {MAX_LINE_BYTES // 2**20} MB; is this JSON Lines?")
    if b"\0" in raw:
        raise UserError(f"{where}: holds NUL bytes (a damaged or binary file)")
    try:
        row = _DECODER.decode(raw.decode("utf-8"))
    except RecursionError:
        raise UserError(f"{where}: is nested too deeply") from None
    except ValueError as error:
        if number > 1 and not raw.endswith(b"\n") and isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)):
            raise UserError(f"{where}: the last line is torn (its writer was interrupted); delete it") from None
        if isinstance(error, UnicodeDecodeError):
            raise UserError(f"{where}: is not UTF-8 at byte {error.start} of the line") from None
        raise UserError(f"{where}: not JSON: {error}") from None
    if type(row) is not dict:
        raise UserError(f"{where}: each line must be one JSON object, not {_short(row)}")
    if not lone_surrogates and _SURROGATE_ESCAPE.search(raw) and lone_surrogate(row):
        raise UserError(f"{where}: holds half of a surrogate pair (\\ud800-\\udfff), which is no character")
    return row


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
