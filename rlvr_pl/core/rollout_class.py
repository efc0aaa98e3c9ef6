"""What a rollout that hit the cap turned into: ordinary text, a repetition loop, or token soup.

The paper (section 4.3) classes the rollouts of a collapsing run by termination, loops and soup ("a low fraction of
ordinary characters, or incompressible text"). Here each sign is a pure function with its threshold beside it, set
well outside what reference solutions, English, code in four languages, Chinese, Japanese, Korean and tables of
numbers show (docs/monitors.md has the figures). Only the text that the sampler cut off is looked at, from its end.

Text rules cannot see a soup of ordinary words; where a start policy is at hand, its mean surprise per token does.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections import Counter
from dataclasses import dataclass

from rlvr_pl.types import RolloutClass, StopReason

# Loop: the text ends in whole copies of one block. No reference solution of 12,000 repeats a block anywhere over more
# than 140 characters, or twice over more than 377.
LOOP_COPIES, LOOP_CHARACTERS = 2.5, 160
LONG_LOOP_COPIES, LONG_LOOP_CHARACTERS = 2.0, 600
LOOP_TAIL = 8192  # characters searched, from the end: 200 tokens a block leave several copies

# Soup: characters that are in no text (control, private use, unassigned, broken UTF-8). Ordinary text has none.
ODD_SHARE, ODD_CHARACTERS = 0.10, 50

# Soup: deflated size over size of the last 2,000 bytes of UTF-8. Ordinary text stays below 0.60 (Chinese: 0.64),
# random tokens of a multilingual vocabulary above 0.69. Short texts compress worse: 1,000 bytes of ordinary text
# below 0.63 (Chinese: 0.73).
DEFLATE_BYTES, DEFLATE_RATIO = 2000, 0.67
DEFLATE_LEAST_BYTES, DEFLATE_LEAST_RATIO = 1000, 0.75

# Soup: distinct words over words, of the last 200 words (in scripts without spaces, characters). Text repeats its
# small words (at most 0.90 of 100 words are distinct, 0.97 of 60); random tokens hardly repeat any. Long lists of
# names do look so.
DISTINCT_WORDS, DISTINCT_ENOUGH_WORDS, DISTINCT_SHARE = 200, 100, 0.92
DISTINCT_LEAST_WORDS, DISTINCT_LEAST_SHARE = 60, 0.98

# Soup: mean surprise of the start policy, nats a token. A policy near the start draws its own tokens at 0.1 to 1.
# A text that the policy itself was sure of (mean -log of its sampling probabilities) is no soup, whatever the start
# thinks of it, so the start is not even asked.
SURPRISE, SURE = 3.0, 1.0

_WORD = re.compile(r"[^\W\d_]+")
_FIRST_CJK = "\u2e80"  # from here on the common scripts write no spaces


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A rollout's class and which detector spoke: "periodic-tail", "odd-characters", "incompressible",
    "distinct-words" or "surprise"; None for a rollout that ended, or that was cut off in ordinary text."""

    rollout_class: RolloutClass
    detector: str | None = None


def classify(text: str, stop_reason: StopReason | str) -> RolloutClass:
    """The class of a rollout by its text; `stop_reason` ("eos" or "length") is the sampler's word.

    >>> classify("so it is " * 60, "length").value
    'loop'
    """
    return diagnose(text, stop_reason).rollout_class


def diagnose(
    text: str, stop_reason: StopReason | str, *, surprise: float | None = None, max_surprise: float = SURPRISE
) -> Diagnosis:
    """`classify` with the name of the detector.

    Args:
        text: the decoded completion.
        stop_reason: "eos" gives class EOS whatever the text; "length" lets the detectors speak, loops first.
        surprise: mean ``-log pi_start`` of the completion's tokens in nats, if the start policy was asked.
        max_surprise: a surprise above this is soup.
    """
    if StopReason(stop_reason) is StopReason.EOS:
        return Diagnosis(RolloutClass.EOS)
    text = text.rstrip("\ufffd")  # a character cut in two at the cap
    if loop_period(text) is not None:
        return Diagnosis(RolloutClass.LOOP, "periodic-tail")
    for detector, found in (
        ("odd-characters", has_odd_characters(text)),
        ("incompressible", is_incompressible(text)),
        ("distinct-words", has_distinct_words(text)),
        ("surprise", surprise is not None and surprise > max_surprise),
    ):
        if found:
            return Diagnosis(RolloutClass.SOUP, detector)
    return Diagnosis(RolloutClass.TRUNCATED)


def loop_period(text: str) -> int | None:
    """Characters in the block that the text's end repeats, or None.

    The end counts as a loop if it holds 2.5 copies of a block and 160 characters, or two copies and 600 characters.
    """
    text = text[-LOOP_TAIL:]
    if len(text) < LOOP_CHARACTERS:
        return None
    # Where the end has such a period, its last 96 characters stand a period earlier as well: what is left of the span
    # after one block is at least max(160 - p, 1.5 p) >= 96 characters by the first rule, and 300 by the second.
    tail = text[-96:]
    at = text.rfind(tail, 0, len(text) - 1)
    while at >= 0:
        period = len(text) - len(tail) - at
        span = period + _common_end(text, text[:-period])  # the last `span` characters have this period
        if (span >= LOOP_COPIES * period and span >= LOOP_CHARACTERS) or (
            span >= LONG_LOOP_COPIES * period and span >= LONG_LOOP_CHARACTERS
        ):
            return period
        at = text.rfind(tail, 0, at + len(tail) - 1)
    return None


def _common_end(a: str, b: str) -> int:
    """Length of the longest common suffix."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[len(a) - middle :] == b[len(b) - middle :]:
            low = middle
        else:
            high = middle - 1
    return low


def has_odd_characters(text: str) -> bool:
    """Whether at least 10% of the characters are control, private-use, unassigned or replacement characters."""
    odd = sum(
        count
        for c, count in Counter(text).items()
        if c == "\ufffd" or (unicodedata.category(c)[0] == "C" and c not in "\t\n\r\u200c\u200d")
    )
    return len(text) >= ODD_CHARACTERS and odd >= ODD_SHARE * len(text)


def is_incompressible(text: str) -> bool:
    """Whether the last 2,000 bytes deflate to 67% of their size or more (75% for 1,000 bytes, linear in between).

    Texts under 1,000 bytes are never judged.
    """
    data = text[-DEFLATE_BYTES:].encode("utf-8", "replace")[-DEFLATE_BYTES:]
    if len(data) < DEFLATE_LEAST_BYTES:
        return False
    short = (DEFLATE_BYTES - len(data)) / (DEFLATE_BYTES - DEFLATE_LEAST_BYTES)
    limit = DEFLATE_RATIO + short * (DEFLATE_LEAST_RATIO - DEFLATE_RATIO)
    return len(zlib.compress(data, 9)) >= limit * len(data)


def has_distinct_words(text: str) -> bool:
    """Whether at least 92% of the last 200 words are distinct, case ignored; of 60 to 99 words, 98%.

    Texts under 60 words are never judged.
    """
    words: list[str] = []
    for word in _WORD.findall(text):
        if word[-1] >= _FIRST_CJK:
            words.extend(word)
        else:
            words.append(word.lower())
    words = words[-DISTINCT_WORDS:]
    share = DISTINCT_SHARE if len(words) >= DISTINCT_ENOUGH_WORDS else DISTINCT_LEAST_SHARE
    return len(words) >= DISTINCT_LEAST_WORDS and len(set(words)) >= share * len(words)
