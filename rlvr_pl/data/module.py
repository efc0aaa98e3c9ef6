"""The data of a run as Lightning data modules, one batch an update: `RunData`, and `QuestionData` for RL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from lightning.pytorch import LightningDataModule

from rlvr_pl.data.pools import load_questions
from rlvr_pl.data.schedule import QuestionSchedule
from rlvr_pl.errors import UserError
from rlvr_pl.records import RunFolder
from rlvr_pl.types import Question

if TYPE_CHECKING:
    from rlvr_pl.policy import Policy


class UpdateLoader:
    """Yields the batch of update `first() + 1`, and so on to the planned length.

    `first` is read when iteration starts, after a checkpoint has been restored; `len` is always the whole plan, which
    is what Lightning's restored progress counts against.
    """

    def __init__(self, schedule: Any, updates: int, first: Callable[[], int]) -> None:
        self._schedule = schedule
        self._updates = updates
        self._first = first

    def __len__(self) -> int:
        return self._updates

    def __iter__(self) -> Iterator[Sequence[Any]]:
        for update in range(self._first() + 1, self._updates + 1):
            yield self._schedule.batch(update)


class ValidationLoader:
    """Yields the held-out questions in fixed batches, always in the same order."""

    def __init__(self, questions: Sequence[Question], batch: int) -> None:
        self._questions = questions
        self._batch = batch

    def __len__(self) -> int:
        return -(-len(self._questions) // self._batch)

    def __iter__(self) -> Iterator[Sequence[Question]]:
        for start in range(0, len(self._questions), self._batch):
            yield self._questions[start : start + self._batch]


class RunData(LightningDataModule):
    """What `fit` asks of its data.

    Attributes:
        schedule: says what is learned from when: ``batch(update)`` for updates from 1, and ``sha256``, the identity of
            the data.
        updates: planned number of updates. This, and not a step count, is the length of the run.
        validation: held-out questions for the greedy validation inside `fit`; may be empty.
        validation_batch: questions decoded together in validation.
        stored: whether batches are stored solutions, so that nothing is sampled.
    """

    stored: ClassVar[bool] = False
    schedule: Any
    updates: int
    validation: Sequence[Question]
    validation_batch: int

    def planned_questions(self) -> Iterator[Question]:
        """Every question that the run will ask, validation included, some more than once; for checks before it
        starts."""
        yield from self.validation

    def check(self, policy: Policy) -> None:
        """Raise UserError, before anything is written, when `policy` cannot learn from this data."""

    def notes(self) -> list[str]:
        """What is to be said of this data before the run starts, a line each."""
        return []

    def record(self, folder: RunFolder) -> None:
        """Write into the run folder what its config does not tell."""

    def train_dataloader(self) -> UpdateLoader:
        return UpdateLoader(self.schedule, self.updates, self._updates_done)

    def val_dataloader(self) -> ValidationLoader:
        return ValidationLoader(self.validation, self.validation_batch)

    def _updates_done(self) -> int:
        assert self.trainer is not None
        return cast("Any", self.trainer.lightning_module).updates_done

    def state_dict(self) -> dict[str, Any]:
        return {"schedule": self.schedule.sha256}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["schedule"] != self.schedule.sha256:
            raise UserError(
                "the checkpoint was made with other data or another order; continue with the same data.* settings, or "
                "begin a new run from its weights with --start"
            )


MAX_UPDATES = 10**7
"""A run of one update a second would take four months."""
MAX_QUESTIONS_PER_UPDATE = 10**6


def check_counts(updates: int, questions_per_update: int) -> None:
    """Raise UserError unless both are at least 1, and no more than anyone can mean."""
    if updates < 1 or questions_per_update < 1:
        raise UserError(
            f"data.updates is {updates}, data.questions_per_update {questions_per_update}: both must be at least 1"
        )
    for name, value, most in (
        ("updates", updates, MAX_UPDATES),
        ("questions_per_update", questions_per_update, MAX_QUESTIONS_PER_UPDATE),
    ):
        if value > most:
            raise UserError(f"data.{name} is {value}: it must be at most {most:,}")


class QuestionData(RunData):
    """Training and validation questions.

    Args:
        train: training questions: ``embedded:train``, a JSONL, JSON, Parquet or CSV file, or a Hub dataset name.
        validation: held-out questions for the greedy validation inside `fit`; null for none.
        updates: planned number of updates. This, and not a step count, is the length of the run.
        questions_per_update: questions in one update (the supplied recipe has 1, the paper's continuations 4).
        order: file of question uids (JSON list) that fixes the order, as the paper's ``--order_file``; null shuffles
            by `order_seed`.
        start: offset into the order at which update 1 begins (the paper's ``--start``).
        order_seed: seed of the shuffled order. It is not the run's seed: matched arms see the same questions.
        columns: our field -> column of the file, e.g. ``{problem: question}``; null where they have our names.
        validation_columns: the same of the validation file; null for `columns`.
        split: split of a folder's or Hub dataset's training questions.
        validation_split: split of the validation questions.
        where: column -> value or list of values; rows that have others are left out.
        prepare: ``file.py:function`` that is given each row (a dict) and returns it, changed or not, or None to leave
            it out.
        stream: read Hub datasets as streams and stop after this many questions; null loads them whole.
        drop_empty_gold: leave questions out whose answer is empty, instead of refusing the pool.
        validation_batch: questions decoded together in validation; taken from ``model.eval_batch_size``.

    Example:
        >>> data = QuestionData("embedded:train", None, updates=3, questions_per_update=2)
        >>> len(data.schedule.batch(1)), len(list(data.planned_questions()))
        (2, 6)
    """

    def __init__(
        self,
        train: str = "embedded:train",
        validation: str | None = "embedded:val350",
        *,
        updates: int = 60,
        questions_per_update: int = 1,
        order: str | None = None,
        start: int = 0,
        order_seed: int = 0,
        columns: dict[str, str] | None = None,
        validation_columns: dict[str, str] | None = None,
        split: str = "train",
        validation_split: str = "train",
        where: dict[str, Any] | None = None,
        prepare: str | None = None,
        stream: int | None = None,
        drop_empty_gold: bool = False,
        validation_batch: int = 64,
    ) -> None:
        super().__init__()
        self.updates, self.validation_batch = updates, validation_batch
        check_counts(updates, questions_per_update)
        how: dict[str, Any] = {
            "where": where,
            "prepare": prepare,
            "stream": stream,
            "drop_empty_gold": drop_empty_gold,
        }
        questions = load_questions(train, split=split, columns=columns, naming="--data.columns.{field}=NAME", **how)
        self.schedule = QuestionSchedule(questions, questions_per_update, order=order, start=start, seed=order_seed)
        self.validation = ()
        if validation:
            self.validation = load_questions(
                validation,
                split=validation_split,
                columns=columns if validation_columns is None else validation_columns,
                naming="--data.validation_columns.{field}=NAME",
                **how,
            )

    def notes(self) -> list[str]:
        trained = {(q.problem, q.answer) for q in self.schedule.questions}
        known = sum((q.problem, q.answer) in trained for q in self.validation)
        if not known:
            return []
        return [
            f"data.validation: {known} of its {len(self.validation)} questions are training questions too, so its "
            "accuracy does not tell what is learned of others"
        ]

    def planned_questions(self) -> Iterator[Question]:
        for update in range(1, min(self.updates, self.schedule.updates_of_all) + 1):
            yield from self.schedule.batch(update)
        yield from self.validation
