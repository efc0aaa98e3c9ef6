"""Small reward functions in TRL's signature, to copy from and to try `FunctionGrader` with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_LAYOUT = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL)


def longer_is_better(completions: Sequence[str], **_: Any) -> list[float]:
    """A hundredth for every character, at most 1."""
    return [min(len(text) / 100, 1.0) for text in completions]


def think_and_answer(completions: Sequence[str], **_: Any) -> list[float]:
    """1 where the completion is ``<think>...</think>`` followed by ``<answer>...</answer>`` and nothing else."""
    return [1.0 if _LAYOUT.fullmatch(text.strip()) else 0.0 for text in completions]
