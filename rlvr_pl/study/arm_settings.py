"""What an arm trains under, written down, so that a run is never reported under settings that it did not have."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvr_pl.config_file import read_config
from rlvr_pl.records import canonical_json
from rlvr_pl.study.plan import Arm, flatten

ABSENT = "unset"
SHOWN = 3
"""Changed settings that a message names."""


def record(arm: Arm, settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """``{commands, settings, sha256}`` of an arm; `settings` are its full ones (null for an arm of commands)."""
    made_of = {"commands": list(arm.commands), "settings": None if settings is None else _plain(settings)}
    return {**made_of, "sha256": _sha256(made_of)}


def intact(recorded: Mapping[str, Any]) -> bool:
    """Whether a record has the hash that was written with it."""
    return recorded["sha256"] == _sha256({key: recorded[key] for key in ("commands", "settings")})


def of_run(folder: Path) -> dict[str, Any] | None:
    """The settings that a run of `fit` wrote down itself, without those that a study gives to each run: its seed, and
    the rule as the last callback. None where it wrote none."""
    path = folder / "config.yaml"
    if not path.exists():
        return None
    settings = _plain(read_config(path))
    trainer = settings.get("trainer") or {}
    return {**settings, "trainer": {**trainer, "callbacks": (trainer.get("callbacks") or [])[:-1]}}


def changed(
    old: Mapping[str, Any], new: Mapping[str, Any], said: Mapping[str, Any] | None = None
) -> list[tuple[str, str, str]]:
    """[(setting, old value, new value)] of settings that differ; of a part with another class only its class.

    These are two accounts of one arm, any difference of which is a reason to refuse. `resolve.differences` is of two
    arms and for readers: it leaves out what must match anyway, and of another class tells what the arm says of it.

    A setting that the old ones do not have at all is one that an earlier version did not know: its default changes
    nothing, so that it counts only where `said`, the arm in its own words, names it.
    """
    one, two = _flat(old), _flat(new)
    known = flatten(_counted(old)).keys() | one.keys()
    named = tuple(f"{_short(key)}." for key in flatten(_counted(said or {})))
    keys = [
        key
        for key in sorted(one.keys() | two.keys())
        if one.get(key, ABSENT) != two.get(key, ABSENT) and (key in known or f"{_short(key)}.".startswith(named))
    ]
    parts = tuple(f"{key.removesuffix('class_path')}init_args." for key in keys if key.endswith("class_path"))
    return [
        (_short(key).removesuffix(".class_path"), _said(one, key), _said(two, key))
        for key in keys
        if not key.startswith(parts)
    ]


def changed_commands(old: Sequence[str], new: Sequence[str]) -> list[tuple[str, str, str]]:
    """The same of an arm's commands, counted from 1."""
    one, two = ({f"commands.{i}": line for i, line in enumerate(lines, 1)} for lines in (old, new))
    return changed(one, two, two)


def words(found: Sequence[tuple[str, str, str]]) -> str:
    """Changes in a line."""
    more = f" (and {len(found) - SHOWN} more)" if len(found) > SHOWN else ""
    return "; ".join(f"{key} was {old} and is now {new}" for key, old, new in found[:SHOWN]) + more


def begun_runs(study: Path) -> list[tuple[str, int]]:
    """(arm, seed) of every run that has begun in a study's folder."""
    folders = sorted(path.parent for path in study.glob("*/seed-*/run.json"))
    return [(f.parent.name, int(f.name.removeprefix("seed-"))) for f in folders if re.fullmatch(r"seed-\d+", f.name)]


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves that say something, by dotted name, entries of a list of parts counted from 1. Without the seed, which
    every run has of its own; our own classes by their name alone, which may be written with more than one path."""
    flat = {key: value for key, value in flatten(_counted(settings)).items() if value not in (None, [], {})}
    ours = {key for key, value in flat.items() if key.endswith("class_path") and str(value).startswith("rlvr_pl.")}
    return {key: value.rpartition(".")[2] if key in ours else value for key, value in flat.items() if key != "seed"}


def _short(key: str) -> str:
    return key.replace(".init_args", "")


def _counted(tree: Any) -> Any:
    if isinstance(tree, list) and any(isinstance(entry, Mapping) for entry in tree):
        tree = {str(i): entry for i, entry in enumerate(tree, 1)}
    return {key: _counted(value) for key, value in tree.items()} if isinstance(tree, Mapping) else tree


def _said(flat: Mapping[str, Any], key: str) -> str:
    return repr(flat[key]) if key in flat else ABSENT


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as JSON holds them; infinities by name."""
    return json.loads(json.dumps(settings, default=str), parse_constant=str)


def _sha256(made_of: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(made_of).encode()).hexdigest()
