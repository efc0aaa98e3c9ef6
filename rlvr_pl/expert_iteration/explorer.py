"""A policy with all that is needed to sample and grade its answers outside of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlvr_pl.errors import UserError
from rlvr_pl.expert_iteration.records import VERSION, questions_sha256, tokenizer_sha256
from rlvr_pl.grading.base import Grader, GradeRequest, ask
from rlvr_pl.sampling.base import Decoding, Sampler, SampleRequest
from rlvr_pl.types import Grade, GradeStatus, Question, StopReason

if TYPE_CHECKING:
    from rlvr_pl.policy import Policy

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One graded completion; `token_ids` begin with the prefix that it was given."""

    question: Question
    prompt_length: int
    token_ids: tuple[int, ...]
    stop_reason: StopReason
    text: str
    grade: Grade

    @property
    def verified(self) -> bool:
        """Whether the answer stands in a box and is right."""
        return self.grade.status is GradeStatus.CORRECT

    @property
    def ended(self) -> bool:
        """Whether the completion ended by itself."""
        return self.stop_reason is StopReason.EOS

    def record(self) -> dict[str, Any]:
        """The fields that every record of an attempt has."""
        q, g = self.question, self.grade
        return {
            "subject": q.subject,
            "level": q.level,
            "problem": q.problem,
            "gold": q.answer,
            "correct": int(self.verified),
            "status": g.status.value,
            "answer": g.answer,
            "boxed": int(g.boxed),
            "length": len(self.token_ids),
            "stop_reason": self.stop_reason.value,
            "prompt_length": self.prompt_length,
            "token_ids": list(self.token_ids),
            "text": self.text,
        }


@dataclass(frozen=True)
class Wish:
    """A completion to draw: question, prompt, the key that names its random numbers, and tokens that it begins with."""

    question: Question
    prompt_ids: tuple[int, ...]
    key: tuple[int | str, ...]
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True)
class Explorer:
    """Samples and grades with one policy.

    Attributes:
        policy, sampler, grader: what they say; the sampler holds the policy's weights.
        decoding: temperature, nucleus and the cap on a completion, prefix included.
        seed: names every draw, together with the question's uid and the number of the sample.
        batch_tokens: rows x (prompt + cap) that are sampled together.
    """

    policy: Policy
    sampler: Sampler
    grader: Grader
    decoding: Decoding
    seed: int = 0
    batch_tokens: int = 32_768

    def header(self, record: str, questions: Sequence[Question], **settings: Any) -> dict[str, Any]:
        """The first line of a file of records: everything that its rows depend on."""
        policy, decoding = self.policy, self.decoding
        return {
            "record": record,
            "version": VERSION,
            "engine": self.sampler.engine,
            "grader": self.grader.described,
            "checkpoint": policy.name,
            "checkpoint_sha256": policy.sha256,
            "tokenizer_sha256": tokenizer_sha256(policy.tokenizer),
            "template": policy.template.spec(),
            "temperature": decoding.temperature,
            "top_p": decoding.top_p,
            "max_new_tokens": decoding.max_new_tokens,
            "batch_tokens": self.batch_tokens,
            "seed": self.seed,
            "questions": len(questions),
            "questions_sha256": questions_sha256(questions),
            **settings,
        }

    def prompt_ids(self, question: Question) -> tuple[int, ...]:
        """The question's prompt. Raises UserError when it leaves no room for a completion up to the cap."""
        ids = self.policy.prompt_ids(question)
        room = self.policy.max_context - len(ids)
        if room < self.decoding.max_new_tokens:
            raise UserError(
                f"question {question.uid}: its prompt has {len(ids)} tokens and leaves room for {room}, not for "
                f"--max-new-tokens {self.decoding.max_new_tokens}; lower that or leave the question out"
            )
        return ids

    def parts(self, questions: Sequence[Question], k: int) -> Iterator[Sequence[Question]]:
        """The questions cut where the next one's k samples would exceed `batch_tokens`. Where a cut falls depends on
        the questions before it alone."""
        first, longest = 0, 0
        for i, question in enumerate(questions):
            length = len(self.prompt_ids(question))
            rows = (i + 1 - first) * k
            if i > first and rows * (max(longest, length) + self.decoding.max_new_tokens) > self.batch_tokens:
                yield questions[first:i]
                first, longest = i, 0
            longest = max(longest, length)
        if questions:
            yield questions[first:]

    def attempt(self, wishes: Sequence[Wish], progress: Progress | None = None) -> list[Attempt]:
        """Draw and grade, in order. Graded is the whole completion, prefix included, by the training rule (boxed)."""
        cap = self.decoding.max_new_tokens
        requests = [SampleRequest(w.prompt_ids + w.prefix, w.key, cap - len(w.prefix)) for w in wishes]
        drawn = self.sampler.generate(requests, self.decoding, progress)
        ids = [w.prefix + c.token_ids for w, c in zip(wishes, drawn)]
        texts = [self.policy.decode(x) for x in ids]
        render = self.policy.template.render
        grades = ask(
            self.grader,
            [
                GradeRequest(text, w.question, render(w.question), x, c.stop_reason is StopReason.LENGTH)
                for w, c, x, text in zip(wishes, drawn, ids, texts)
            ],
            require_box=True,
        )
        return [
            Attempt(w.question, len(w.prompt_ids), x, c.stop_reason, text, grade)
            for w, c, x, text, grade in zip(wishes, drawn, ids, texts, grades)
        ]
