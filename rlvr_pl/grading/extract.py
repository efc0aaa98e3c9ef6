r"""Where the answer stands in a response: the last closed ``\boxed{}``, else the paper's evaluation fallback.

Every function here is linear in the length of the text, whatever the text is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_BOX = re.compile(r"(?<!\\)(?:\\\\)*\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_NUMBER = re.compile(r"-?(?:\d+/\d+|(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][+-]?\d+)?|\.\d+)")
_JOIN = re.compile(r"[\s$,;.]*(?:\\quad|\\text\s*\{|\\\)|\\\(|\band\b|\bor\b|[\s$,;}])*")


@dataclass(frozen=True, slots=True)
class Extraction:
    """What a response answers: `answer` (None: nothing to grade), whether it was boxed, and `readings`, the texts of
    which one must equal the gold (the last box, and the list that several joined boxes form)."""

    answer: str | None
    boxed: bool
    readings: tuple[str, ...] = ()


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""(start, end, content) of every outermost closed ``\boxed{}`` or ``\fbox{}``, in order of appearance.

    Braces must balance; ``\{`` and ``\}`` are characters, not braces, and ``\\boxed`` is a line break and a word.
    """
    starts = {m.end() - 1: m.start() for m in _BOX.finditer(text)}
    if not starts:
        return []
    found: list[tuple[int, int, int]] = []
    open_braces: list[int] = []
    for m in _BRACE.finditer(text, min(starts)):
        if m.group() == "{":
            open_braces.append(m.start())
        elif m.group() == "}" and open_braces:
            brace = open_braces.pop()
            if brace in starts:
                while found and found[-1][0] >= starts[brace]:  # boxes inside this one
                    found.pop()
                found.append((starts[brace], m.end(), brace + 1))
    return [(start, end, text[content : end - 1]) for start, end, content in found]


def last_boxed(text: str) -> str | None:
    """The content of the last closed box, or None."""
    found = boxes(text)
    return found[-1][2].strip() if found else None


def extract(response: str, *, require_box: bool) -> Extraction:
    """The answer of a response.

    A box always wins; an empty one is no answer. Without a box, training (`require_box`) has no answer; evaluation
    takes the last number (the whole formula, where that number stands in one), then the full text.
    """
    found = boxes(response)
    if found:
        content = found[-1][2].strip()
        if not content:
            return Extraction(None, True)
        run = _joined(response, found)
        return Extraction(content, True, (content,) if len(run) == 1 else (content, ",".join(run)))
    if require_box or not response.strip():
        return Extraction(None, False)
    answer = _last_number(response) or response.strip()
    return Extraction(answer, False, (answer,))


def _joined(text: str, found: list[tuple[int, int, str]]) -> list[str]:
    """The contents of the last run of boxes that only commas, "and", "or" and spacing separate."""
    run = [found[-1]]
    for box in reversed(found[:-1]):
        between = text[box[1] : run[-1][0]]
        if len(between) > 40 or not _JOIN.fullmatch(between):
            break
        run.append(box)
    return [content.strip() for _, _, content in reversed(run)]


def _last_number(text: str) -> str | None:
    """The last number, or the formula in which it stands."""
    last = max(_NUMBER.finditer(text), key=lambda m: m.start(), default=None)
    if last is None:
        return None
    formula = _formula_around(text.replace(r"\$", "  "), last.start(), last.end())
    return last.group() if formula is None else text[formula[0] : formula[1]].strip()


def _formula_around(text: str, start: int, end: int) -> tuple[int, int] | None:
    r"""Where the formula (``\[ \]``, ``\( \)``, ``$$ $$``, or ``$ $`` in one line) around a span begins and ends."""
    for opening, closing in ((r"\[", r"\]"), (r"\(", r"\)")):
        left, right = text.rfind(opening, 0, start), text.find(closing, end)
        if left >= 0 and right >= 0 and text.find(closing, left, start) < 0:
            return left + 2, right
    line_start = text.rfind("\n", 0, start) + 1
    line_end = text.find("\n", end)
    for dollar, low, high in (("$$", 0, len(text)), ("$", line_start, line_end if line_end >= 0 else len(text))):
        right = text.find(dollar, end, high)
        if right >= 0 and text.count(dollar, low, start) % 2:
            return text.rfind(dollar, low, start) + len(dollar), right
    return None
