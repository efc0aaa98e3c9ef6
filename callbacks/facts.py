"""What an update's report says about each rollout, worked out once for all callbacks that ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rlvr_pl.core.rollout_class import SURE, Diagnosis, diagnose
from rlvr_pl.core.windows import RolloutFacts, StepFacts
from rlvr_pl.types import GradeStatus, RolloutClass

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from rlvr_pl.module import RLVRModule
    from rlvr_pl.types import Rollout
    from rlvr_pl.update import UpdateReport


class SurpriseSource(Protocol):
    """A callback that can tell how surprised the start policy is; at most one in a run."""

    max_surprise: float | None

    def surprises(self, module: RLVRModule, report: UpdateReport, rows: Sequence[int]) -> list[float]:
        """Mean ``-log pi_start`` in nats a token of the completions of these rows."""
        ...


def diagnoses(trainer: Trainer, module: RLVRModule, report: UpdateReport) -> list[Diagnosis]:
    """The class of every rollout and the detector that spoke, the same for every callback whatever their order.

    Text rules first. Where the run has a callback that knows the start policy, it is asked about what they leave as
    plainly truncated, unless the policy was sure of it.
    """
    if report.diagnoses is None:
        found = [diagnose(r.text, r.completion.stop_reason) for r in report.rollouts]
        source: SurpriseSource | None = next((c for c in _callbacks(trainer) if getattr(c, "max_surprise", None)), None)
        rows = [
            i
            for i, (d, rollout) in enumerate(zip(found, report.rollouts))
            if d.rollout_class is RolloutClass.TRUNCATED and not _was_sure(rollout)
        ]
        if source is not None and source.max_surprise is not None and rows:
            for i, value in zip(rows, source.surprises(module, report, rows)):
                if value > source.max_surprise:
                    found[i] = Diagnosis(RolloutClass.SOUP, "surprise")
        report.diagnoses = found
    return report.diagnoses


def facts(trainer: Trainer, module: RLVRModule, report: UpdateReport) -> list[RolloutFacts]:
    """What `rlvr_pl.core.windows` needs to know of each rollout of the update."""
    if report.facts is None:
        report.facts = _facts(report, diagnoses(trainer, module, report))
    return report.facts


def _facts(report: UpdateReport, found: Sequence[Diagnosis]) -> list[RolloutFacts]:
    plus = report.weights.clamp(min=0).double().sum(1).tolist()
    minus = (-report.weights).clamp(min=0).double().sum(1).tolist()
    rewards = report.batch.rewards.tolist()
    lengths = report.batch.lengths.tolist()
    truncated = report.batch.truncated.tolist()
    return [
        RolloutFacts(
            group=i // report.batch.group_size,
            reward=rewards[i],
            correct=rollout.grade.status is GradeStatus.CORRECT,
            length=lengths[i],
            truncated=truncated[i],
            rollout_class=d.rollout_class.value,
            detector=d.detector,
            m_plus=plus[i],
            m_minus=minus[i],
        )
        for i, (rollout, d) in enumerate(zip(report.rollouts, found))
    ]


def step_facts(report: UpdateReport) -> StepFacts:
    """What `rlvr_pl.core.windows` needs to know of the step."""
    return StepFacts(report.grad_norm, report.clipped, report.changed_share)


def _was_sure(rollout: Rollout) -> bool:
    logprobs = rollout.completion.logprobs
    return bool(logprobs) and -sum(logprobs) <= SURE * len(logprobs)


def drift_rows(trainer: Trainer) -> Sequence[dict[str, Any]]:
    """Rows of the run's `DriftMonitor` so far, oldest first; empty where there is none."""
    return next((c.rows for c in _callbacks(trainer) if hasattr(c, "entropy_ratio")), ())


def _callbacks(trainer: Trainer) -> Sequence[Any]:
    return trainer.callbacks  # type: ignore[attr-defined]
