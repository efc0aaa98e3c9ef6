"""What `rlvr_pl` exports: every name is there, typed, and shows itself in an example that runs."""

from __future__ import annotations

import ast
import doctest
import inspect
from pathlib import Path

import pytest

import rlvr_pl


@pytest.mark.parametrize("name", rlvr_pl.__all__)
def test_every_public_name_has_an_example_that_runs(name):
    thing = getattr(rlvr_pl, name)
    room = inspect.getmodule(thing)
    globs = {**vars(room)}
    examples = doctest.DocTestFinder(recurse=False).find(inspect.unwrap(thing), name, module=room, globs=globs)
    assert sum(len(e.examples) for e in examples) > 0, f"{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL)
    for example in examples:
        assert runner.run(example).failed == 0


def test_the_names_that_type_checkers_see_are_those_that_are_there():
    tree = ast.parse(Path(inspect.getfile(rlvr_pl)).read_text(encoding="utf-8"))
    typed = {
        alias.name: f"{node.module}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("rlvr_pl.")
        for alias in node.names
    }
    assert typed == {name: f"rlvr_pl.{room}" for name, room in rlvr_pl._ROOMS.items()}
    assert (Path(inspect.getfile(rlvr_pl)).parent / "py.typed").is_file()
