"""Strict reading of YAML settings: every fault is a `UserError` that names the file and the line."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from rlvr_pl.errors import UserError
from rlvr_pl.text_file import refuse_devices

MAX_BYTES = 4 * 2**20
"""A longer file is refused: settings are written by hand."""

MAX_VALUES = 100_000
"""Values that aliases may add to those that are written: a few lines of aliases of aliases can stand for more than a
machine holds."""


def read_config(path: str | PathLike[str]) -> dict[str, Any]:
    """The mapping in a YAML file of plain data.

    Raises UserError for a file that cannot be read, is empty, too long, not UTF-8 or not YAML, holds control
    characters, tags or another value than a mapping, says a key twice in one mapping, or has aliases that stand inside
    themselves or for more than `MAX_VALUES`.
    """
    path = Path(path)
    refuse_devices(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
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


def place(path: str | PathLike[str], keys: Sequence[str]) -> str:
    """``file:line`` of a setting in a file that `read_config` has read: of the deepest of its keys that is there, where
    a class's ``init_args`` may be left out. The file alone when even the first is not there."""
    node, line = yaml.compose(Path(path).read_text(encoding="utf-8-sig"), _Loader), None
    for key in keys:
        below = _value(node, key) or _value((_value(node, "init_args") or (None, None))[1], key)
        if below is None:
            break
        line, node = below[0].start_mark.line + 1, below[1]
    return str(path) if line is None else f"{path}:{line}"


def _value(node: yaml.Node | None, key: str) -> tuple[yaml.Node, yaml.Node] | None:
    """The nodes of a key and its value."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return next(((k, v) for k, v in pairs if k.value == key), None)


def _below(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _refuse_aliases(root: yaml.Node) -> None:
    """A mistake at the first value, from below, that holds itself or whose aliases stand for more than `MAX_VALUES`."""
    sizes: dict[int, int | None] = {}  # of every node with all below it, aliases written out; None while inside it

    def size(node: yaml.Node) -> int:
        known = sizes.get(id(node), 0)
        if known is None:
            raise yaml.constructor.ConstructorError(None, None, "an alias that stands inside itself", node.start_mark)
        if known:
            return known
        sizes[id(node)] = None
        total = 1 + sum(map(size, _below(node)))
        if total - len(sizes) > MAX_VALUES:  # a long file without aliases is as long as it is
            problem = f"aliases here stand for more than {MAX_VALUES:,} values"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        sizes[id(node)] = total
        return total

    size(root)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Plain data only; a key said twice is a mistake, of which the parser would silently take the last."""

    def get_single_data(self) -> Any:
        node = self.get_single_node()
        if node is None:
            return None
        _refuse_aliases(node)
        return self.construct_document(node)

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
