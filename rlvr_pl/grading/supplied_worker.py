"""The supplied recipe's own grading functions, called in a worker process with their parser disarmed.

`reasoning_from_scratch` parses answers with sympy's `parse_expr`, which is Python's `eval`: a model's text could run
code in it. Here the names that text may use are sympy's own expressions, builtins are gone, and text with strings,
attributes or dunders does not parse, as if sympy had found no expression in it.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import sympy
from reasoning_from_scratch import ch03
from sympy.parsing import sympy_parser

_UNSAFE = re.compile(r"__|['\"\\`;:@=\[\]{}]|\.\s*[A-Za-z_]|\b(?:lambda|import|exec|eval|yield|await)\b")
_FUNCTIONS = ("sqrt", "cbrt", "root", "real_root", "Rational", "Integer", "Float", "Symbol", "Function")


def handle(job: dict[str, Any]) -> tuple[str, bool, bool]:
    """(extracted answer, correct, boxed) of ``{"response", "gold", "require_box"}``, by the package's functions."""
    fallback: Any = None if job["require_box"] else "number_then_full"
    answer = ch03.extract_final_candidate(job["response"], fallback=fallback)
    boxed = bool(ch03.get_last_boxed(job["response"].strip()))
    return answer, bool(answer) and bool(ch03.grade_answer(answer, job["gold"])), boxed


def _names() -> dict[str, Any]:
    def is_expression(x: Any) -> bool:
        return isinstance(x, sympy.Basic) or (isinstance(x, type) and issubclass(x, sympy.Basic))

    public = {name: getattr(sympy, name) for name in sympy.__all__}
    names = {name: x for name, x in public.items() if is_expression(x) or name in _FUNCTIONS}
    return {**names, "max": sympy.Max, "min": sympy.Min, "abs": sympy.Abs, "__builtins__": {}}


_NAMES = _names()


def _parse_expr(text: str, **options: Any) -> Any:
    if _UNSAFE.search(text):
        raise SyntaxError("not an expression")
    return sympy_parser.parse_expr(text, global_dict=dict(_NAMES), **options)


ch03.spp = SimpleNamespace(
    parse_expr=_parse_expr,
    standard_transformations=sympy_parser.standard_transformations,
    implicit_multiplication_application=sympy_parser.implicit_multiplication_application,
)
