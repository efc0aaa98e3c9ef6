"""Objectives: one family a file, each a small class over signed token weights."""

if __name__ != "rlvr_pl.objectives":
    raise ImportError(f"import this package as rlvr_pl.objectives, not as {__name__} (two copies of a class would differ)")

from rlvr_pl.objectives.base import Objective

__all__ = ["Objective"]
