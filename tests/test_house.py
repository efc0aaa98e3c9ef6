"""The house rules that a machine can check: imports run one way, light rooms stay light, packages have one name."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rlvr_pl"

# A room may import rooms of its own floor and of the floors before it.
FLOORS = (
    ("types", "errors", "mistakes"),
    ("core", "ranks", "shards", "allocator"),
    ("objectives",),
    (
        "jsonl",
        "config_file",
        "text_file",
        "user_function",
        "records",
        "cost",
        "prompts",
        "adapters",
        "grading",
        "model_weights",
        "policy_folder",
        "policy",
        "sampling",
        "trunk",
    ),
    (
        "data",
        "precision",
        "schedulers",
        "sharded_strategy",
        "update",
        "rollouts",
        "module",
        "evaluation",
        "expert_iteration",
    ),
    ("configs",),
    ("callbacks",),
    (
        "slots",
        "arguments",
        "nulls",
        "refusals",
        "quiet",
        "settings",
        "fit",
        "launch",
        "analysis",
        "study",
        "report",
        "cli",
    ),
)
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}


def rooms() -> list[tuple[str, Path]]:
    files = [(p.stem, p) for p in PACKAGE.glob("*.py") if p.stem != "__init__"]
    for folder in PACKAGE.iterdir():
        if folder.is_dir() and folder.name != "__pycache__":
            files += [(folder.name, p) for p in folder.resolve().rglob("*.py")]
    return files


def imported_rooms(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = [node.module] + [f"{node.module}.{a.name}" for a in node.names if node.module == "rlvr_pl"]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("rlvr_pl.")}
    return found - {"__version__"}


def test_every_room_has_a_floor():
    assert {room for room, _ in rooms()} <= set(FLOOR)


def test_imports_run_one_way():
    wrong = [
        f"{path.relative_to(ROOT)} imports rlvr_pl.{other}"
        for room, path in rooms()
        for other in imported_rooms(path)
        if FLOOR[other] > FLOOR[room]
    ]
    assert not wrong


def test_core_imports_torch_numpy_scipy_only():
    allowed = {"torch", "numpy", "scipy", "rlvr_pl", "__future__"} | set(sys.stdlib_module_names)
    for path in (PACKAGE / "core").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = []
            if isinstance(node, ast.Import):
                modules = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            for name in modules:
                assert name.split(".")[0] in allowed, f"{path}: imports {name}"


def test_light_rooms_import_no_torch():
    """One process for all, because starting Python is dear."""
    light = ["cli", "types", "jsonl", "records", "objectives", "callbacks", "configs", "grading", "sampling.base"]
    light += ["core.power", "core.paired", "core.passk", "core.collapse", "analysis.power", "analysis.compare"]
    code = "import importlib, sys\n"
    for name in light:
        code += f"importlib.import_module('rlvr_pl.{name}'); assert 'torch' not in sys.modules, '{name}'\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["objectives", "callbacks", "configs"])
def test_top_level_folders_have_one_name(name):
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"import this package as rlvr_pl.{name}" in done.stderr
