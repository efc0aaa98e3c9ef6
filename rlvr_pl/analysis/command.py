"""What a command is, and the one way in which commands print: a table for people, or one JSON object for scripts.

A command is a module with ``add_arguments(parser)`` and ``run(args) -> Result``. Bad input raises
`rlvr_pl.errors.UserError` before anything is written.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlvr_pl.errors import UserError
from rlvr_pl.records import atomic_write_text, check_place


@dataclass
class Table:
    """A titled table: header and rows of strings or numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass
class Result:
    """What a command found: `data` is the JSON object, `tables` and `notes` are what a person reads."""

    data: dict[str, Any]
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def add_output_arguments(parser: argparse.ArgumentParser, table: bool = True) -> None:
    """``--json`` for every command, and ``--out FILE`` (CSV or Markdown by its ending) for commands with tables."""
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, and nothing else")
    if table:
        parser.add_argument(
            "--out", dest="table_out", type=Path, metavar="FILE", help="also write the tables to FILE (.csv or .md)"
        )
        parser.add_argument("--overwrite", action="store_true", help="allow --out to replace an existing file")


def emit(result: Result, args: argparse.Namespace) -> None:
    """Print the result as asked for by `add_output_arguments`; the command line calls this after `run`."""
    out: Path | None = getattr(args, "table_out", None)
    if out is not None:
        _write(result, out)
    if args.json:
        print(json.dumps(jsonable(result.data), allow_nan=False))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as RichTable

    console = Console()
    for table in result.tables:
        rich = RichTable(title=table.title, title_justify="left")
        for name in table.columns:
            rich.add_column(name)
        for row in table.rows:
            rich.add_row(*(escape(_cell(x)) for x in row))
        console.print(rich)
    for note in result.notes:
        console.print(note, markup=False, highlight=False)


def check_out(args: argparse.Namespace) -> None:
    """Refuse an unusable ``--out`` of tables; the command line calls this before `run`."""
    out: Path | None = getattr(args, "table_out", None)
    if out is None:
        return
    if out.suffix not in (".csv", ".md"):
        raise UserError(f"--out {out}: the ending must be .csv or .md")
    check_file(out, getattr(args, "overwrite", False))


def check_file(out: Path, overwrite: bool) -> None:
    """Refuse a file of ``--out`` that exists already, or that cannot be made, before the work for it starts."""
    if out.exists() and not overwrite:
        raise UserError(f"--out {out}: the file exists; choose another name or pass --overwrite")
    check_place(out, "--out")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: the folder {out.parent} does not exist")


def jsonable(x: Any) -> Any:
    """`x` with NaN and infinities as null, so that every reader of JSON can read it."""
    if isinstance(x, float):
        return x if math.isfinite(x) else None
    if isinstance(x, dict):
        return {str(k): jsonable(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [jsonable(v) for v in x]
    return x


def progress_console() -> Any:
    """A Rich console on stderr, for progress and warnings (stdout belongs to the result)."""
    from rich.console import Console

    return Console(file=sys.stderr)


def progress_bar(*columns: Any) -> Any:
    """A Rich progress bar on stderr that is gone when it is done; none where no terminal shows it (an empty line would
    be left, before an error message for one)."""
    from rich.progress import Progress

    console = progress_console()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A `progress_bar` with count and ETA; the function is told how many are done."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    with progress_bar(TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def _cell(x: Any) -> str:
    if isinstance(x, float):
        return f"{x:.3f}" if abs(x) < 10 else f"{x:.1f}"
    return "" if x is None else str(x)


def _write(result: Result, out: Path) -> None:
    text = io.StringIO()
    if out.suffix == ".csv":
        writer = csv.writer(text, lineterminator="\n")
        for table in result.tables:
            writer.writerow(table.columns)
            writer.writerows(table.rows)
    else:
        for table in result.tables:
            text.write(f"### {table.title}\n\n")
            text.write("| " + " | ".join(table.columns) + " |\n|" + "---|" * len(table.columns) + "\n")
            for row in table.rows:
                text.write("| " + " | ".join(_cell(x) for x in row) + " |\n")
            text.write("\n")
        text.write("\n".join(result.notes) + "\n")
    atomic_write_text(out, text.getvalue())
