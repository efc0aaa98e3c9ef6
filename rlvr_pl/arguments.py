"""The words of a command line, rewritten into those the parser takes: short names, shipped files, replaced classes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlvr_pl.config_file import read_config
from rlvr_pl.configs import FOLDER, here_or_shipped
from rlvr_pl.errors import UserError
from rlvr_pl.grading.base import Grader
from rlvr_pl.mistakes import known_classes
from rlvr_pl.sampling.base import Sampler
from rlvr_pl.slots import DEFAULTS, SLOTS


def shipped_configs(argv: Sequence[str]) -> list[str]:
    """``--config quickstart.yaml`` means the shipped file wherever there is no file of that name here."""
    words = list(argv)
    for i, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in ("--config", "-c") and (equals or i + 1 < len(words)):
            value = value if equals else words[i + 1]
            found = here_or_shipped(Path(value), value)
            if found != Path(value):
                words[i if equals else i + 1] = f"{flag}={found}" if equals else str(found)
    return words


def config_files(argv: Sequence[str]) -> list[str]:
    """The files that follow ``--config`` and ``-c``. UserError for one that is not there."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    named = [value for flag, value in pairwise(words) if flag in ("--config", "-c")]
    absent = next((value for value in named if not os.path.lexists(value) and not value.startswith("--")), None)
    if absent is not None:
        shipped = ", ".join(path.name for path in sorted(FOLDER.glob("*.yaml")))
        raise UserError(f"{absent or '--config'}: no such file of settings; shipped ones are {shipped}")
    return [value for value in named if os.path.lexists(value)]


def full_names(argv: Sequence[str]) -> list[str]:
    """``--sampler VLLM`` means VLLMSampler and ``--grader Math`` MathGrader; the slot's name may be left out.
    ``--profiler`` is the trainer's."""
    words = [
        f"--trainer{word[1:].replace('-', '.', 1)}" if word.split("=")[0] == "--profiler" else word for word in argv
    ]
    for slot, base in (("sampler", Sampler), ("grader", Grader)):
        known = known_classes(base)
        for i, word in enumerate(words):
            flag, equals, value = word.partition("=")
            if flag != f"--{slot}" or (not equals and i + 1 == len(words)):
                continue
            name = value if equals else words[i + 1]
            full = next((k for k in known if k.lower() in (name.lower(), f"{name}{slot}".lower())), name)
            if equals:
                words[i] = f"{flag}={full}"
            else:
                words[i + 1] = full
    return words


def fresh_classes(words: Sequence[str]) -> list[str]:
    """Clear a slot before a flag or a config file names another class for it than stood there, the default included.

    The parser would carry over the old class's arguments wherever the new one has arguments of the same names, so that
    `ORLMask` over a config of `GRPO` would not mask.
    """
    out: list[str] = []
    current = {slot: _class_path(DEFAULTS[slot]).rpartition(".")[2] for slot in SLOTS}
    for i, word in enumerate(words):
        flag, equals, value = word.partition("=")
        value = value if equals or i + 1 == len(words) else words[i + 1]
        for slot, name in _classes(flag, value).items():
            if current.get(slot, name) != name:
                out.append(f"--{slot}=null")
            current[slot] = name
        out.append(word)
    return out


def left_out(given: Mapping[str, Any], config: Any) -> list[str]:
    """What a config file says of classes that the command line then replaced by others, one line each."""
    lines = []
    for slot, spec in given.items():
        final = config.get(slot)
        if not isinstance(spec, dict) or "class_path" not in spec or final is None or "class_path" not in final:
            continue
        old, new = (str(path).rsplit(".", 1)[-1] for path in (spec["class_path"], final["class_path"]))
        kept = final.get("init_args") or {}
        lost = [k for k, value in (spec.get("init_args") or {}).items() if k not in kept or kept[k] != value]
        if old != new and lost:
            lines.append(f"--{slot}: {new} takes the place of {old}; left out: {', '.join(lost)}")
    return lines


def _classes(flag: str, value: str) -> dict[str, str]:
    """The classes that one argument puts into slots, by their last names."""
    if flag.removeprefix("--") in SLOTS:
        named = {flag.removeprefix("--"): value}
    elif flag in ("--config", "-c") and os.path.lexists(value):
        given = read_config(value)
        named = {slot: _class_path(given[slot]) for slot in SLOTS if given.get(slot) is not None}
    else:
        named = {}
    return {slot: name.rsplit(".", 1)[-1] for slot, name in named.items() if name}


def _class_path(spec: Any) -> str:
    return str(spec.get("class_path", "")) if isinstance(spec, Mapping) else str(spec)
