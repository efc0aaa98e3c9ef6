"""Strict reading of whole text and JSON files: every fault is a `UserError` that names the file and the line."""

from __future__ import annotations

import json
import os
import re
from os import PathLike
from pathlib import Path
from typing import Any

from rlvr_pl.errors import UserError

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def refuse_devices(path: Path) -> None:
    """UserError for a pipe, which would be waited for, and a device, which may have no end."""
    if os.path.exists(path) and not path.is_file():
        raise UserError(f"{path}: {'is a folder, not a file' if path.is_dir() else 'not a regular file'}")


def read_text(path: str | PathLike[str], *, byte_order_mark: bool = True) -> str:
    """The text of a UTF-8 file; a byte-order mark is taken off, or refused where other programs read the file too.

    Raises UserError when the file cannot be read, is empty, is not UTF-8 or holds NUL bytes.
    """
    path = Path(path)
    refuse_devices(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not raw or raw.isspace():
        raise UserError(f"{path}: the file is empty")
    if (nul := raw.find(b"\0")) >= 0:
        raise UserError(f"{path}:{_line(raw, nul)}: holds NUL bytes (a damaged, binary or UTF-16 file)")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}:{_line(raw, error.start)}: is not UTF-8 at byte {error.start}") from None
    if not text.startswith("\ufeff"):
        return text
    if not byte_order_mark:
        raise UserError(f"{path}:1: starts with a byte-order mark; save the file as plain UTF-8 without it")
    return text[1:]


def read_json(path: str | PathLike[str], *, byte_order_mark: bool = True) -> Any:
    """The content of a JSON file. Raises what `read_text` raises, and UserError for what is not strict JSON: NaN and
    infinities, nesting without end, a key with two values, half of a surrogate pair."""
    text = read_text(path, byte_order_mark=byte_order_mark)
    try:
        content = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if _SURROGATE_ESCAPE.search(text):
        _refuse_lone_surrogates(path, content, text)
    return content


def lone_surrogate(content: Any) -> str | None:
    """The first half of a surrogate pair in what JSON holds, as an escape; None when there is none."""
    try:
        json.dumps(content, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        return f"\\u{ord(error.object[error.start]):04x}"
    return None


def _refuse_lone_surrogates(path: str | PathLike[str], content: Any, text: str) -> None:
    half = lone_surrogate(content)
    if half is not None:
        line = text.count("\n", 0, max(0, text.lower().find(half))) + 1
        raise UserError(f"{path}:{line}: holds half of a surrogate pair ({half}), which is no character")


def _line(raw: bytes, place: int) -> int:
    return raw.count(b"\n", 0, place) + 1


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        for name, value in pairs:
            if content[name] != value:
                raise ValueError(f"the key {name!r} has two values")
    return content


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value; write null")
