from __future__ import annotations

import argparse
import inspect
import json

from rlvr_pl import objectives as catalogue
from rlvr_pl.analysis import objectives as command
from rlvr_pl.analysis.command import emit


def run(capsys, *arguments: str) -> str:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(arguments)
    emit(command.run(args), args)
    return capsys.readouterr().out


def test_json_lists_every_runnable_objective_once(capsys) -> None:
    rows = json.loads(run(capsys, "--json"))["objectives"]
    names = [row["name"] for row in rows]
    assert names == sorted(set(names), key=str.lower)
    for row in rows:
        cls = getattr(catalogue, row["name"])
        assert issubclass(cls, catalogue.Objective)
        assert not inspect.isabstract(cls)
        assert row["equation"] == cls.equation != ""
        assert row["module"] == cls.__module__
    assert {"GRPO", "DAPO", "ForkCredit", "ExpertIterationSFT"} <= set(names)
    assert "PolicyGradient" not in names


def test_table_shows_equations_unchanged(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = run(capsys)
    for cls in command.objective_classes():
        assert cls.__name__ in shown
        assert cls.equation in shown
