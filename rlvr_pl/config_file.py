"""Strict reading of YAML settings: every fault is a `UserError` that names the file and the line."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from rlvr_pl.errors import UserError

MAX_BYTES = 4 * 2**20
"""A longer file is refused: settings are written by hand."""


def read_config(path: str | PathLike[str]) -> dict[str, Any]:
    """The mapping in a YAML file of plain data.

    Raises UserError for a file that cannot be read, is empty, too long, not UTF-8 or not YAML, holds control
    characters, tags or another value than a mapping, or says a key twice in one mapping.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    if len(raw) > MAX_BYTES:
        raise UserError(f"{path}: longer than {MAX_BYTES // 2**20} MB; is this a file of settings?")
    try:
        content = yaml.load(raw.decode("utf-8-sig"), _Loader)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: is not UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UserError(f"{path}:{mark.line + 1 if mark else 1}: not YAML: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        line = raw.count(b"\n", 0, error.position) + 1
        raise UserError(f"{path}:{line}: not YAML: a control character or broken text ({error.reason})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that is none
        raise UserError(f"{path}: not YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(content, dict):
        what = "nothing" if content is None else "no settings (a mapping of names to values)"
        raise UserError(f"{path}: holds {what}")
    return content


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Plain data only; a key said twice is a mistake, of which the parser would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            if key.value in seen:
                problem = f"{key.value!r} is already in line {seen[key.value]}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)
