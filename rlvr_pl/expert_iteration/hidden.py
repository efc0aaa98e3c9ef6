r"""Whether a piece of reasoning gives its answer away: by its text, or by a value that grades equal to the answer.

The text test is the paper's (the prefix must not contain the answer string) on normalised text; it errs on the side of
seeing the answer: a gold of 2 is seen in 12. The value test asks the grader about every box, formula, fraction and
number, so that neither 0.5 nor \frac{2}{4} passes where 1/2 is to be hidden.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from rlvr_pl.errors import UserError
from rlvr_pl.expert_iteration.filter import normalised
from rlvr_pl.grading.base import Grader, GradeRequest, ask
from rlvr_pl.grading.extract import boxes
from rlvr_pl.grading.normalize import normalize
from rlvr_pl.types import GradeStatus, Question

_MARKUP = re.compile(r"\\(?:left|right|displaystyle|textstyle)(?![A-Za-z])|\\[,;: ]|[$~]")
_NEEDLESS = re.compile(r"(?<![^\W_]) | (?![^\W_])")
_THIN_SPACE = re.compile(r"(?<=\d)(?:\\[,;: ]|\{\\,\})(?=\d{3})")
_FRACTION_NAMES = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_FRACTION = re.compile(r"-?\\[dtc]?frac\s*\{[^{}]*\}\s*\{[^{}]*\}")
_NUMBER = re.compile(r"-?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+)?(?:\s*\\?%)?")
_INTEGER = re.compile(r"\d+")
_LONGEST = 200  # characters of a formula worth asking about; no gold is longer


def holds_answer(texts: Sequence[str], questions: Sequence[Question], grader: Grader) -> list[bool]:
    """Whether each text contains the answer of its question. An undecided comparison counts as containing it."""
    held = [contains_text(text, q.answer) for text, q in zip(texts, questions)]
    asked = [
        (i, GradeRequest(rf"\boxed{{{value}}}", questions[i]))
        for i, text in enumerate(texts)
        if not held[i]
        for value in values(text)
    ]
    grades = ask(grader, [request for _, request in asked], require_box=True)
    for (i, _), grade in zip(asked, grades):
        held[i] |= grade.status not in (GradeStatus.WRONG, GradeStatus.NO_ANSWER)
    return held


def contains_text(text: str, answer: str) -> bool:
    """Whether the text has the answer's characters in it; case, spacing and LaTeX's decorations do not count."""
    needles = {_plain(answer), _plain(normalize(answer))} - {""}
    return any(needle in _plain(text) for needle in needles)


def values(text: str) -> list[str]:
    """Everything in a text that might be an answer, each once: boxes; formulas, whole and between their equality signs;
    fractions; numbers, and the integers inside them."""
    text = _unified(text)
    found = [content for _, _, content in boxes(text)]
    for match in _FORMULA.finditer(text):
        formula = next(part for part in match.groups() if part)
        found += [formula, *formula.split("=")]
    found += _FRACTION.findall(text)
    for number in _NUMBER.findall(text):
        found += [number, *_INTEGER.findall(number)]
    stripped = (value.strip() for value in found)
    return list(dict.fromkeys(value for value in stripped if 0 < len(value) <= _LONGEST))


def read_phrases(path: Path | None) -> tuple[str, ...]:
    """Leak phrases of a file (the shipped list without one), normalised."""
    try:
        source = files("rlvr_pl.data") / "leak_phrases.txt" if path is None else path
        lines = source.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--leak-phrases {path}: cannot be read ({error})") from None
    phrases = (normalised(line) for line in lines if not line.lstrip().startswith("#"))
    return tuple(dict.fromkeys(phrase for phrase in phrases if phrase))


def leak(text: str, phrases: Sequence[str]) -> str | None:
    """The first of the (normalised) phrases that the text contains."""
    text = normalised(text)
    return next((phrase for phrase in phrases if phrase in text), None)


def _plain(text: str) -> str:
    """Text with one space between two words or numbers, and none anywhere else."""
    text = _MARKUP.sub(" ", _FRACTION_NAMES.sub(r"\\frac", _unified(text)))
    return _NEEDLESS.sub("", " ".join(text.split())).casefold()


def _unified(text: str) -> str:
    """Text with one form of each character, and numbers without LaTeX between their digits."""
    text = unicodedata.normalize("NFKC", text).replace("\u2212", "-").replace("{,}", ",").replace("\\!", "")
    return _THIN_SPACE.sub("", text)
