"""Small sums, differences and products: questions for a small pretrained model on a CPU.

Procedural, with one seed for all splits; no problem stands in two splits.
"""

from __future__ import annotations

import functools
import random

from rlvr_pl.errors import UserError
from rlvr_pl.types import Question

SPLITS = {"train": 4000, "val": 200}
SEED = 2024
# subject -> wording; {a} and {b} are the operands
WORDINGS = {"sum": "What is {a} + {b}?", "difference": "What is {a} - {b}?", "product": "What is {a} * {b}?"}
# level -> largest operand of a sum or difference, and of a product
RANGES = {1: (9, 5), 2: (20, 9), 3: (50, 12), 4: (99, 20), 5: (500, 40)}


def questions(split: str) -> list[Question]:
    """The questions of ``train`` (4,000) or ``val`` (200), balanced over subjects and levels."""
    if split not in SPLITS:
        raise UserError(f"arithmetic:{split}: no such question set; there are arithmetic:train and arithmetic:val")
    return list(_all()[split])


@functools.cache
def _all() -> dict[str, list[Question]]:
    rng = random.Random(SEED)
    seen: set[tuple[str, int, int]] = set()
    out: dict[str, list[Question]] = {}
    for split in ("val", "train"):  # the small split first, so that it has first choice of the few easy problems
        taken = _draw(split, SPLITS[split], rng, seen)
        seen |= {key for key, _ in taken}
        out[split] = [question for _, question in taken]
    return out


def _draw(
    split: str, count: int, rng: random.Random, seen: set[tuple[str, int, int]]
) -> list[tuple[tuple[str, int, int], Question]]:
    """Problems repeat within a split where a level has few, but never across splits."""
    subjects = tuple(WORDINGS)
    out: list[tuple[tuple[str, int, int], Question]] = []
    for i in range(count):
        subject, level = subjects[i % 3], 1 + i // 3 % 5
        while True:
            high = RANGES[level][subject == "product"]
            a, b = rng.randint(1, high), rng.randint(1, high)
            if subject == "difference":
                a, b = max(a, b), min(a, b)
            if (subject, a, b) not in seen:
                break
        answer = {"sum": a + b, "difference": a - b, "product": a * b}[subject]
        problem = WORDINGS[subject].format(a=a, b=b)
        out.append(((subject, a, b), Question(f"arithmetic/{split}/{i}", problem, str(answer), subject, level)))
    return out
