"""`SolutionData`: stored solutions as the data of a run, for the distillation step of expert iteration."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from rlvr_pl.data.module import RunData
from rlvr_pl.data.pools import load_questions
from rlvr_pl.errors import UserError
from rlvr_pl.expert_iteration.files import read_solutions, write_solutions
from rlvr_pl.expert_iteration.filter import Solution, SolutionFilter
from rlvr_pl.expert_iteration.records import tokenizer_sha256
from rlvr_pl.records import RunFolder, canonical_json
from rlvr_pl.sampling.base import uniforms

if TYPE_CHECKING:
    from rlvr_pl.policy import Policy


class SolutionSchedule:
    """Solutions by update: each epoch is a permutation of its own, drawn from the key (seed, epoch), and its last
    update has what is left of it."""

    def __init__(self, solutions: Sequence[Solution], per_update: int, seed: int) -> None:
        self.solutions = tuple(solutions)
        self.per_update = per_update
        self.seed = seed
        self.per_epoch = -(-len(self.solutions) // per_update)

    def batch(self, update: int) -> list[Solution]:
        """The solutions of update `update`, counted from 1."""
        epoch, place = divmod(update - 1, self.per_epoch)
        order = np.argsort(uniforms(("solutions", self.seed, epoch), len(self.solutions)), kind="stable")
        return [self.solutions[i] for i in order[place * self.per_update : (place + 1) * self.per_update]]

    @cached_property
    def sha256(self) -> str:
        """Of everything that decides what is learned when."""
        content = [[s.question.uid, s.question.problem, list(s.token_ids)] for s in self.solutions]
        return hashlib.sha256(canonical_json([self.per_update, self.seed, content]).encode()).hexdigest()


class SolutionData(RunData):
    """Stored solutions for `ExpertIterationSFT`, and held-out questions. Nothing is sampled but in validation.

    Args:
        solutions: files of solutions, of samples (`rlvr-pl search`; they pass the filter) and of rationales
            (`rlvr-pl rationalize`), together.
        validation: held-out questions for the greedy validation inside `fit`; null for none.
        epochs: passes over the solutions (the paper's 2).
        solutions_per_update: solutions in one update (the paper's 16); the last update of an epoch may have fewer.
        order_seed: seed of each epoch's order.
        filter: which samples become solutions.
        columns: our field -> column of the validation file; null where they have our names.
        validation_batch: questions decoded together in validation; taken from ``model.eval_batch_size``.
    """

    stored: ClassVar[bool] = True

    def __init__(
        self,
        solutions: list[str],
        validation: str | None = "embedded:val350",
        *,
        epochs: int = 2,
        solutions_per_update: int = 16,
        order_seed: int = 0,
        filter: SolutionFilter = SolutionFilter(),  # noqa: B008 (frozen)
        columns: dict[str, str] | None = None,
        validation_batch: int = 64,
    ) -> None:
        super().__init__()
        if epochs < 1 or solutions_per_update < 1:
            raise UserError(
                f"data.epochs is {epochs} and data.solutions_per_update {solutions_per_update}: both must be at least 1"
            )
        if not solutions:
            raise UserError("data.solutions: name at least one file of solutions, samples or rationales")
        self.found = read_solutions(solutions, filter)
        if not self.found.solutions:
            raise UserError(f"data.solutions: no sample of {', '.join(solutions)} became a solution")
        self.schedule = SolutionSchedule(self.found.solutions, solutions_per_update, order_seed)
        self.updates = epochs * self.schedule.per_epoch
        naming = "--data.columns.{field}=NAME"
        self.validation = load_questions(validation, columns=columns, naming=naming) if validation else ()
        self.validation_batch = validation_batch

    def record(self, folder: RunFolder) -> None:
        write_solutions(folder.path / "solutions.jsonl", self.found)

    def check(self, policy: Policy) -> None:
        if self.found.tokenizers != {tokenizer_sha256(policy.tokenizer)}:
            raise UserError(
                f"data.solutions: made with another tokenizer than that of {policy.name}; their token ids would mean "
                "other words. Search again with this policy"
            )
        if self.found.policies and policy.sha256 not in self.found.policies:
            print(f"rlvr-pl: warning: no solution was drawn from {policy.name} itself", file=sys.stderr)
        for s in self.schedule.solutions:
            where = f"data.solutions: a solution of {s.question.uid!r}"
            if not s.token_ids or s.token_ids[-1] not in policy.eos_ids:
                raise UserError(f"{where} does not end with an end-of-sequence token of {policy.name}")
            if len(policy.prompt_ids(s.question)) + len(s.token_ids) > policy.max_context:
                raise UserError(f"{where} and its prompt exceed the context of {policy.max_context} of {policy.name}")
