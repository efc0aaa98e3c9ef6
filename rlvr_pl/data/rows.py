"""Which rows of a file or data set become questions, and in what form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlvr_pl.errors import UserError
from rlvr_pl.mistakes import told
from rlvr_pl.user_function import load_function, place

Rows = Iterator[tuple[str, dict[str, Any]]]
"""Rows with the place they come from: "file:line" where there are lines, else "file: row N"."""


def chosen(rows: Rows, where: Mapping[str, Any] | None, prepare: str | None) -> Rows:
    """The rows that both conditions leave, as `prepare` made them.

    Args:
        where: column -> the value, or list of values, that a row must have there; 3 and "3" are the same.
        prepare: ``file.py:function`` or ``package.module:function``, called with each row (a dict): it returns the row,
            changed or not, or None to leave it out.

    Raises UserError when a row has no such column, or the function fails or returns something else.
    """
    if where:
        rows = _filtered(rows, {column: _texts(value) for column, value in where.items()})
    return _prepared(rows, prepare) if prepare else rows


def _texts(value: Any) -> set[str]:
    return {str(v) for v in value} if isinstance(value, (list, tuple, set)) else {str(value)}


def _filtered(rows: Rows, allowed: Mapping[str, set[str]]) -> Rows:
    for place_, row in rows:
        for column in allowed:
            if column not in row:
                there = ", ".join(map(repr, list(row)[:8])) or "none"
                raise UserError(f"{place_}: data.where names the column {column!r}; there are {there}")
        if all(str(row[column]) in values for column, values in allowed.items()):
            yield place_, row


def _prepared(rows: Rows, path: str) -> Rows:
    function = load_function(path, "data.prepare")
    for place_, row in rows:
        try:
            made = function(dict(row))
        except (Exception, SystemExit) as error:
            raise UserError(f"data.prepare {path}: {place_} raised {told(error)}{place(error, function)}") from error
        if made is None:
            continue
        if not isinstance(made, dict):
            kind = type(made).__name__
            raise UserError(f"data.prepare {path}: returned {kind} for {place_}; it must return the row, or None")
        yield place_, made
