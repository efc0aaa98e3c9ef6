r"""Answers as canonical LaTeX, and the verdicts that text and exact arithmetic give without a computer algebra system.

Everything is linear in the length of the answer (numbers are compared digit by digit, powers are never formed), so that
it may run in the trainer's process on whatever a model wrote.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal, InvalidOperation
from fractions import Fraction

_UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "±": r"\pm ",
        "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∞": r"\infty ", "π": r"\pi ", "∪": r"\cup ", "∩": r"\cap ",
        "∈": r"\in ", "∅": r"\emptyset ", "°": r"^\circ ", "ℝ": r"\mathbb{R}", "⁄": "/", "→": r"\to ",
        "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u3000": " ",
        "\u200b": None, "\u200c": None, "\u200d": None, "\u2060": None, "\ufeff": None, "\x00": None,
    }
)  # fmt: skip
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻"
_SUPERSCRIPT = re.compile(f"[{_SUPERSCRIPTS}]+")
_TO_NORMAL = str.maketrans(_SUPERSCRIPTS, "0123456789+-")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_UNICODE_ROOT = re.compile(r"√\s*(\d+|[A-Za-z]|(?=[({]))")

_DROPPED = re.compile(r"\\(?:left|right|displaystyle|textstyle|limits)(?![A-Za-z])\s*|\\[!,;:]|\\(?=\s)|\\?\$")
_SPACING = re.compile(r"\\q?quad(?![A-Za-z])|~|\s+")
_FRAC = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_DEGREES = re.compile(r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])")
_NESTED_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")

_DECIMAL = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,12})?")
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(?:[, ]\d{3})+(?:\.\d*)?")
_SCIENTIFIC = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{\s*([+-]?\d{1,12})\s*\}|(\d))")
_FRACTION = re.compile(r"([+-]?)\s*(\d*)\s*\\frac\s*\{\s*([+-]?\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_SLASHED = re.compile(r"([+-]?)\s*(?:(\d+)\s+)?(\d+)\s*/\s*(\d+)")
_MAX_DIGITS = 400  # beyond this, exact fractions are left to a worker


def normalize(answer: str) -> str:
    """The answer in canonical LaTeX: ASCII where possible, one space where any, no decoration, no outer brackets."""
    text = answer.translate(_UNICODE)
    if not text.isascii():
        text = _VULGAR.sub(_vulgar, text)
        text = _SUPERSCRIPT.sub(lambda m: "^{" + m.group().translate(_TO_NORMAL) + "}", text)
        text = _UNICODE_ROOT.sub(lambda m: r"\sqrt{" + m.group(1) + "}" if m.group(1) else r"\sqrt", text)
    text = _NESTED_BOX.sub("{", text)
    text = _DROPPED.sub("", text)
    text = _FRAC.sub(r"\\frac", text)
    text = _DEGREES.sub("", text)
    text = text.replace("{,}", ",")
    text = _SPACING.sub(" ", text).strip()
    return _unwrap(text.removesuffix("."))


def decide(answer: str, gold: str) -> bool | None:
    """Whether the answer equals the gold, or None when that takes algebra. An empty gold equals nothing."""
    a, b = normalize(answer), normalize(gold)
    if not a or not b:
        return False
    if a == b:
        return True
    x, y = number(a), number(b)
    if x is None or y is None:
        return _same_list(a, b)
    return same_number(x, y)


def number(text: str) -> Decimal | Fraction | None:
    """The exact value of a plain number (integer, decimal, scientific, fraction, mixed number) in canonical LaTeX."""
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "").replace(" ", "")
    if m := _SCIENTIFIC.fullmatch(text):
        text = f"{m[1]}e{m[2] or m[3]}"
    if _DECIMAL.fullmatch(text):
        try:
            return Decimal(text)
        except InvalidOperation:
            return None
    m = _FRACTION.fullmatch(text) or _SLASHED.fullmatch(text)
    if m is None or len(text) > _MAX_DIGITS or not int(m[4]):
        return None
    whole, sign = int(m[2] or 0), -1 if m[1] == "-" else 1
    return sign * (whole + Fraction(int(m[3]), int(m[4])))


def same_number(x: Decimal | Fraction, y: Decimal | Fraction) -> bool | None:
    """Exact equality, or a decimal of double precision beside the fraction that it rounds; None when too long."""
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x == y
    if isinstance(x, Decimal) and isinstance(y, Decimal):
        return x == y
    if isinstance(x, Decimal):
        x, y = y, x
    assert isinstance(x, Fraction) and isinstance(y, Decimal)
    _, digits, exponent = y.as_tuple()
    assert isinstance(exponent, int)
    if len(digits) > _MAX_DIGITS or abs(exponent) > _MAX_DIGITS:
        return False if abs(exponent) <= _MAX_DIGITS else None
    return rounds(y, x)


def rounds(decimal: Decimal, value: Fraction) -> bool:
    """Whether the decimal equals the value, or shows it to 10 to 17 significant digits, as a printed double does."""
    _, digits, exponent = decimal.as_tuple()
    assert isinstance(exponent, int)
    error = abs(Fraction(decimal) - value)
    return error == 0 or (10 <= len(digits) <= 17 and error < Fraction(10) ** exponent)


def split_top_level(text: str, separator: str = ",") -> list[str]:
    """The parts of a text between separators that stand outside every bracket."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif c == separator and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return parts


def _same_list(a: str, b: str) -> bool | None:
    """Two unordered lists of plain numbers: equal as sets; None when either holds anything else."""
    x, y = _numbers(a), _numbers(b)
    return None if x is None or y is None else x == y


def _numbers(text: str) -> set[Decimal | Fraction] | None:
    """The numbers of a comma-separated list, bare or in braces."""
    if text.startswith(r"\{") and text.endswith(r"\}"):
        text = text[2:-2]
    parts = split_top_level(text)
    values = [number(p) for p in parts] if len(parts) > 1 else []
    if not values or any(v is None or (isinstance(v, Decimal) and abs(v.adjusted()) > _MAX_DIGITS) for v in values):
        return None
    return {Fraction(v) for v in values if v is not None}


def _vulgar(match: re.Match[str]) -> str:
    numerator, denominator = unicodedata.normalize("NFKC", match.group()).split("⁄")
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def _unwrap(text: str) -> str:
    """The text without the braces or parentheses that enclose all of it; a tuple keeps its parentheses."""
    closes: dict[int, int] = {}
    stack: list[int] = []
    for i, c in enumerate(text):
        if c in "({":
            if i == 0 or text[i - 1] != "\\":
                stack.append(i)
        elif c in ")}" and (i == 0 or text[i - 1] != "\\") and stack:
            closes[stack.pop()] = i
    start, end = 0, len(text)
    while closes.get(start) == end - 1 and end - start > 2:
        start, end = start + 1, end - 1
    inner = text[start:end]
    if start and text[start - 1] == "(" and ("," in inner or ";" in inner):
        return text[start - 1 : end + 1]
    return inner.strip()
