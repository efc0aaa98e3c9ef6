"""The notebooks are clean, and run from top to bottom on a run that their script makes."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def code_cells(path: Path) -> list[str]:
    return ["".join(c["source"]) for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_kept_without_outputs(path):
    book = json.loads(path.read_text())
    assert book["nbformat"] == 4
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            compile("".join(cell["source"]), str(path), "exec")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the recorded run in it."""
    place = tmp_path_factory.mktemp("notebooks")
    record = runpy.run_path(str(FOLDER / "record_run.py"))["record"]
    assert record(str(place / "runs" / "recorded")) == 0
    return place


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_run(place, monkeypatch, path):
    monkeypatch.chdir(place)
    names: dict[str, object] = {}
    for cell in code_cells(path):
        exec(compile(cell, str(path), "exec"), names)
