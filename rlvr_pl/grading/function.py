"""A user's own reward function as a grader, called the way TRL calls it."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Sequence
from typing import Any, ClassVar

from rlvr_pl.errors import UserError
from rlvr_pl.grading.base import Grader, GradeRequest
from rlvr_pl.grading.extract import extract
from rlvr_pl.mistakes import is_ctrl_c, told
from rlvr_pl.types import Grade, GradeStatus
from rlvr_pl.user_function import load_function, place


class FunctionGrader(Grader):
    """Rewards from ``function(completions=..., prompts=..., completion_ids=..., <column>=..., ...)``, TRL's signature.

    Each argument is a list with one entry a completion: texts, prompt texts, token ids, whether each was ``truncated``
    by the length cap, and the columns of the questions (``uid``, ``problem``, ``answer``, ``subject``, ``level`` and
    whatever the data holds, by the data's own names). Where the data's prompts are chat messages, prompts and
    completions are lists of messages too. A function that takes no ``**kwargs`` is given the arguments that it names.
    It returns one number a completion; None marks a completion as not scorable (reward NaN). It may be async. Several
    functions with weights are a `WeightedSum` of such graders.

    Raises UserError, with the function's name, for a path that cannot be loaded, an exception in the function, and
    anything but one finite number (or None) a completion.

    Args:
        path: ``package.module:function``, ``package.module.function`` or ``folder/file.py:function``.
        correct_at: the status is `correct` from this reward on, `wrong` below.

    Example:
        >>> from rlvr_pl import GradeRequest, Question
        >>> grader = FunctionGrader("rlvr_pl.grading.examples:longer_is_better")
        >>> asked = [GradeRequest(text, Question("q", "?", "2")) for text in ("2", "it is 2")]
        >>> [grade.reward for grade in grader.grade(asked, require_box=False)]
        [0.01, 0.07]
    """

    name: ClassVar[str] = "function"

    def __init__(self, path: str, correct_at: float = 1.0) -> None:
        self.path = path
        self.correct_at = correct_at
        self._function = load_function(path, "reward function")

    @property
    def described(self) -> str:
        return f"function {self.path}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.correct_at)

    def grade(self, requests: Sequence[GradeRequest], *, require_box: bool) -> list[Grade]:
        if not requests:
            return []
        rewards = self._rewards(requests)
        return [self._grade(r, reward, require_box) for r, reward in zip(requests, rewards)]

    def _grade(self, request: GradeRequest, reward: float | None, require_box: bool) -> Grade:
        found = extract(request.response, require_box=require_box)
        if reward is None:
            return Grade(GradeStatus.NO_ANSWER, math.nan, found.answer, found.boxed)
        status = GradeStatus.CORRECT if reward >= self.correct_at else GradeStatus.WRONG
        return Grade(status, reward, found.answer, found.boxed)

    def _rewards(self, requests: Sequence[GradeRequest]) -> list[float | None]:
        arguments = _arguments(requests)
        parameters = inspect.signature(self._function).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            arguments = {name: value for name, value in arguments.items() if name in parameters}
        try:
            returned = self._function(**arguments)
            if inspect.isawaitable(returned):
                returned = _wait(returned)
        except (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
            if is_ctrl_c(error):
                raise
            where = place(error, self._function)
            raise UserError(f"reward function {self.path}: raised {told(error)}{where}") from error
        return self._checked(returned, len(requests))

    def _checked(self, returned: Any, count: int) -> list[float | None]:
        values = returned.tolist() if hasattr(returned, "tolist") else returned
        if not isinstance(values, (list, tuple)):
            raise UserError(
                f"reward function {self.path}: expected a list of {count} numbers, got {type(returned).__name__}"
            )
        if len(values) != count:
            raise UserError(f"reward function {self.path}: expected {count} rewards, got {len(values)}")
        return [self._number(value, row) for row, value in enumerate(values)]

    def _number(self, value: Any, row: int) -> float | None:
        if value is None:
            return None
        try:
            number = math.nan if isinstance(value, (str, bytes)) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise UserError(
                f"reward function {self.path}: expected a finite number or None for row {row}, got {value!r}"
            )
        return number


def _spoken(request: GradeRequest) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": request.response}]


def _arguments(requests: Sequence[GradeRequest]) -> dict[str, list[Any]]:
    questions = [r.question for r in requests]
    given = [{**q.renamed, **q.columns} for q in questions]
    columns = {name for row in given for name in row}
    return {
        **{name: [row.get(name) for row in given] for name in sorted(columns)},
        **{name: [getattr(q, name) for q in questions] for name in ("uid", "problem", "answer", "subject", "level")},
        "completions": [_spoken(r) if r.question.messages else r.response for r in requests],
        "prompts": [[dict(m) for m in r.question.messages] or r.prompt for r in requests],
        "completion_ids": [list(r.token_ids) for r in requests],
        "truncated": [r.truncated for r in requests],
    }


def _wait(awaitable: Awaitable[Any]) -> Any:
    """The result of an awaitable, whether or not this thread (a notebook's, say) runs an event loop of its own."""

    async def main() -> Any:
        return await awaitable

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main())
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(main()))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]
