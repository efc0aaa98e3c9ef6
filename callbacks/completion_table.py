"""A few rollouts on the screen, with their rewards and the credit they got."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch import Trainer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlvr_pl.callbacks.base import UpdateCallback
from rlvr_pl.callbacks.facts import diagnoses

if TYPE_CHECKING:
    from rlvr_pl.module import RLVRModule
    from rlvr_pl.types import Rollout
    from rlvr_pl.update import UpdateReport


class CompletionTable(UpdateCallback):
    """Prints rollouts of the update's first groups on stderr, best and worst reward first.

    Args:
        every_n_updates: updates between tables; the first update is shown as well.
        rollouts: rows of a table.
        characters: of a completion's end (where the answer stands) that are shown.
    """

    def __init__(self, every_n_updates: int = 20, rollouts: int = 4, characters: int = 300) -> None:
        if min(every_n_updates, rollouts, characters) < 1:
            raise ValueError("every_n_updates, rollouts and characters must be at least 1")
        self.every_n_updates = every_n_updates
        self.rollouts = rollouts
        self.characters = characters

    def after_update(self, trainer: Trainer, module: RLVRModule, report: UpdateReport) -> None:
        due = report.number == 1 or report.number % self.every_n_updates == 0
        if due and trainer.is_global_zero:
            Console(stderr=True).print(self.table(trainer, module, report))

    def table(self, trainer: Trainer, module: RLVRModule, report: UpdateReport) -> Table:
        """The table of an update; `credit` is the sum of the rollout's token weights."""
        questions = {q.uid: q for q in report.questions}
        kinds = diagnoses(trainer, module, report)
        credit = report.weights.sum(1).tolist()
        table = Table(title=f"update {report.number}", title_justify="left", show_lines=True)
        table.add_column("question", ratio=1)
        table.add_column("completion", ratio=3)
        table.add_column("reward", justify="right")
        table.add_column("credit", justify="right")
        table.add_column("answer / gold")
        table.add_column("class")
        for i in pick_rows(report, self.rollouts):
            rollout = report.rollouts[i]
            question = questions[rollout.uid]
            table.add_row(
                Text(_end(question.problem, self.characters)),
                Text(_end(rollout.text, self.characters)),
                f"{rollout.grade.reward:g}",
                f"{credit[i]:+.3g}",
                Text(f"{rollout.grade.answer} / {question.answer}"),
                f"{kinds[i].rollout_class.value}, {len(rollout.completion.token_ids)} tokens",
            )
        return table


def pick_rows(report: UpdateReport, count: int) -> list[int]:
    """Rows of an update's best and worst rollouts, of each group in turn, until there are `count` (or no more)."""
    size = report.batch.group_size
    groups = [range(start, start + size) for start in range(0, len(report.rollouts), size)]
    order = [sorted(rows, key=lambda i: _rank(report.rollouts[i])) for rows in groups]
    picked: list[int] = []
    while len(picked) < min(count, len(report.rollouts)):
        for rows in order:
            for end in (-1, 0):
                if rows:
                    picked.append(rows.pop(end))
    return picked[:count]


def _rank(rollout: Rollout) -> tuple[float, int]:
    reward = rollout.grade.reward
    return (reward if reward == reward else float("-inf"), -rollout.sample)


def _end(text: str, characters: int) -> str:
    return text if len(text) <= characters else "..." + text[-characters:]
