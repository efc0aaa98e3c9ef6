"""What a report is made of, before it is HTML or Markdown."""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Cell = str | int | None


@dataclass(frozen=True)
class Grid:
    """A table: `name` ("Table 1") and what it shows, its columns, its rows, and the commands that make its numbers."""

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    commands: Sequence[str] = ()


@dataclass(frozen=True)
class Figure:
    """A picture as SVG text; `alt` says what is to be seen."""

    name: str
    caption: str
    alt: str
    svg: str
    commands: Sequence[str] = ()


@dataclass(frozen=True)
class Listing:
    """Text to be shown as it is: a config, commands, a rollout. `open`: shown without a click."""

    title: str
    text: str
    open: bool = False


@dataclass
class Section:
    """A titled part of a report."""

    title: str
    text: list[str] = field(default_factory=list)
    parts: list[Grid | Figure | Listing] = field(default_factory=list)

    def add(self, *parts: Grid | Figure | Listing | None) -> None:
        """Add the parts that there are."""
        self.parts += [part for part in parts if part is not None]


def command(*words: object) -> str:
    """A command line of this package as a reader can paste it."""
    return "rlvr-pl " + " ".join(shlex.quote(str(word)) for word in words)


def ask(*words: object) -> dict[str, Any]:
    """What `rlvr-pl WORDS --json` prints: a report's numbers are those of the command that it names."""
    name, *rest = (str(word) for word in words)
    room = importlib.import_module(f"rlvr_pl.analysis.{name.replace('-', '_')}")
    parser = argparse.ArgumentParser(prog=f"rlvr-pl {name}")
    room.add_arguments(parser)
    return room.run(parser.parse_args([*rest, "--json"])).data


# ---- numbers as the paper prints them ------------------------------------------------------------------------------


def signed(value: float, digits: int = 1) -> str:
    """``+2.0``, ``−0.3``, ``0.0``: with a real minus sign, and no sign on a rounded zero."""
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def change(delta: float, low: float, high: float) -> str:
    """``−0.3 [−4.6, +4.0]``, percentage points."""
    return f"{signed(delta)} [{signed(low)}, {signed(high)}]"


def amount(value: float) -> str:
    """``412``, ``28k``, ``2.86M``."""
    if value < 10_000:
        return f"{value:,.0f}"
    return f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.0f}k"


def number(value: float | None, digits: int = 3) -> str:
    """A figure, or a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}".replace("-", "−")


def span(values: Sequence[float | None], digits: int = 2) -> str:
    """``0.05–0.49``: smallest to largest of what is known."""
    known = [v for v in values if v is not None]
    if not known:
        return "–"
    low, high = f"{min(known):.{digits}f}", f"{max(known):.{digits}f}"
    return low if low == high else f"{low}–{high}"


def series(values: Sequence[float | int | None], digits: int = 0) -> str:
    """``153 / 161 / 144``."""
    return " / ".join("–" if v is None else f"{v:.{digits}f}" for v in values)
