"""Questions that the package reasoning-gym makes; `rlvr-pl reasoning-gym` lists its tasks.

An item's number is part of its seed there, so that neighbouring seeds share nearly all of their items. Here each split
has a seed of its own, hashed from the run's, and a training question that validation asks too is left out.
"""

from __future__ import annotations

import hashlib
from typing import Any

from lightning.pytorch import LightningDataModule

from rlvr_pl.data.module import QuestionData, check_counts
from rlvr_pl.data.schedule import QuestionSchedule
from rlvr_pl.errors import UserError
from rlvr_pl.types import Question

ENTRY = "reasoning_gym"
"""The column in which a question carries its entry, which the task's scorer needs."""


class ReasoningGym(QuestionData):
    """Procedural questions of one task. ``--grader ReasoningGymGrader`` scores answers by the task's own scorer.

    Args:
        task: name of the task, e.g. ``chain_sum``.
        size: training questions.
        seed: names the questions of both splits.
        config: settings of the task, e.g. ``{max_digits: 2}``.
        instruction: what is asked for after each question, for example how to mark the answer.
        validation_size: held-out questions for the greedy validation inside `fit`; 0 for none.
        updates: planned number of updates.
        questions_per_update: questions in one update.
        order_seed: seed of the shuffled order.
        validation_batch: questions decoded together in validation; taken from ``model.eval_batch_size``.

    Raises UserError for a task or a setting that reasoning-gym does not know.
    """

    def __init__(
        self,
        task: str = "chain_sum",
        size: int = 1000,
        seed: int = 0,
        config: dict[str, Any] | None = None,
        *,
        instruction: str = "",
        validation_size: int = 100,
        updates: int = 60,
        questions_per_update: int = 1,
        order_seed: int = 0,
        validation_batch: int = 64,
    ) -> None:
        LightningDataModule.__init__(self)
        check_counts(updates, questions_per_update)
        if size < 1 or validation_size < 0:
            raise UserError(f"data.size is {size}, data.validation_size {validation_size}: the least are 1 and 0")
        validation = questions(task, "validation", validation_size, seed, config, instruction)
        asked = {q.problem for q in validation}
        training = [q for q in questions(task, "train", size, seed, config, instruction) if q.problem not in asked]
        if not training:
            raise UserError(f"data.task {task}: validation asks all of its questions; lower data.validation_size")
        self.updates, self.validation_batch = updates, validation_batch
        self.schedule = QuestionSchedule(training, questions_per_update, seed=order_seed)
        self.validation = validation


def questions(
    task: str, split: str, size: int, seed: int, config: dict[str, Any] | None = None, instruction: str = ""
) -> list[Question]:
    """`size` questions of a split, each with its entry in the column `ENTRY`. Raises UserError as `ReasoningGym`."""
    if size == 0:
        return []
    gym = _package()
    number = int.from_bytes(hashlib.sha256(f"{task}/{split}/{seed}".encode()).digest()[:4], "little") >> 1
    if task not in gym.factory.DATASETS:
        raise UserError(f"data.task {task!r}: reasoning-gym has no such task; `rlvr-pl reasoning-gym` lists them")
    try:
        items = gym.create_dataset(task, seed=number, size=size, **(config or {}))
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"data.config of {task}: {' '.join(str(error).split()) or type(error).__name__}") from None
    made = []
    for i in range(size):
        entry = items[i]
        text = f"{entry['question']}\n{instruction}" if instruction else entry["question"]
        answer = "" if entry["answer"] is None else str(entry["answer"])
        made.append(Question(f"{task}/{split}/{seed}/{i}", text, answer, task, columns={ENTRY: entry}))
    return made


def _package() -> Any:
    try:
        import reasoning_gym
        import reasoning_gym.factory
    except ImportError:
        raise UserError("ReasoningGym: needs the package reasoning-gym: pip install 'rlvr-pl[reasoning]'") from None
    return reasoning_gym
