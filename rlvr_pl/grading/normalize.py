r"""Answers as canonical LaTeX, and the verdicts that text and exact arithmetic give without a computer algebra system.

Everything is linear in the length of the answer (numbers are compared digit by digit, powers are never formed), so that
it may run in the trainer's process on whatever a model wrote.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from itertools import islice

_UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "±": r"\pm ",
        "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∞": r"\infty ", "π": r"\pi ", "∪": r"\cup ", "∩": r"\cap ",
        "∈": r"\in ", "∅": r"\emptyset ", "°": r"^\circ ", "ℝ": r"\mathbb{R}", "⁄": "/", "€": "$", "£": "$",
        "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u3000": " ",
        "\u200b": None, "\u200c": None, "\u200d": None, "\u2060": None, "\ufeff": None, "\x00": None,
    }
)  # fmt: skip
_RAISED, _LOWERED, _LEVEL = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-"
_TO_LEVEL = str.maketrans(_RAISED + _LOWERED, _LEVEL * 2)
_SUPERSCRIPT, _SUBSCRIPT = re.compile(f"[{_RAISED}]+"), re.compile(f"[{_LOWERED}]+")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_UNICODE_ROOT = re.compile(r"√\s*(\d+|[A-Za-z]|(?=[({]))")

_DROPPED = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|limits|boxed|fbox)(?![A-Za-z])\s*"
    r"|\\!\s*|\\[,;:]|(?<!\\)\\(?=\s)|\\?\$"
)
_SPACING = re.compile(r"\\q?quad(?![A-Za-z])|~|\s+")
_FRAC = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_FRAC_TOKENS = re.compile(r"\\frac(?![A-Za-z])\s*(\d|\\[A-Za-z]+)\s*(\d|[A-Za-z]|\\[A-Za-z]+)")
_DEGREES = re.compile(r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])")

_WRAPPER = r"\\(?:text|mbox|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|operatorname)"
_WRAPPED = re.compile(_WRAPPER + r"\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' .-]{3,}")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_PERCENT = re.compile(rf"\s*(?:\\?%|percent(?:age)?|pct|{_WRAPPER}\s*\{{\s*(?:\\?%|percent(?:age)?|pct)\s*\}})$")
_TEXT_UNIT = re.compile(rf"(?<=[\d)}}])\s*{_WRAPPER}\s*\{{([^{{}}]*)\}}\s*(?:\^\s*(?:\d|\{{\s*\d\s*\}}))?$")
_PLAIN_UNIT = re.compile(
    r"(?:\s+(?:square |cubic |sq\.? )?[A-Za-z]{3,}|\s*(?:cm|mm|km|kg|mg|ml|ft|in|mi|yd|oz|lbs?|hrs?|mph))"
    r"(?:\s*\^\s*(?:\d|\{\s*\d\s*\}))?$"
)
_NOT_UNITS = re.compile(
    r"\b(?:and|or|not|if|for|where|when|mod|is|even|odd|sin|cos|tan|log|exp|sqrt|inf|infinity"
    r"|alpha|beta|gamma|delta|theta|lambda|sigma|omega|phi)\b"
)
_LABEL = re.compile(r"^[A-Za-z](?:_(?:\w|\{\w+\}))?\s*=\s*")

_NOT_CHAIN = re.compile(rf"[,;<>!&]|\b(?:and|or)\b|{_WRAPPER}")
_DECIMAL = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,12})?")
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(?:[, ]\d{3})+(?:\.\d*)?")
_SCIENTIFIC = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{\s*([+-]?\d{1,12})\s*\}|(\d))")
_FRACTION = re.compile(r"([+-]?)\s*(\d*)\s*\\frac\s*\{\s*([+-]?\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_SLASHED = re.compile(r"([+-]?)\s*(?:(\d+)\s+)?(\d+)\s*/\s*(\d+)")
_REPEATING = re.compile(r"([+-]?)(\d*)\.(\d*)\s*\\overline\s*\{\s*(\d+)\s*\}")
_BASED = re.compile(r"(\d[0-9A-Z]*)\s*_\s*(?:(\d)|\{\s*(\d+)\s*\})")
_MAX_DIGITS = 400  # fractions are formed up to this size
_MAX_WORDS = 20
_MAX_ITEMS = 10_000  # longer lists are left to a worker, and its limit


def compare(answer: str, gold: str) -> bool | list[tuple[str, str]]:
    """Whether the answer equals the gold; when that takes algebra, the pairs of texts of which one must be equal.

    An empty gold equals nothing. Percent signs are optional (28%, 28 and 0.28 are one answer), units and currency are
    dropped, digits with a base subscript equal only the same digits in the same base.
    """
    a, b = normalize(answer), normalize(gold)
    if not a or not b:
        return False
    if _tight(a) == _tight(b):
        return True
    verdict = _as_words(a, b)
    if verdict is not None:
        return verdict
    (a, a_percent), (b, b_percent) = _bare(a), _bare(b)
    if _BASED.fullmatch(a) or _BASED.fullmatch(b):
        return _based(a) == _based(b)
    pairs = [(a, b)]
    if a_percent != b_percent:
        pairs.append((rf"\frac{{{a}}}{{100}}", b) if a_percent else (a, rf"\frac{{{b}}}{{100}}"))
    verdicts = [_as_numbers(x, y) for x, y in pairs]
    if True in verdicts:
        return True
    return [pair for pair, verdict in zip(pairs, verdicts) if verdict is None] or False


def normalize(answer: str) -> str:
    """The answer in canonical LaTeX: ASCII where possible, one space where any, no decoration, no outer brackets, and
    of a chain of equations (a = b = c) only the two ends."""
    text = answer.translate(_UNICODE)
    if not text.isascii():
        text = _VULGAR.sub(_vulgar, text)
        text = _SUPERSCRIPT.sub(lambda m: "^{" + m.group().translate(_TO_LEVEL) + "}", text)
        text = _SUBSCRIPT.sub(lambda m: "_{" + m.group().translate(_TO_LEVEL) + "}", text)
        text = _UNICODE_ROOT.sub(lambda m: r"\sqrt{" + m.group(1) + "}" if m.group(1) else r"\sqrt", text)
    text = _DROPPED.sub("", text)
    text = _FRAC.sub(r"\\frac", text)
    text = _FRAC_TOKENS.sub(r"\\frac{\1}{\2}", text)
    text = _DEGREES.sub("", text)
    text = text.replace("{,}", ",")
    text = _SPACING.sub(" ", text).strip()
    return _chain_ends(_unwrap(text.removesuffix(".")))


def number(text: str) -> Decimal | Fraction | None:
    """The exact value of a plain number in canonical LaTeX: integer, decimal (repeating or not), fraction, mixed."""
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "").replace(" ", "")
    if m := _SCIENTIFIC.fullmatch(text):
        text = f"{m[1]}e{m[2] or m[3]}"
    if _DECIMAL.fullmatch(text):
        try:
            return Decimal(text)
        except InvalidOperation:
            return None
    if len(text) > _MAX_DIGITS:
        return None
    if m := _REPEATING.fullmatch(text):
        period = Fraction(int(m[4]), (10 ** len(m[4]) - 1) * 10 ** len(m[3]))
        return (-1 if m[1] == "-" else 1) * (Fraction(f"0{m[2]}.{m[3]}0") + period)
    m = _FRACTION.fullmatch(text) or _SLASHED.fullmatch(text)
    if m is None or not int(m[4]):
        return None
    whole, sign = int(m[2] or 0), -1 if m[1] == "-" else 1
    return sign * (whole + Fraction(int(m[3]), int(m[4])))


def same_number(x: Decimal | Fraction, y: Decimal | Fraction) -> bool:
    """Exact equality; or a decimal of 10 to 17 significant digits, as a printed double has, beside the fraction that
    it rounds or cuts off."""
    if isinstance(x, Decimal) and isinstance(y, Fraction):
        x, y = y, x
    if not (isinstance(x, Fraction) and isinstance(y, Decimal)):
        return x == y
    _, digits, exponent = y.as_tuple()
    if not isinstance(exponent, int) or len(digits) > _MAX_DIGITS or abs(exponent) > 2 * _MAX_DIGITS:
        return False  # no fraction of at most _MAX_DIGITS digits reads like that
    error = abs(Fraction(y) - x)
    return error == 0 or (10 <= len(digits) <= 17 and error < Fraction(10) ** exponent)


def _tight(text: str) -> str:
    """The text without spaces; one between two digits, as in 3 1/2, stays."""
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


def _bare(text: str) -> tuple[str, bool]:
    """The text without percent sign, unit and, before a plain number, label; and whether there was a percent sign."""
    without = _PERCENT.sub("", text)
    if without and without != text:
        return without, True
    unit = _TEXT_UNIT.search(text)
    if unit and not _NOT_UNITS.search(unit[1]):
        text = text[: unit.start()]
    unit = _PLAIN_UNIT.search(text)
    if unit and not _NOT_UNITS.search(unit.group()) and number(text[: unit.start()]) is not None:
        text = text[: unit.start()]
    return text, False


def _as_words(a: str, b: str) -> bool | None:
    r"""The verdict on words (``\text{Even}``, No solution, ``\text{(C)}``): letters count, not their case or font."""
    x, y = _letters(a), _letters(b)
    if x == y and (_WRAPPED.search(a) or _WRAPPED.search(b) or _WORDS.fullmatch(a) or _WORDS.fullmatch(b)):
        return True
    wrapped = [m is not None and not any(c.isdigit() for c in m[1]) for m in map(_WRAPPED.fullmatch, (a, b))]
    if any(wrapped) or _is_prose(a) or _is_prose(b) or (_WORDS.fullmatch(a) and _WORDS.fullmatch(b)):
        return False
    return None


def _is_prose(text: str) -> bool:
    """Whether a text is made of words rather than symbols, so that no parser need try it."""
    return sum(1 for _ in islice(_WORD.finditer(text), _MAX_WORDS + 1)) > _MAX_WORDS


def _letters(text: str) -> str:
    return _unwrap("".join(_WRAPPED.sub(r"\1", text).split())).casefold()


def _based(text: str) -> tuple[str, str] | None:
    m = _BASED.fullmatch(text)
    return (m[1].lstrip("0"), m[2] or m[3]) if m else None


def _as_numbers(a: str, b: str) -> bool | None:
    """The verdict on equal texts, two plain numbers or two unordered lists of them; None on anything else."""
    if ("=" in a) != ("=" in b):
        a, b = _LABEL.sub("", a, count=1), _LABEL.sub("", b, count=1)
    if _tight(a) == _tight(b):
        return True
    x, y = number(a), number(b)
    if x is not None and y is not None:
        return same_number(x, y)
    xs, ys = _numbers(a), _numbers(b)
    return None if xs is None or ys is None else xs == ys


def _numbers(text: str) -> set[Fraction] | None:
    """The numbers of a comma-separated list, bare or in braces; None where one is anything else or a long decimal."""
    if text.startswith(r"\{") and text.endswith(r"\}"):
        text = text[2:-2]
    if text.count(",") > _MAX_ITEMS:
        return None
    values: set[Fraction] = set()
    for part in split_top_level(text):
        value = number(part)
        if value is None:
            return None
        if isinstance(value, Decimal):
            if len(value.as_tuple().digits) >= 10 and value != value.to_integral_value():
                return None
            if abs(value.adjusted()) > _MAX_DIGITS:
                return None
        values.add(Fraction(value))
    return values


def split_top_level(text: str, separator: str = ",") -> list[str]:
    """The parts of a text between the separators that stand outside every bracket."""
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


def _chain_ends(text: str) -> str:
    if text.count("=") < 2 or _NOT_CHAIN.search(text):
        return text
    parts = split_top_level(text, "=")
    return f"{parts[0]}={parts[-1]}" if len(parts) > 2 else text


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
