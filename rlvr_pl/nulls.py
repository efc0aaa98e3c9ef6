"""Settings that are null and cannot be: the parser lets most of them pass, and a run would stumble over them later."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from rlvr_pl.mistakes import named_class
from rlvr_pl.module import RLVRModule
from rlvr_pl.policy import load_policy
from rlvr_pl.precision import BF16Precision
from rlvr_pl.slots import DEFAULTS, SLOTS, STANDING

NEEDED = (*SLOTS, "optimizer")
GROUPS: dict[str, Callable[..., Any]] = {
    "policy": load_policy,
    "model": RLVRModule,
    "precision": BF16Precision,
    **STANDING,
}


def empty_part(given: Mapping[str, Any]) -> str | None:
    """The first part of a config file that has a name and nothing below it where the parser needs something: a group,
    the data, or all that the file says."""
    nothing = [str(name) for name, value in given.items() if value is None]
    parts = [name for name in nothing if name in (*GROUPS, "data", "trainer") or len(nothing) == len(given)]
    return parts[0] if parts else None


def null_setting(config: Any) -> tuple[str, str] | None:
    """The first setting that is null and needs a value: its dotted name, and what is wrong in words. None when there is
    none."""
    for slot in NEEDED:
        if config.get(slot) is None:
            name = DEFAULTS[slot]["class_path"].rpartition(".")[2]
            return slot, f"--{slot} null: a run needs one; name a class, or leave it out for {name}"
    found = [*_in_groups(config), *_in_classes(config)]
    return found[0] if found else None


def _in_groups(config: Any) -> Iterator[tuple[str, str]]:
    for group, owner in GROUPS.items():
        yield from _nulls(group, owner, config.get(group) or {})


def _in_classes(config: Any) -> Iterator[tuple[str, str]]:
    for slot in (*NEEDED, "lr_scheduler"):
        spec = config.get(slot)
        if spec is not None and "class_path" in spec:
            yield from _nulls(slot, named_class(spec["class_path"]), spec.get("init_args") or {})


def _nulls(group: str, owner: Callable[..., Any], settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in [name for name, value in vars(settings).items() if value is None] if settings else ():
        if not may_be_null(owner, name):
            key = f"{group}.{name}"
            yield key, f"--{key} null: it needs a value; give one, or leave it out for the default"


def may_be_null(owner: Callable[..., Any], name: str) -> bool:
    """Whether an argument of a class or function takes None. True where its signature does not tell."""
    bases = owner.__mro__ if inspect.isclass(owner) else (owner,)
    for base in bases:
        function = vars(base).get("__init__") if inspect.isclass(base) else base
        if function is None or not callable(function):
            continue
        parameter = inspect.signature(function).parameters.get(name)
        if parameter is None:  # handed on by **kwargs, it may be
            continue
        if parameter.default is None:
            return True
        try:
            return _admits_none(get_type_hints(function).get(name, Any))
        except NameError:  # a type that is imported for type checkers alone
            return True
    return True


def _admits_none(hint: Any) -> bool:
    if get_origin(hint) in (Union, UnionType):
        return any(map(_admits_none, get_args(hint)))
    return hint in (Any, object, None, NoneType)
