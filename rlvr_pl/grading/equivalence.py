"""Whether two answers mean the same; runs in a worker process only, since it imports sympy and may take forever.

math-verify parses; numbers and expressions are then compared here, by careful numerical evaluation: a difference
that is not zero at some point proves that two expressions differ, and one that vanishes to hundreds of digits at every
point, positive and negative, is zero. Nothing is expanded for that, so 3^200000000 costs no more than 3^2.
Relations, unions and words are left to math-verify, asked in both orders.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

import mpmath
import sympy
from latex2sympy2_extended import is_expr_of_only_symbols
from math_verify import LatexExtractionConfig, LatexNormalizationConfig, parse, verify
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

logging.getLogger("math_verify").setLevel(logging.CRITICAL)

_PARSING = LatexExtractionConfig(
    boxed_match_priority=0,
    normalization_config=LatexNormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last"
    ),
)
_DIGITS = 100  # a difference that still vanishes this many digits below the smallest number in it is zero
_MAX_DIGITS = 10_000  # beyond this spread of magnitudes, numbers are compared by structure alone
_POSITIVE = ((37, 29), (53, 47), (71, 67))  # points: the k-th symbol (by name) gets p/q + k/7
_NEGATIVE = ((-41, 31), (-59, 61))
_OPAQUE = (
    *(AppliedUndef, sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative, sympy.Piecewise),
    sympy.MatrixExpr,
)
_LONG_DECIMAL = re.compile(r"\d*\.\d+")
_KIND = {
    sympy.Eq: "=",
    sympy.Ne: "!=",
    sympy.StrictGreaterThan: ">",
    sympy.StrictLessThan: ">",
    sympy.GreaterThan: ">=",
    sympy.LessThan: ">=",
}


def handle(job: list[tuple[str, str]]) -> bool:
    """Whether any of the pairs is equal (the worker's entry point)."""
    return any(equivalent(a, b) for a, b in job)


def equivalent(a: str, b: str) -> bool:
    """Whether two answers in canonical LaTeX are equal; the order of the arguments does not matter."""
    x, y = map(_parse, sorted((a, b)))
    if x is None or y is None:
        return "".join(a.split()) == "".join(b.split())
    return _same(x, y, _tolerance(a, b))


def _parse(text: str) -> Any:
    found = parse(r"\boxed{" + text + "}", [_PARSING], "no_fallback", parsing_timeout=0)
    return found[0] if found else None


def _tolerance(*texts: str) -> Any:
    """Relative error allowed to decimals: one unit in the last place when they have 10 to 17 significant digits, as
    a printed double has; shorter and longer ones are exact."""
    digits = [len(m.group().replace(".", "").lstrip("0")) for t in texts for m in _LONG_DECIMAL.finditer(t)]
    double = [d for d in digits if 10 <= d <= 17]
    return sympy.Rational(1, 10 ** (max(double) - 1)) if double else sympy.Rational(0)


def _same(x: Any, y: Any, tolerance: Any) -> bool:
    x_label, x_value = _assignment(x)
    y_label, y_value = _assignment(y)
    if x_label is not None and y_label is not None:
        return _same(x_value, y_value, tolerance) if str(x_label) == str(y_label) else _verified(x, y)
    if x_label is not None and not _is_relation(y):
        x = x_value
    elif y_label is not None and not _is_relation(x):
        y = y_value
    return _same_value(x, y, tolerance)


def _same_value(x: Any, y: Any, tolerance: Any) -> bool:
    if _is_scalar(x) and _is_scalar(y):
        return _same_scalar(x, y, tolerance)
    if (_is_relation(x) and _is_scalar(y)) or (_is_scalar(x) and _is_relation(y)):
        return False
    if isinstance(x, Relational) and isinstance(y, Relational):
        return _same_relation(x, y) or (isinstance(x, sympy.Eq) and _verified(x, y))
    if isinstance(x, sympy.And) and isinstance(y, sympy.And):
        x_links, y_links = _links(x), _links(y)
        return len(x_links) == len(y_links) and (
            _all_same(x_links, y_links, tolerance) or _all_same(x_links, y_links[::-1], tolerance)
        )
    if isinstance(x, sympy.MatrixBase) and isinstance(y, sympy.MatrixBase):
        return x.shape == y.shape and _all_same(x.flat(), y.flat(), tolerance)
    if isinstance(x, sympy.FiniteSet) and isinstance(y, sympy.FiniteSet):
        return _same_set(x, y, tolerance)
    x_items, y_items = _ordered_items(x), _ordered_items(y)
    if x_items is not None and y_items is not None:
        return len(x_items) == len(y_items) and _all_same(x_items, y_items, tolerance)
    if isinstance(x, sympy.Interval) and isinstance(y, sympy.Interval):
        closed = (x.left_open, x.right_open) == (y.left_open, y.right_open)
        return closed and _all_same((x.start, x.end), (y.start, y.end), tolerance)
    return _verified(x, y)


def _verified(x: Any, y: Any) -> bool:
    return verify(x, y, timeout_seconds=0) or verify(y, x, timeout_seconds=0)


def _assignment(x: Any) -> tuple[Any, Any]:
    """(label, value) of "label = value" or of a chain "label = ... = value"; (None, None) of anything else."""
    chain = _links(x) if isinstance(x, sympy.And) else [x]
    if not all(isinstance(link, sympy.Eq) for link in chain):
        return None, None
    label = chain[0].lhs
    if isinstance(label, sympy.Add) or not is_expr_of_only_symbols(label):
        return None, None
    return label, chain[-1].rhs


def _links(x: Any) -> list[Any]:
    """The relations of a chain such as 1 < x < 2, as written."""
    return list(getattr(x, "_unsorted_args", x.args))


def _is_relation(x: Any) -> bool:
    return isinstance(x, (Relational, sympy.And, sympy.Or))


def _is_scalar(x: Any) -> bool:
    return isinstance(x, sympy.Expr) and not isinstance(x, sympy.MatrixExpr)


def _ordered_items(x: Any) -> tuple[Any, ...] | None:
    """The entries of a tuple; an open interval (a, b) is written like a pair."""
    if isinstance(x, sympy.Tuple):
        return x.args
    if isinstance(x, sympy.Interval) and x.left_open and x.right_open:
        return (x.start, x.end)
    return None


def _all_same(xs: Iterable[Any], ys: Iterable[Any], tolerance: Any) -> bool:
    return all(_same(x, y, tolerance) for x, y in zip(xs, ys))


def _same_set(x: sympy.FiniteSet, y: sympy.FiniteSet, tolerance: Any) -> bool:
    if len(x) != len(y):
        return False
    rest = [b for b in y.args if b not in x.args]
    for a in x.args:
        if a not in y.args:
            match = next((i for i, b in enumerate(rest) if _same(a, b, tolerance)), None)
            if match is None:
                return False
            del rest[match]
    return True


def _same_scalar(x: Any, y: Any, tolerance: Any) -> bool:
    if x == y:
        return x not in (sympy.nan, sympy.zoo)
    if x.has(*_OPAQUE) or y.has(*_OPAQUE):
        return _verified(x, y)
    difference = _minus(_exact(x), _exact(y))
    if not difference.free_symbols:
        if tolerance and (x.has(sympy.Float) or y.has(sympy.Float)) and _is_close(x, y, tolerance):
            return True
        return _is_zero(difference) or _is_zero(_real_roots(difference))
    if all(_is_zero(difference, _point(difference, at)) for at in _POSITIVE):
        return all(_is_zero(difference, _point(difference, at)) for at in _NEGATIVE) or _verified(x, y)
    words = isinstance(x, sympy.Symbol) or isinstance(y, sympy.Symbol)
    return words and _verified(x, y)


def _same_relation(x: Any, y: Any) -> bool:
    """Whether two equations are multiples of one another, or two inequalities positive multiples."""
    kinds = [(_KIND[type(r)], _minus(r.gts, r.lts) if hasattr(r, "gts") else _minus(r.lhs, r.rhs)) for r in (x, y)]
    (x_kind, p), (y_kind, q) = kinds
    if x_kind != y_kind or p.has(*_OPAQUE) or q.has(*_OPAQUE):
        return False
    p, q = _exact(p), _exact(q)
    first = _point(sympy.Tuple(p, q), _POSITIVE[0])
    with sympy.evaluate(False):
        p_first, q_first = p.xreplace(first), q.xreplace(first)
        proportional = _minus(p * q_first, q * p_first)
    if x_kind in (">", ">=") and not (p_first * q_first).evalf(5) > 0:
        return False
    return all(_is_zero(proportional, _point(proportional, at)) for at in (*_POSITIVE[1:], *_NEGATIVE))


def _minus(x: Any, y: Any) -> Any:
    return sympy.Add(x, sympy.Mul(-1, y, evaluate=False), evaluate=False)


def _exact(x: Any) -> Any:
    """`x` with its decimals as fractions and the letter i as the imaginary unit; nothing is evaluated."""
    exchange = {f: sympy.Rational(str(f)) for f in x.atoms(sympy.Float)}
    exchange |= {s: sympy.I for s in x.free_symbols if s.name == "i"}
    if not exchange:
        return x
    with sympy.evaluate(False):
        return x.xreplace(exchange)


def _point(x: Any, at: tuple[int, int]) -> dict[Any, Any]:
    names = sorted({s.name for s in x.free_symbols})
    values = {name: sympy.Rational(*at) + sympy.Rational(k, 7) for k, name in enumerate(names)}
    return {s: values[s.name] for s in x.free_symbols}


def _is_zero(x: Any, point: dict[Any, Any] | None = None) -> bool:
    """Whether `x` vanishes at the point: its value, computed with digits enough for all that may cancel, lies far below
    the smallest number in it.

    Numbers without end (3^200000000) are first given names, since they cancel by name or not at all.
    """
    point = point or {}
    sizes = [_magnitude(e, point) for e in sympy.preorder_traversal(x) if isinstance(e, sympy.Expr) and not _is_sum(e)]
    high, low = max(0, *sizes), min(0, *sizes)
    if max(high, -low) <= _MAX_DIGITS:
        value = abs(x.evalf(5, subs=point, maxn=_DIGITS + high - low))
        return _is_below(value, low - _DIGITS // 2)
    named = _name_the_huge(x, point)
    if named != x and all(_is_zero(named, _point(named, at) | point) for at in _POSITIVE):
        return True
    return _is_below(abs(x.evalf(5, subs=point)), -_DIGITS // 2) and sympy.simplify(x) == 0


def _is_sum(x: Any) -> bool:
    return x.is_Add or (x.is_Mul and any(a.is_Add for a in x.args))


def _is_below(value: Any, exponent: int) -> bool:
    return isinstance(value, sympy.Number) and value is not sympy.nan and bool(value < sympy.Float(10) ** exponent)


def _magnitude(x: Any, point: dict[Any, Any]) -> int:
    """Decimal exponent of a number, 0 for anything else."""
    value = abs(x.evalf(5, subs=point))
    if not isinstance(value, sympy.Float) or not value:
        return 0
    return int(mpmath.mag(value)) * 30103 // 100000  # log10(2), in integers: the exponent may be beyond any float


def _name_the_huge(x: Any, point: dict[Any, Any]) -> Any:
    """`x` with each subexpression whose size at the point is out of bounds replaced by a symbol of its own."""
    names: dict[Any, Any] = {}

    def is_huge(e: Any) -> bool:
        fixed = isinstance(e, sympy.Expr) and e.free_symbols <= point.keys() and not _is_sum(e)
        return fixed and abs(_magnitude(e, point)) > _MAX_DIGITS

    def name(e: Any) -> Any:
        return names.setdefault(e, sympy.Symbol(f"huge{len(names)}"))

    with sympy.evaluate(False):
        return x.replace(is_huge, name)


def _is_close(x: Any, y: Any, tolerance: Any) -> bool:
    """Whether two numbers differ by less than the relative tolerance."""
    return bool(abs(_minus(_exact(x), _exact(y)).evalf(5, maxn=_DIGITS)) < tolerance * abs(x.evalf(5)))


def _real_roots(x: Any) -> Any:
    """`x` with odd roots of negative numbers taken as real ones, as a radical sign means them."""

    def is_odd_root(e: Any) -> bool:
        exponent: Any = e.exp if isinstance(e, sympy.Pow) else None
        return isinstance(exponent, sympy.Rational) and exponent.q % 2 == 1 and e.base.evalf(5).is_negative is True

    with sympy.evaluate(False):
        return x.replace(is_odd_root, lambda e: (-1) ** e.exp.p * sympy.Pow(-e.base, e.exp))
