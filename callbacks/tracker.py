"""What a run's loggers keep beside figures: settings and hashes once, and tables of completions and windows."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from lightning.pytorch import Trainer

from rlvr_pl.callbacks.base import UpdateCallback
from rlvr_pl.callbacks.completion_table import pick_rows
from rlvr_pl.callbacks.facts import facts
from rlvr_pl.records import RunFolder

if TYPE_CHECKING:
    from rlvr_pl.module import RLVRModule
    from rlvr_pl.update import UpdateReport

HASHES = ("start", "start_sha256", "order_sha256", "engine", "deterministic")
"""What identifies a run, of its ``run.json``."""
COMPLETIONS = (
    "update",
    "uid",
    "sample",
    "problem",
    "completion",
    "gold",
    "answer",
    "reward",
    "credit",
    "class",
    "length",
)


class Tracker(UpdateCallback):
    """Logs settings and hashes once, before update 1, a table of completions every n updates, and the run's windows.

    Figures go to the loggers by themselves, each update's under its number. Tables go to TensorBoard (as text), Weights
    & Biases and MLflow; the CSV logger has none, and the run folder holds them all anyway.

    Args:
        every_n_updates: updates between tables of completions, the first update included; null for none.
        rollouts: rows of such a table, best and worst of the update's groups in turn.
    """

    def __init__(self, every_n_updates: int | None = 20, rollouts: int = 8) -> None:
        if rollouts < 1 or (every_n_updates is not None and every_n_updates < 1):
            raise ValueError(f"every_n_updates={every_n_updates}, rollouts={rollouts}: must be at least 1")
        self.every_n_updates = every_n_updates
        self.rollouts = rollouts

    def begin(self, trainer: Trainer, module: RLVRModule) -> None:
        if module.updates_done == 0 and trainer.is_global_zero:
            settings = run_facts(RunFolder.of(trainer))
            for logger in trainer.loggers:
                log_settings(logger, settings)

    def after_update(self, trainer: Trainer, module: RLVRModule, report: UpdateReport) -> None:
        every = self.every_n_updates
        if every is not None and (report.number == 1 or report.number % every == 0) and trainer.is_global_zero:
            log_table(trainer, "completions", COMPLETIONS, self._completions(trainer, module, report), report.number)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        path = RunFolder.of(trainer).path / "windows.csv"
        if trainer.is_global_zero and path.exists():
            with path.open(encoding="utf-8", newline="") as f:
                columns, *rows = csv.reader(f)
            log_table(trainer, "windows", columns, rows, pl_module.updates_done)

    def _completions(self, trainer: Trainer, module: RLVRModule, report: UpdateReport) -> list[list[Any]]:
        questions = {q.uid: q for q in report.questions}
        found = facts(trainer, module, report)
        credit = report.weights.sum(1).tolist()
        rows = []
        for i in pick_rows(report, self.rollouts):
            rollout, fact = report.rollouts[i], found[i]
            question = questions[rollout.uid]
            row = (report.number, rollout.uid, rollout.sample, question.problem, rollout.text, question.answer)
            rows.append([*row, rollout.grade.answer, fact.reward, credit[i], fact.rollout_class, fact.length])
        return rows


def run_facts(folder: RunFolder) -> dict[str, Any]:
    """A run's settings with the hashes of its start, its questions and its stop rule."""
    settings = yaml.safe_load((folder.path / "config.yaml").read_text(encoding="utf-8"))
    manifest, rule = folder.read_json("run.json") or {}, folder.read_json("criterion.json") or {}
    identity = {name: manifest.get(name) for name in HASHES} | {"criterion_sha256": rule.get("sha256")}
    return {**settings, "run": {name: value for name, value in identity.items() if value is not None}}


def log_settings(logger: Any, settings: dict[str, Any]) -> None:
    """Give a logger the settings of its run."""
    logger.log_hyperparams(settings)
    if type(logger).__name__ == "TensorBoardLogger":
        # Lightning has already written this file, empty, and never writes over it
        Path(logger.log_dir, logger.NAME_HPARAMS_FILE).unlink(missing_ok=True)
        logger.save()


def log_table(trainer: Trainer, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], update: int) -> None:
    """Give a table to every logger of the run that has tables."""
    for logger in trainer.loggers:
        kind = type(logger).__name__
        hold: Any = logger
        if kind == "WandbLogger":
            hold.log_table(name, list(columns), [list(row) for row in rows], step=update)
        elif kind == "MLFlowLogger":
            table = {column: [row[i] for row in rows] for i, column in enumerate(columns)}
            hold.experiment.log_table(hold.run_id, table, f"{name}/update-{update:06d}.json")
        elif kind == "TensorBoardLogger":
            hold.experiment.add_text(name, markdown(columns, rows), update)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown, whatever stands in the cells."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("|" + "|".join(_cell(x) for x in line) + "|" for line in lines)


def _cell(x: Any) -> str:
    text = f"{x:.4g}" if isinstance(x, float) else "" if x is None else str(x)
    return " ".join(text.replace("|", "\\|").split())
