"""Report on a run or a study: one self-contained HTML file, and the same tables as Markdown beside it.

Tables have the form of the paper's 1, 2, 3, 4, 4b and power; of 5 where the folder holds entropy_grad*.json (files of
`rlvr-pl entropy-grad --out`). Every table names the command that makes its numbers again. The same records give the
same bytes.

JSON keys: html, markdown, tables (their names), figures (their names).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rlvr_pl.analysis.command import Result, add_output_arguments, check_file, progress_console
from rlvr_pl.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="RUN|STUDY", help="run folder or study folder")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="HTML file to write (default: report.html in the folder, replaced)"
    )
    parser.add_argument("--overwrite", action="store_true", help="allow --out to replace existing files")
    parser.epilog = "example: rlvr-pl report runs/studies/stabilization --out report.html"
    add_output_arguments(parser, table=False)


def run(args: argparse.Namespace) -> Result:
    out: Path = args.out or args.path / "report.html"
    if out.suffix not in (".html", ".htm"):
        raise UserError(f"--out {out}: the ending must be .html (the Markdown is written beside it)")
    if args.out is not None or args.path.is_dir():
        for file in (out, out.with_suffix(".md")):
            check_file(file, args.out is None or args.overwrite)
    from rlvr_pl.report.content import Figure, Grid
    from rlvr_pl.report.page import write_report

    with progress_console().status("reading records"):
        sections = write_report(args.path, out)
    parts = [part for section in sections for part in section.parts]
    data = {
        "html": str(out),
        "markdown": str(out.with_suffix(".md")),
        "tables": [part.name for part in parts if isinstance(part, Grid)],
        "figures": [part.name for part in parts if isinstance(part, Figure)],
    }
    return Result(data, notes=[f"wrote {data['html']}", f"wrote {data['markdown']}"])
