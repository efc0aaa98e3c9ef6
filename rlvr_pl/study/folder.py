"""The folder of a study: what was fixed before update 1, the runs of the arms, and what came of them."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from rlvr_pl.core.collapse import CollapseCriterion
from rlvr_pl.errors import UserError
from rlvr_pl.records import RunFolder, atomic_write_text, canonical_json
from rlvr_pl.study import arm_settings
from rlvr_pl.study.expect import Expectation, Judgement, read_expectation
from rlvr_pl.study.outcome import Outcome, outcome, summarize
from rlvr_pl.study.plan import START, Arm, Study, merge
from rlvr_pl.study.resolve import Plan
from rlvr_pl.study.runner import ENTRY, Job

FROZEN = "study.json"
ITEMS = "start.jsonl"
REMEDY = "Choose another --out, or pass --overwrite to begin again"
GRADERS = {"MathGrader": "math", "ExactGrader": "exact", "SuppliedGrader": "supplied"}


class StudyFolder:
    """``study.yaml study.json start.jsonl ARM/seed-N/ ARM/seed-N.yaml ARM/seed-N.log summary.json report.html`` under
    one path. `study.json` says what was fixed beforehand, and what was planned."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = RunFolder(path)

    @cached_property
    def content(self) -> dict[str, Any]:
        """`study.json`. Raises UserError where there is none, or where what was fixed was changed by hand."""
        content = self._files.read_json(FROZEN)
        if content is None:
            raise UserError(f"{self.path}: no study there ({FROZEN} is missing)")
        recorded = [arm for arm in content["arms"].values() if "sha256" in arm]
        if _sha256(content["frozen"]) != content["sha256"] or not all(map(arm_settings.intact, recorded)):
            raise UserError(f"{self.path / FROZEN}: what was fixed does not have the hash written beside it")
        return content

    @property
    def begun(self) -> bool:
        """Whether any run has begun."""
        return bool(arm_settings.begun_runs(self.path))

    @property
    def criterion(self) -> CollapseCriterion:
        """The rule that was fixed for all arms."""
        return CollapseCriterion(**self.content["frozen"]["criterion"])

    @property
    def arms(self) -> list[str]:
        """Names of the arms, in the order of the study file."""
        return list(self.content["arms"])

    @property
    def expectations(self) -> list[Expectation]:
        """What was expected beforehand."""
        where = f"{self.path / FROZEN}: expectations"
        return [read_expectation(row, self.arms, where) for row in self.content["frozen"]["expectations"]]

    @property
    def start_items(self) -> Path:
        """Item records of the start."""
        return self.path / ITEMS

    def run(self, arm: str, seed: int) -> Path:
        """The run folder of an arm and seed."""
        return self.path / arm / f"seed-{seed}"

    # ---- before update 1 -------------------------------------------------------------------------------------------

    def evaluate_start(self, study: Study, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the panel with the start, as `rlvr-pl evaluate` does, unless a run has begun after that was done; the
        header of the items with the number of correct ones."""
        if not (self.start_items.exists() and self.begun):
            command = evaluation_command(study, settings, self.start_items)
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
            done = subprocess.run(
                [sys.executable, "-c", ENTRY, *command], env=environment, stdout=subprocess.PIPE, check=False
            )
            if done.returncode:
                raise UserError(f"{study.path}: the start could not be evaluated (see above)")
        rows = [json.loads(line) for line in self.start_items.read_text(encoding="utf-8").splitlines()]
        return {**rows[0], "correct": sum(row["correct"] for row in rows[1:]), "n": len(rows) - 1}

    def check(self, study: Study, plan: Plan, start: Mapping[str, Any] | None = None) -> None:
        """Refuse what contradicts the runs that have begun here: a change in what was fixed or in the settings of an
        arm with runs, and an arm or a seed with runs that is no longer named. Writes nothing.

        `start` is what `evaluate_start` found; without it, the start's result counts as unchanged.
        """
        runs = arm_settings.begun_runs(self.path)
        if not runs:
            return
        before = self.content if self._files.read_json(FROZEN) is not None else {"arms": {}}
        if "frozen" in before:
            old = before["frozen"]
            as_before = {"checkpoint_sha256": old["start_sha256"], "correct": old["start_correct"], "n": old["n"]}
            new = _frozen(study, plan, start or as_before)
            changed = [k for k in new if old.get(k) != new[k]]
            if changed:
                raise UserError(
                    f"{self.path}: {', '.join(changed)}: changed since this study began; what was fixed before update "
                    f"1 stays fixed. {REMEDY}"
                )
        named = {arm.name: arm for arm in study.arms}
        for name, seed in runs:
            if name not in named or seed not in study.seeds:
                what = f"seed {seed} of arm {name}" if name in named else f"arm {name}"
                raise UserError(
                    f"{self.path}: {what} has a run, and {study.path} no longer names it; what was run stays in the "
                    f"study. Put it back. {REMEDY}"
                )
            arm = named[name]
            self._check_arm(
                arm, plan.settings.get(name), study.settings(arm), before["arms"].get(name), self.run(name, seed)
            )

    def _check_arm(
        self,
        arm: Arm,
        settings: Mapping[str, Any] | None,
        said: Mapping[str, Any],
        before: Mapping[str, Any] | None,
        run: Path,
    ) -> None:
        """Refuse other settings than the study wrote down for this arm, and than its run did."""
        now = arm_settings.record(arm, settings)
        found = arm_settings.changed_commands(before["commands"], now["commands"]) if before else []
        if now["settings"] is not None:
            for old in ((before or {}).get("settings"), arm_settings.of_run(run)):
                found = found or ([] if old is None else arm_settings.changed(old, now["settings"], said))
        if found:
            raise UserError(
                f"{self.path}: arm {arm.name} has a run ({run.name}) under other settings: "
                f"{arm_settings.words(found)}; an arm with runs keeps its settings. Give the new ones another name. "
                f"{REMEDY}"
            )

    def freeze(self, study: Study, plan: Plan, start: Mapping[str, Any]) -> None:
        """Write down what is fixed, with its hash, and every arm's settings with theirs. Once a run has begun, what
        `check` refuses is not changed."""
        self.check(study, plan, start)
        frozen = _frozen(study, plan, start)
        before = self._files.read_json(FROZEN)
        at = time.strftime("%Y-%m-%dT%H:%M:%S")
        if before is not None and before["frozen"] == frozen:
            at = before["frozen_at"]
        content = {
            "name": study.name,
            "about": study.about,
            "file": str(study.path),
            "frozen_at": at,
            "sha256": _sha256(frozen),
            "frozen": frozen,
            "seeds": list(study.seeds),
            "arms": {
                arm.name: {
                    **arm_settings.record(arm, plan.settings.get(arm.name)),
                    "differences": plan.differences.get(arm.name, {}),
                }
                for arm in study.arms
            },
            "plan": {"updates": plan.updates, "rollouts": plan.rollouts, "cap": plan.cap},
            "budget": asdict(study.budget),
        }
        self._files.write_json(FROZEN, content)
        atomic_write_text(self.path / "study.yaml", study.text)
        self.__dict__.pop("content", None)

    # ---- the runs --------------------------------------------------------------------------------------------------

    def jobs(self, study: Study, plan: Plan, criterion: CollapseCriterion | None) -> list[Job]:
        """The runs, seed by seed. With a criterion, their settings are written beside their folders."""
        jobs = []
        for seed in study.seeds:
            for arm in study.arms:
                folder = self.run(arm.name, seed)
                config = folder.with_name(f"{folder.name}.yaml")
                if arm.commands:
                    words = {"start": study.start, "seed": str(seed), "run": str(folder)}
                    commands = [[_filled(word, words) for word in shlex.split(line)] for line in arm.commands]
                else:
                    commands = [["fit", "--config", str(config), "--run", str(folder)]]
                    if criterion is not None:
                        _write_config(config, run_settings(study.settings(arm), seed, criterion))
                jobs.append(Job(arm.name, seed, RunFolder(folder), commands, 0 if arm.commands else plan.updates))
        return jobs

    # ---- what came of it -------------------------------------------------------------------------------------------

    @cached_property
    def outcomes(self) -> dict[str, list[Outcome]]:
        """The finished runs of each arm, by seed, and the start under its own name. Raises UserError for a run that
        began from other weights, saw another order or was trained under other settings than the study's."""
        frozen, criterion = self.content["frozen"], self.criterion
        found: dict[str, list[Outcome]] = {START: [Outcome(START, 0, None, self.start_items, criterion)]}
        for arm in self.arms:
            runs = [outcome(arm, seed, self.run(arm, seed), criterion) for seed in self.content["seeds"]]
            found[arm] = [run for run in runs if run is not None]
            if not self.content["arms"][arm]["commands"]:
                for run in found[arm]:
                    _check_hashes(run, frozen)
                    _check_settings(run, self.content["arms"][arm].get("settings"))
        return found

    def judgements(self) -> list[tuple[Expectation, Judgement]]:
        """Each expectation and whether it held."""
        seeds = len(self.content["seeds"])
        return [(e, e.judge(self.outcomes, seeds)) for e in self.expectations]

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace ``summary.json``."""
        self._files.write_json("summary.json", summary)

    def summary(self) -> dict[str, Any]:
        """The outcome of every finished run, the expectations, and what was fixed beforehand."""
        frozen = self.content["frozen"]
        runs = {arm: found for arm, found in self.outcomes.items() if arm != START}
        return {
            "study": self.content["name"],
            "arms": summarize(runs),
            "start_correct": frozen["start_correct"],
            "n": frozen["n"],
            "criterion": {**frozen["criterion"], "sha256": frozen["criterion_sha256"]},
            "expectations": [
                {"expected": str(e), **e.row, "held": j.held, "found": j.detail} for e, j in self.judgements()
            ],
            "unfinished": [
                {"arm": arm, "seed": seed}
                for arm, found in runs.items()
                for seed in self.content["seeds"]
                if seed not in [run.seed for run in found]
            ],
        }


def evaluation_command(study: Study, settings: Mapping[str, Any], out: Path) -> list[str]:
    """The words of `rlvr-pl evaluate` that answer the study's panel as validation inside `fit` does."""
    model, data = settings["model"], settings["data"]["init_args"]
    grader = settings["grader"]["class_path"].rpartition(".")[2]
    if grader not in GRADERS:
        raise UserError(f"{study.path}: grader {grader}: a study evaluates its start with one of {', '.join(GRADERS)}")
    words = [
        "evaluate",
        study.start,
        "--questions",
        str(data["validation"]),
        "--out",
        str(out),
        "--overwrite",
        "--json",
    ]
    words += ["--batch-size", str(model["eval_batch_size"]), "--grader", GRADERS[grader]]
    if model["eval_max_new_tokens"] is not None:
        words += ["--max-new-tokens", str(model["eval_max_new_tokens"])]
    if settings["sampler"]["class_path"].endswith(".VLLMSampler"):
        words += ["--sampler", "vllm"]
    return words + (["--untie-embeddings"] if settings["policy"]["untie_embeddings"] else [])


def run_settings(settings: Mapping[str, Any], seed: int, criterion: CollapseCriterion) -> dict[str, Any]:
    """The settings of one run: the arm's, its seed, and the study's rule, which warns and lets the run go on, so that
    every arm has the planned exposure."""
    callbacks = settings.get("trainer", {}).get("callbacks") or []
    rule = {"class_path": "DamageStop", "init_args": {"action": "warn", "criterion": asdict(criterion)}}
    return merge(settings, {"seed": seed, "trainer": {"callbacks": [*callbacks, rule]}})


def _write_config(path: Path, settings: Mapping[str, Any]) -> None:
    import yaml

    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, yaml.safe_dump(settings, sort_keys=False))


def _check_hashes(run: Outcome, frozen: Mapping[str, Any]) -> None:
    assert run.folder is not None
    state = RunFolder(run.folder).read_json("run.json")
    for name in ("start_sha256", "order_sha256"):
        if state[name] != frozen[name]:
            raise UserError(
                f"{run.folder}: not matched: its {name} is {state[name][:12]}, the study's is {frozen[name][:12]}"
            )


def _check_settings(run: Outcome, settings: Mapping[str, Any] | None) -> None:
    assert run.folder is not None
    own = arm_settings.of_run(run.folder)
    if settings is None or own is None:
        return
    for name, its, said in arm_settings.changed(own, settings)[:1]:
        raise UserError(f"{run.folder}: not matched: its {name} is {its}, the study's is {said}")


def _frozen(study: Study, plan: Plan, start: Mapping[str, Any]) -> dict[str, Any]:
    """What a study fixes before update 1."""
    criterion = study.rule.criterion(start["correct"])
    return {
        "start": study.start,
        "start_sha256": start["checkpoint_sha256"],
        "start_correct": start["correct"],
        "n": start["n"],
        "order_sha256": plan.order_sha256,
        "criterion": asdict(criterion),
        "criterion_sha256": criterion.sha256,
        "expectations": [dict(e.row) for e in study.expectations],
    }


def _filled(word: str, words: Mapping[str, str]) -> str:
    for name, value in words.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def _sha256(frozen: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(frozen).encode()).hexdigest()
