"""Whether two answers mean the same; runs in the worker process only, since it imports sympy and may take forever."""

from __future__ import annotations

from math_verify import parse, verify


def equivalent(a: str, b: str) -> bool:
    """Whether the answers `a` and `b` are equal; the order of the arguments does not matter."""
    x, y = _parse(a), _parse(b)
    return verify(x, y, timeout_seconds=None) or verify(y, x, timeout_seconds=None)


def _parse(text: str) -> list:
    return parse(r"\boxed{" + text + "}", parsing_timeout=None)
