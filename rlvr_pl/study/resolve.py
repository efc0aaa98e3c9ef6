"""Whether the arms of a study are matched: their full settings, what must agree, and what differs all the same."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr_pl.errors import UserError
from rlvr_pl.mistakes import named_class
from rlvr_pl.study.plan import Arm, Study, flatten

# What makes arms comparable: weights, questions and their order, rollouts of an update, caps, grading, validations.
MATCHED = (
    *("policy.", "data.", "grader.", "validation.", "model.group_size", "model.max_new_tokens"),
    *("model.eval_batch_size", "model.eval_max_new_tokens"),
)
# What does not touch the policy.
ASIDE = (
    "trainer.callbacks",
    "trainer.logger",
    "progress.",
    "recorder.",
    "rollout_stats.",
    "checkpoint.",
    "time_limit.",
)


@dataclass(frozen=True)
class Plan:
    """What a study will do.

    Attributes:
        settings: the full settings of each arm that `fit` trains, defaults included.
        differences: {arm: {setting: [value of the first arm, value of this arm]}}.
        order_sha256: identity of questions and order (`QuestionSchedule.sha256`).
        updates, rollouts: of one run.
        cap: tokens of a completion at most; None is the policy's own default.
        panel: questions of one validation.
    """

    settings: Mapping[str, Mapping[str, Any]]
    differences: Mapping[str, Mapping[str, list[Any]]]
    order_sha256: str
    updates: int
    rollouts: int
    cap: int | None
    panel: int


def make_plan(study: Study) -> Plan:
    """Settle the settings of every arm and check that they are matched. Runs and writes nothing.

    Raises UserError for a mistake in any arm's settings, for arms that are not matched, and for a plan beyond the
    study's budget.
    """
    trained = [arm for arm in study.arms if not arm.commands]
    if not trained:
        raise UserError(f"{study.path}: arms: at least one must be settings of `rlvr-pl fit`, not commands")
    settings = {arm.name: full_settings(study, arm) for arm in trained}
    reference = settings[trained[0].name]
    for arm in trained[1:]:
        check_matched(study, trained[0].name, reference, arm.name, settings[arm.name])
    data = _data(reference)
    questions = data.schedule.per_update if hasattr(data.schedule, "per_update") else 1
    rollouts = data.updates * questions * reference["model"]["group_size"]
    if not data.validation:
        raise UserError(f"{study.path}: panel: a study needs held-out questions to validate on")
    if study.budget.rollouts is not None and rollouts > study.budget.rollouts:
        raise UserError(f"{study.path}: a run has {rollouts:,} rollouts, over the budget of {study.budget.rollouts:,}")
    return Plan(
        settings=settings,
        differences={arm.name: differences(arm, reference, settings[arm.name]) for arm in trained},
        order_sha256=data.schedule.sha256,
        updates=data.updates,
        rollouts=rollouts,
        cap=reference["model"]["max_new_tokens"],
        panel=len(data.validation),
    )


def full_settings(study: Study, arm: Arm) -> dict[str, Any]:
    """The arm's settings with every default, as `rlvr-pl fit` would use them."""
    import yaml

    from rlvr_pl.quiet import quiet_lightning
    from rlvr_pl.settings import FitCLI

    with tempfile.TemporaryDirectory() as scratch, quiet_lightning():
        path = Path(scratch) / "arm.yaml"
        path.write_text(yaml.safe_dump(study.settings(arm)), encoding="utf-8")
        try:
            FitCLI(["--config", str(path)], _stop)
        except _Settled as settled:
            return yaml.safe_load(settled.text)
        except UserError as error:
            told = re.sub(rf"^{re.escape(str(path))}(:\d+)?: ", "", str(error))  # the scratch file is no one's
            raise UserError(f"{study.path}: arm {arm.name}: {told}") from None
    raise AssertionError("the settings were never settled")


def check_matched(study: Study, name: str, a: Mapping[str, Any], other: str, b: Mapping[str, Any]) -> None:
    """Refuse arms that differ in what makes them comparable."""
    if a["sampler"]["class_path"] != b["sampler"]["class_path"] and (mine := _engine(a)) != (its := _engine(b)):
        raise UserError(
            f"{study.path}: arms {name} and {other} sample with different engines, {mine} and {its}, whose records are "
            "never compared; give both one sampler"
        )
    one, two = flatten(a), flatten(b)
    for key in sorted(one.keys() | two.keys()):
        if f"{key}.".startswith(MATCHED) and one.get(key) != two.get(key):
            raise UserError(
                f"{study.path}: arms {name} and {other} are not matched: {key} is {one.get(key)!r} and {two.get(key)!r}"
            )


def differences(arm: Arm, reference: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, list[Any]]:
    """{setting: [reference, own]} of all that differs. Of a part with another class, only its class and what the arm
    itself says."""
    one, two, said = flatten(reference), flatten(own), flatten(arm.overrides)
    changed = {k.removesuffix("class_path") for k in two if k.endswith("class_path") and one.get(k) != two[k]}
    found = {}
    for key in sorted(one.keys() | two.keys(), key=lambda k: (k.replace("class_path", ""), k)):
        new_part = any(key.startswith(f"{part}init_args.") for part in changed)
        if key.startswith((*MATCHED, *ASIDE)) or one.get(key) == two.get(key) or (new_part and key not in said):
            continue
        found[key.replace(".init_args", "").removesuffix(".class_path")] = [
            _short(one.get(key)) if not new_part else None,
            _short(two.get(key)),
        ]
    return found


def difference_words(commands: Sequence[str], found: Mapping[str, Sequence[Any]]) -> str:
    """An arm's commands, or its differences from the first arm, in a line."""
    if commands:
        return "; ".join(f"rlvr-pl {command}" for command in commands)
    return ", ".join(f"{key} {old} → {new}" if old is not None else f"{key} {new}" for key, (old, new) in found.items())


class _Settled(Exception):
    """Ends `FitCLI` once the settings are known, before anything is built."""

    def __init__(self, text: str) -> None:
        self.text = text


def _stop(config: Any, text: str) -> Any:
    raise _Settled(text)


def _data(settings: Mapping[str, Any]) -> Any:
    return _built(settings["data"])


def _engine(settings: Mapping[str, Any]) -> str:
    return _built(settings["sampler"]).engine


def _built(spec: Mapping[str, Any]) -> Any:
    return named_class(spec["class_path"])(**spec.get("init_args", {}))


def _short(value: Any) -> Any:
    """A class path without its package, a whole part as its class."""
    if isinstance(value, str) and value.startswith("rlvr_pl."):
        return value.rpartition(".")[2]
    return value
