"""Write the JSON Schema of `fit` configurations, with which an editor completes, explains and checks them.

Without --out the schema goes to stdout. An editor with a YAML language server takes it from the first line of a config:
``# yaml-language-server: $schema=rlvr-pl.schema.json``, or from a top-level key ``$schema``, which `fit` passes over.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlvr_pl.analysis.command import Result, check_file
from rlvr_pl.records import atomic_write_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the schema goes."""
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the schema to FILE, indented")
    parser.add_argument("--overwrite", action="store_true", help="allow --out to replace an existing file")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout (without --out: always)")


def run(args: argparse.Namespace) -> Result:
    """JSON: the schema, or with --out ``{"schema": FILE, "properties": number of top-level settings}``."""
    if args.out is None:
        args.json = True
        return Result(schema())
    check_file(args.out, args.overwrite)
    found = schema()
    atomic_write_text(args.out, json.dumps(found, indent=1) + "\n")
    return Result(
        {"schema": str(args.out), "properties": len(found["properties"])},
        notes=[f"{args.out}: put `# yaml-language-server: $schema={args.out}` on the first line of a config."],
    )


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of the configurations that ``rlvr-pl fit --config`` takes."""
    from jsonargparse import set_parsing_settings

    from rlvr_pl.settings import fit_parser
    from rlvr_pl.slots import DEFAULTS

    # No config holds a torch module, but callbacks that take one would have the hundreds of them described.
    set_parsing_settings(subclasses_disabled=[_is_torch_module])
    try:
        found = json.loads(fit_parser().get_completion_script("jsonschema"))
    finally:
        set_parsing_settings(subclasses_enabled=[_is_torch_module.__name__])
    found["title"] = "rlvr-pl fit"
    del found["required"]  # slots that have defaults
    for name, default in DEFAULTS.items():
        if isinstance(default, dict):
            _flatten(found["properties"][name], found["$defs"], default["class_path"])
    for definition in found["$defs"].values():
        _open(definition)
    return found


def _is_torch_module(cls: type) -> bool:
    import torch

    return issubclass(cls, torch.nn.Module)


def _flatten(slot: dict[str, Any], definitions: dict[str, Any], default: str) -> None:
    """Let a slot take the settings of its default class without that class's name, as the parser does."""
    name = default.rpartition(".")[2]
    refs = [part["$ref"].rpartition("/")[2] for part in slot["anyOf"] if "$ref" in part]
    for spec in (spec for ref in refs for spec in _class_specs(definitions[ref])):
        if spec["properties"]["class_path"]["const"].rpartition(".")[2] == name:
            slot["anyOf"].append(spec["properties"]["init_args"])
            return


def _open(definition: dict[str, Any]) -> None:
    """Let a slot for classes take short names (``GRPO``), and classes of the user's own with whatever settings."""
    known: list[str] = []
    for spec in _class_specs(definition):
        path = spec["properties"]["class_path"]["const"]
        names = list(_names(path))
        spec["properties"]["class_path"] = {"enum": names}
        known += names
    if known:
        own = {"class_path": {"type": "string", "not": {"enum": known}}, "init_args": {"type": "object"}}
        definition["anyOf"].append({"type": "object", "properties": own, "required": ["class_path"]})


def _class_specs(definition: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for spec in definition.get("anyOf", ()):
        if "const" in spec.get("properties", {}).get("class_path", {}):
            yield spec


def _names(path: str) -> Iterator[str]:
    """The names under which the parser finds a class: alone, where it is defined, and from the packages above."""
    from importlib import import_module

    module, _, name = path.rpartition(".")
    yield name
    yield path
    cls = getattr(import_module(module), name)
    places = {cls.__module__, *(module.rpartition(".")[0] for module in (module, cls.__module__))} - {"", module}
    for place in sorted(places):
        if getattr(import_module(place), name, None) is cls:
            yield f"{place}.{name}"
