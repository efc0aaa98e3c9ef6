"""List every objective with its one-line equation."""

from __future__ import annotations

import argparse
import inspect

import rlvr_pl.objectives as catalogue
from rlvr_pl.analysis.command import Result, Table, add_output_arguments, check_out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Only the output arguments."""
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    """JSON: ``{"objectives": [{"name", "equation", "module"}]}``, by name."""
    check_out(args)
    rows = [{"name": cls.__name__, "equation": cls.equation, "module": cls.__module__} for cls in objective_classes()]
    table = Table("Objectives", ("name", "equation"), [(row["name"], row["equation"]) for row in rows])
    notes = [
        "N rollouts, T tokens; A advantage, l = log p of a sampled token, u probability ratio, sg stop-gradient.",
        "Settings of one: rlvr-pl fit --objective.help NAME. Your own: --objective my_file.MyObjective.",
    ]
    return Result({"objectives": rows}, [table], notes)


def objective_classes() -> list[type[catalogue.Objective]]:
    """Every objective of the package that can be run, by name without regard to case."""
    classes = [getattr(catalogue, name) for name in catalogue.__all__]
    runnable = [c for c in classes if issubclass(c, catalogue.Objective) and not inspect.isabstract(c)]
    return sorted(runnable, key=lambda c: c.__name__.lower())
