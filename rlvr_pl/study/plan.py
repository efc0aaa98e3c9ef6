"""The study file: what is compared, on which questions, over which seeds, and what is expected of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr_pl.config_file import place, read_config
from rlvr_pl.core.collapse import CollapseCriterion
from rlvr_pl.errors import UserError
from rlvr_pl.study.expect import Expectation, read_expectation

START = "start"
KEYS = ("about", "base", "start", "order", "panel", "config", "arms", "seeds", "criterion", "budget", "expectations")
REQUIRED = ("start", "arms", "seeds")
# What the study itself decides; `config` and the arms may not.
OWNED = {"seed": "seeds", "policy.name": "start", "start": "start", "run": "the study", "data.init_args": "order"}


@dataclass(frozen=True)
class Arm:
    """One arm: `overrides` of the study's settings for `rlvr-pl fit`, or `commands` that end in its run folder.

    Commands are lines of ``rlvr-pl`` without that word, in which {start}, {seed} and {run} stand for the start
    checkpoint, the seed and the run folder.
    """

    name: str
    overrides: Mapping[str, Any]
    commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """The collapse rule before the start is measured: `fraction` of the start's correct answers becomes the floor."""

    window: int = 20
    truncation: float = 0.5
    mode: str = "tumbling"
    fraction: float = 0.75

    def criterion(self, start_correct: int) -> CollapseCriterion:
        """The one rule of all arms."""
        rest = {"window": self.window, "truncation": self.truncation, "mode": self.mode}
        return CollapseCriterion.from_start(start_correct, self.fraction, **rest)


@dataclass(frozen=True)
class Budget:
    """`rollouts`: the most that a run may plan. `minutes`: wall time of one call of `rlvr-pl study`, after which runs
    are stopped cleanly and nothing new begins. None: no limit."""

    rollouts: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        for name in ("rollouts", "minutes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, (int, float)) or value <= 0):
                raise ValueError(f"{name} is {value!r}: must be above 0, or null")


@dataclass(frozen=True)
class Study:
    """A study file, checked. `config` holds the settings of `rlvr-pl fit` that all arms share."""

    path: Path
    text: str
    about: str
    start: str
    config: Mapping[str, Any]
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    rule: Rule
    budget: Budget
    expectations: tuple[Expectation, ...]

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.stem

    def settings(self, arm: Arm) -> dict[str, Any]:
        """The arm's settings of `rlvr-pl fit`, without a seed."""
        return merge(self.config, arm.overrides)


def find_study(name: str) -> Path:
    """The study file of that path, or the shipped study of that name."""
    from rlvr_pl.configs import FOLDER

    path = Path(name)
    if path.is_file() or path.is_symlink():
        return path
    shipped = FOLDER / "studies" / f"{name.removesuffix('.yaml')}.yaml"
    if shipped.is_file() and Path(name).name == name:
        return shipped
    known = ", ".join(sorted(p.stem for p in (FOLDER / "studies").glob("*.yaml")))
    raise UserError(f"{name}: no such study file; shipped studies are {known}")


def read_study(path: Path) -> Study:
    """Read and check a study file. Raises UserError that names the file and the key."""
    content = read_config(path)
    _check_keys(path, content, KEYS, REQUIRED)
    start = _typed(path, content, "start", str)
    config = _shared_settings(path, content, start)
    arms = tuple(_arm(path, name, value) for name, value in _typed(path, content, "arms", dict).items())
    if not arms:
        raise UserError(f"{path}: arms: needs at least one arm")
    names = [arm.name for arm in arms]
    try:
        rule = Rule(**content.get("criterion") or {})
        rule.criterion(1)
        budget = Budget(**content.get("budget") or {})
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: criterion or budget: {error}") from None
    expectations = _typed(path, content, "expectations", list, [])
    return Study(
        path=path,
        text=path.read_text(encoding="utf-8-sig"),
        about=" ".join(str(content.get("about") or "").split()),
        start=start,
        config=config,
        arms=arms,
        seeds=_seeds(path, content["seeds"]),
        rule=rule,
        budget=budget,
        expectations=tuple(
            read_expectation(row, names, f"{path}: expectation {i}") for i, row in enumerate(expectations, 1)
        ),
    )


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over` put in, mapping by mapping. Another class_path drops the old init_args."""
    if over.get("class_path", base.get("class_path")) != base.get("class_path"):
        base = {k: v for k, v in base.items() if k != "init_args"}
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return merged


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted name: ``{"a": {"b": 1}}`` gives ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return flat


def _shared_settings(path: Path, content: Mapping[str, Any], start: str) -> dict[str, Any]:
    """Settings of the base file, then those of the study, then start, order and panel."""
    from rlvr_pl.configs import here_or_shipped

    base: dict[str, Any] = {}
    if content.get("base") is not None:
        name = _typed(path, content, "base", str)
        base = read_config(here_or_shipped(path.parent / name, name))
        data = base.pop("data", {})
        base["data"] = data if "init_args" in data else {"init_args": data}
    own = _typed(path, content, "config", dict, {})
    _check_not_owned(path, "config", own)
    data = dict(_typed(path, content, "order", dict, {}))
    if "panel" in content:
        data["validation"] = content["panel"]
    settings = merge(merge(base, own), {"policy": {"name": start}})
    return merge(settings, {"data": {"init_args": data}}) if data else settings


def _arm(path: Path, name: Any, value: Any) -> Arm:
    where = f"arms.{name}"
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.+-]*", name) or name == START:
        raise UserError(f"{path}: arms: {name!r} is no name for an arm; use letters, digits and . _ + -, not {START!r}")
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{place(path, where.split('.', 1))}: {where}: needs a mapping of settings, or {{}} for none")
    overrides = dict(value or {})
    commands = overrides.pop("commands", None)
    if commands is not None:
        if overrides or not isinstance(commands, list) or not commands or not all(isinstance(c, str) for c in commands):
            raise UserError(f"{path}: {where}.commands: needs a list of command lines, and no settings beside it")
        if "{run}" not in commands[-1]:
            raise UserError(f"{path}: {where}.commands: the last command must make the run folder {{run}}")
    _check_not_owned(path, where, overrides)
    return Arm(name, overrides, tuple(commands or ()))


def _check_not_owned(path: Path, where: str, settings: Mapping[str, Any]) -> None:
    for name in flatten(settings):
        key = "data.init_args" if name.split(".")[0] == "data" else name
        if key in OWNED:
            keys = [*where.split(".", 1), *name.split(".")]
            raise UserError(f"{place(path, keys)}: {where}.{name}: is the same for all arms; say it under {OWNED[key]}")


def _seeds(path: Path, value: Any) -> tuple[int, ...]:
    good = isinstance(value, list) and value and all(type(s) is int and s >= 0 for s in value)
    if not good or len(set(value)) < len(value):
        raise UserError(f"{place(path, ['seeds'])}: seeds: needs a list of distinct whole numbers, not {value!r}")
    return tuple(value)


def _check_keys(path: Path, content: Mapping[str, Any], known: Sequence[str], required: Sequence[str]) -> None:
    for key in content:
        if key not in known:
            raise UserError(f"{place(path, [str(key)])}: {key}: no such key; a study has {', '.join(known)}")
    for key in required:
        if key not in content:
            raise UserError(f"{path}: {key} is missing")


def _typed(path: Path, content: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    value = content.get(key, default)
    if value is None and default is not None:
        return default
    if not isinstance(value, kind):
        names = {str: "a string", dict: "a mapping", list: "a list"}
        raise UserError(f"{place(path, [key])}: {key}: needs {names[kind]}, not {value!r}")
    return value
