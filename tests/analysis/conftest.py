"""Fixtures of the command tests: write records, run a command line, read its one JSON object."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlvr_pl.cli import main

HEADER = {"record": "items", "version": 1, "engine": "torch", "batch_size": 64}


@pytest.fixture
def write_items(tmp_path: Path) -> Callable[..., str]:
    """``write_items(name, correct, header=..., **columns)``: an item file; columns are lists, uids are q0, q1, ..."""

    def write(name: str, correct: Sequence[int], header: dict | None = HEADER, **columns: Sequence[Any]) -> str:
        rows = [
            {"uid": f"q{i}", "correct": int(c), **{key: values[i] for key, values in columns.items()}}
            for i, c in enumerate(correct)
        ]
        return write_rows(tmp_path / f"{name}.jsonl", ([header] if header else []) + rows)

    return write


@pytest.fixture
def write_samples(tmp_path: Path) -> Callable[..., str]:
    """``write_samples(name, {uid: outcomes})``: a sample file; an outcome is 0 or 1, or a dict of fields."""

    def write(name: str, outcomes: dict[str, Sequence[Any]]) -> str:
        rows = [
            {"uid": uid, "sample": i, **(x if isinstance(x, dict) else {"correct": x})}
            for uid, group in outcomes.items()
            for i, x in enumerate(group)
        ]
        return write_rows(tmp_path / f"{name}.jsonl", rows)

    return write


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Run a command line with --json: stdout must be one JSON object and nothing else."""

    def call(*words: Any) -> dict[str, Any]:
        status = main([*map(str, words), "--json"])
        out, err = capsys.readouterr()
        assert status == 0, err
        assert out.count("\n") == 1
        return json.loads(out)

    return call


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command line that must exit with status 2, and return its one line on stderr."""

    def call(*words: Any) -> str:
        status = main([*map(str, words), "--json"])
        out, err = capsys.readouterr()
        assert (status, out) == (2, "")
        line = err.strip().splitlines()[-1]
        assert line.startswith("rlvr-pl")
        return line

    return call
