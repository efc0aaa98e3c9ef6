"""`RLVRModule`: the Lightning glue around one update. One `training_step` is one update.

Sampling happens inside `training_step`, because rollouts that a loader had prefetched would be stale. Every count that
matters keys on the module's own `updates_done`, never on Lightning's `global_step`, which stands still when an
all-uniform update skips its step.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

from rlvr_pl.allocator import keep_freed_memory
from rlvr_pl.core.weights import signed_mass
from rlvr_pl.cost import COSTS
from rlvr_pl.errors import UserError
from rlvr_pl.evaluation import evaluate_batch, header, summarize, write_items
from rlvr_pl.grading.base import Grader
from rlvr_pl.mistakes import accusing
from rlvr_pl.model_weights import cast_weights
from rlvr_pl.objectives.base import Objective, check_weights
from rlvr_pl.policy import Policy
from rlvr_pl.precision import BF16Precision
from rlvr_pl.ranks import Ranks
from rlvr_pl.records import RunFolder
from rlvr_pl.rollouts import branch_requests, branches, graded, group_requests, is_uniform, save_evidence
from rlvr_pl.sampling.base import Decoding, NonFiniteLogits, Sampler, SampleRequest
from rlvr_pl.sharded_strategy import ShardedStrategy
from rlvr_pl.types import (
    Branch,
    BranchRequest,
    Completion,
    Grade,
    GradeStatus,
    Question,
    Rollout,
    RolloutBatch,
    StopReason,
    build_batch,
)
from rlvr_pl.update import (
    NonFiniteError,
    StepResult,
    UniformUpdate,
    UpdateReport,
    count_uniform_groups,
    measured,
    update_once,
)

MAX_GROUP_SIZE = 10**5
T = TypeVar("T")


class RLVRModule(LightningModule):
    """Samples, grades, weighs and learns from one batch of questions an update.

    Args:
        policy: the policy to train.
        objective: gives every sampled token its signed weight.
        sampler: draws the rollouts.
        grader: turns a completion into a reward.
        group_size: rollouts of each question (G; the paper's 8).
        temperature: sampling temperature (the paper's 0.8).
        top_p: nucleus mass (the paper's 0.9).
        max_new_tokens: cap on a completion, EOS included; null takes the policy's own default.
        logprob_temperature: temperature of the log-probs that are learned from; 1.0 as in the supplied recipe (others
            use the sampling temperature).
        max_grad_norm: clip threshold of the global gradient norm (1.0 as supplied); null does not clip.
        uniform_update: what an update does when no rollout carries weight: "skip" changes nothing; "step" steps on a
            zero gradient as the supplied code does, so that momentum and decay still move the weights.
        require_box: whether a reward needs a boxed answer (the supplied recipe's rule); false grades the last number,
            or the whole text, where there is no box, as evaluation does.
        micro_batch_tokens: padded tokens that go through forward and backward at once. Memory and speed only.
        eval_batch_size: questions decoded together in validation; part of every item record.
        eval_max_new_tokens: cap in validation; null takes the policy's own default.
        seed: names the random numbers of sampling and of the objective.

    Example:
        >>> from rlvr_pl import GRPO, MathGrader, TorchSampler, load_policy
        >>> module = RLVRModule(load_policy("embedded:base"), GRPO(), TorchSampler(), MathGrader(), group_size=4)
        >>> module.decoding.max_new_tokens, module.updates_done
        (80, 0)
    """

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        sampler: Sampler,
        grader: Grader,
        *,
        group_size: int = 8,
        temperature: float = 0.8,
        top_p: float = 0.9,
        max_new_tokens: int | None = None,
        logprob_temperature: float = 1.0,
        max_grad_norm: float | None = 1.0,
        uniform_update: UniformUpdate = "skip",
        require_box: bool = True,
        micro_batch_tokens: int = 16384,
        eval_batch_size: int = 64,
        eval_max_new_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = policy.adapter is None  # its checkpoints leave out the weights that do not move
        for name, value in (
            ("group_size", group_size),
            ("eval_batch_size", eval_batch_size),
            ("max_new_tokens", max_new_tokens),
            ("eval_max_new_tokens", eval_max_new_tokens),
            ("micro_batch_tokens", micro_batch_tokens),
        ):
            if value is not None and value < 1:
                raise UserError(f"model.{name} is {value}: it must be at least 1")
        if group_size > MAX_GROUP_SIZE:
            raise UserError(f"model.group_size is {group_size}: it must be at most {MAX_GROUP_SIZE:,}")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise UserError(f"model.max_grad_norm is {max_grad_norm}: it must be above 0, or null for no clipping")
        if temperature <= 0 or not 0 < top_p <= 1:
            raise UserError(f"model.temperature {temperature} must be above 0, and model.top_p {top_p} in (0, 1]")
        if not logprob_temperature > 0:
            raise UserError(f"model.logprob_temperature is {logprob_temperature}: it must be above 0")
        self.policy = policy
        self.model = policy.model
        self.objective = objective
        self.sampler = sampler
        self.grader = grader
        self.group_size = group_size
        default_cap = policy.default_max_new_tokens
        self.decoding = Decoding(temperature, top_p, max_new_tokens or default_cap)
        self.eval_decoding = Decoding(0.0, 1.0, eval_max_new_tokens or default_cap)
        self.logprob_temperature = logprob_temperature
        self.max_grad_norm = max_grad_norm
        self.uniform_update: UniformUpdate = uniform_update
        self.require_box = require_box
        self.micro_batch_tokens = micro_batch_tokens
        self.eval_batch_size = eval_batch_size
        self.seed = seed
        self.updates_done = 0
        self.validation: dict[int, int] = {}
        self.stopped_by: str | None = None  # "damage", "time" or "signal", set by the callback that ends the run early
        self.cost = dict.fromkeys(COSTS, 0)
        self._start: Policy | None = None
        self._panel: list[Sequence[Question]] = []
        self._synced = False
        self._said: set[str] = set()

    # ---- set-up ----------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        keep_freed_memory()
        if "start_logprobs" in self.objective.needs:
            _ = self.start_policy

    def configure_model(self) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, ShardedStrategy):
            strategy.shard(self)
        elif isinstance(strategy, ModelParallelStrategy):
            raise UserError("trainer.strategy ModelParallelStrategy: give rlvr_pl.sharded_strategy.ShardedStrategy()")

    @property
    def start_policy(self) -> Policy:
        """A frozen copy of the policy as it was before update 1; first asked for in `setup`, before any checkpoint is
        restored."""
        if self._start is None:
            if self.updates_done:
                raise RuntimeError("the start policy must be asked for before training starts")
            self._start = self.policy.copy_frozen()
        cast_weights(self._start.model, self.policy.head.dtype)  # copied before the strategy converted and moved it
        cast("Any", self._start.model).to(self.device)
        return self._start

    def configure_optimizers(self) -> Any:
        """AdamW of the supplied recipe; the command line's ``--optimizer`` and ``--lr_scheduler`` take its place.

        Fused for FP32 weights: one pass over them, without temporaries. On BF16 weights it would round less often than
        the supplied recipe does.
        """
        parameters = list(self.model.parameters())
        wide = all(p.dtype == torch.float32 for p in parameters)
        return torch.optim.AdamW(parameters, lr=1e-5, weight_decay=0.01, fused=wide or None)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rlvr"] = {
            "updates_done": self.updates_done,
            "validation": self.validation,
            "cost": self.cost,
            "objective": self.objective.state_dict(),
        }
        if self.policy.adapter is not None:
            still = {name for name, weight in self.named_parameters() if not weight.requires_grad}
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: tensor for name, tensor in state.items() if name not in still}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["rlvr"]
        self.updates_done = state["updates_done"]
        self.validation = dict(state["validation"])
        self.cost = dict(state["cost"])
        self.objective.load_state_dict(state["objective"])

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Batches are questions, which live on no device."""
        return batch

    # ---- one update ------------------------------------------------------------------------------------------------

    def training_step(self, batch: Sequence[Any], batch_idx: int) -> dict[str, UpdateReport]:
        clock = StageClock(self._profile)
        number = self.updates_done + 1
        before = dict(self.cost)
        questions, rollouts, group_size = self._rollouts(batch, number, clock)
        try:
            with clock("weigh"):
                seed, cap = self.seed, self.decoding.max_new_tokens
                data = build_batch(rollouts, group_size, update=number, seed=seed, cap=cap)
                data = self._prepare(data, {q.uid: q for q in questions})
                data = data.replace(extras=self.objective.prepare(data))
                weights = self.objective.token_weights(data)
                check_weights(self.objective, weights, data)
            with clock("learn"):
                steps = [self._step(data, weights) for _ in range(self.objective.inner_epochs)]
        except NonFiniteError as error:
            raise self._stopped(error, number, [rollouts[i] for i in error.rows] or rollouts) from error
        self.updates_done = number
        self.cost["trained_tokens"] += sum(s.trained_tokens for s in steps)
        self.cost["optimizer_steps"] += sum(s.stepped for s in steps)
        report = UpdateReport(
            number=number,
            questions=questions,
            rollouts=rollouts,
            batch=data,
            weights=weights,
            steps=steps,
            uniform_groups=count_uniform_groups(data),
            seconds=clock.seconds,
            cost={name: self.cost[name] - before[name] for name in COSTS},
            metrics={},
        )
        report.metrics = {**self._figures(report), **self.objective.metrics(data, weights)}
        self.log_dict(report.metrics, on_step=True, on_epoch=False, batch_size=len(rollouts))
        self._schedule()
        return {"update": report}

    def _rollouts(
        self, batch: Sequence[Any], number: int, clock: StageClock
    ) -> tuple[Sequence[Question], list[Rollout], int]:
        """Questions, rollouts and group size of an update. An objective that does not sample is given stored solutions,
        each a group of its own."""
        if not self.objective.samples:
            return [s.question for s in batch], [s.rollout(self.policy, i) for i, s in enumerate(batch)], 1
        questions, rollouts = self._sampled(list(batch), number, clock)
        return questions, rollouts, self.group_size

    def _sampled(
        self, questions: list[Question], number: int, clock: StageClock
    ) -> tuple[list[Question], list[Rollout]]:
        """Sample and grade a group for every question; where the objective resamples (DAPO, arXiv:2503.14476, section
        3.2), groups whose rewards are all equal give way to questions from behind the planned ones."""
        rollouts = self._ask(questions, number, clock)
        size, rounds = self.group_size, self.objective.resample_rounds
        for attempt in range(rounds):
            stale = [k for k in range(len(questions)) if is_uniform(rollouts[k * size : (k + 1) * size])]
            if not stale:
                break
            data = cast("Any", self.trainer).datamodule
            spare = data.schedule.batch(data.updates + (number - 1) * rounds + attempt + 1)[: len(stale)]
            fresh = self._ask(spare, number, clock, attempt + 1)
            for i, k in enumerate(stale):
                questions[k] = spare[i]
                rollouts[k * size : (k + 1) * size] = fresh[i * size : (i + 1) * size]
        return questions, rollouts

    @property
    def ranks(self) -> Ranks:
        """The processes of the run, which share its rollouts."""
        return Ranks.of(self.trainer)

    @property
    def parts(self) -> list[Any]:
        """What a user may have written of it: objective, sampler, grader and the graders within."""
        return [self.objective, self.sampler, self.grader, *getattr(self.grader, "graders", ())]

    def _together(self, compute: Callable[[], Sequence[T]]) -> list[T]:
        """What `compute` gives on every rank; an error in a class of the user's is named on all of them."""

        def named() -> Sequence[T]:
            with accusing(self.parts):
                return compute()

        return self.ranks.together(named)

    def _ask(self, questions: Sequence[Question], number: int, clock: StageClock, attempt: int = 0) -> list[Rollout]:
        """A graded group for every question; each rank samples and grades its share of the rollouts."""
        with clock("sample"):
            self._sync()
        requests = group_requests(
            self.policy, questions, self.group_size, seed=self.seed, update=number, attempt=attempt
        )
        asked = [question for question in questions for _ in range(self.group_size)]
        mine = self.ranks.part(len(requests))
        rollouts = self._together(lambda: self._answered(asked[mine], requests[mine], mine.start, number, clock))
        self.cost["prefill_tokens"] += sum(len(r.prompt_ids) for r in requests[:: self.group_size])
        self.cost["sampled_tokens"] += sum(len(r.completion.token_ids) for r in rollouts)
        self.cost["graded"] += len(rollouts)
        return rollouts

    def _sync(self) -> None:
        """Give the sampler the current weights, if they have changed since it last got them."""
        if not self._synced:
            self.sampler.sync(self.policy)
            self._synced = True

    def _answered(
        self,
        questions: Sequence[Question],
        requests: Sequence[SampleRequest],
        first: int,
        number: int,
        clock: StageClock,
    ) -> list[Rollout]:
        """Rollouts `first`, `first` + 1, ... of the update, sampled and graded."""
        with clock("sample"):
            try:
                completions = self.sampler.generate(requests, self.decoding)
            except NonFiniteLogits as error:
                i, drawn = error.request, Completion(error.token_ids, StopReason.LENGTH)
                text, grade = self.policy.decode(error.token_ids), Grade(GradeStatus.NO_ANSWER, math.nan)
                sample = (first + i) % self.group_size
                rollout = Rollout(questions[i].uid, sample, requests[i].prompt_ids, drawn, text, grade)
                raise self._stopped(error, number, [rollout]) from error
        with clock("grade"):
            answers = graded(self.policy, self.grader, questions, completions, require_box=self.require_box)
        return [
            Rollout(q.uid, i % self.group_size, r.prompt_ids, c, text, grade)
            for i, (q, r, c, (text, grade)) in enumerate(zip(questions, requests, completions, answers), first)
        ]

    def _prepare(self, batch: RolloutBatch, questions: dict[str, Question]) -> RolloutBatch:
        """Add what the objective needs: log-probs, entropies, continuations."""
        needs = self.objective.needs
        unknown = needs - {"old_logprobs", "start_logprobs", "sampling_logprobs", "entropy", "sampling_entropy"}
        if unknown:
            raise UserError(f"{type(self.objective).__name__}.needs names {sorted(unknown)}, which no update computes")
        if "sampling_logprobs" in needs and batch.sampling_logprobs is None:
            raise UserError(f"{type(self.objective).__name__} needs sampling log-probs; this sampler returns none")
        measure = partial(
            measured, batch=batch, max_tokens=self.micro_batch_tokens, temperature=self.logprob_temperature,
            ranks=self.ranks,
        )  # fmt: skip
        found: dict[str, Any] = {}
        if needs & {"old_logprobs", "entropy"}:
            old, found["entropy"] = measure(self.policy, with_entropy="entropy" in needs)
            found["old_logprobs"] = old if "old_logprobs" in needs else None
        if "start_logprobs" in needs:
            found["start_logprobs"], _ = measure(self.start_policy)
        if "sampling_entropy" in needs:
            heat = self.decoding.temperature
            _, found["sampling_entropy"] = measure(self.policy, temperature=heat, with_entropy=True)
        batch = batch.replace(**found)
        wishes = self.objective.requests(batch)
        return batch.replace(branches=self._branch(batch, wishes, questions)) if wishes else batch

    def _branch(
        self, batch: RolloutBatch, wishes: Sequence[BranchRequest], questions: dict[str, Question]
    ) -> tuple[Branch, ...]:
        """Sample and grade the continuations that the objective asked for, with the run's decoding and total cap."""
        requests = branch_requests(batch, wishes, seed=self.seed, cap=self.decoding.max_new_tokens)
        rows = [wish.row for wish in wishes for _ in range(wish.count)]
        heads = [r.prompt_ids[len(batch.prompt_ids[row]) :] for r, row in zip(requests, rows)]
        owners = [questions[batch.uids[row]] for row in rows]
        mine = self.ranks.part(len(requests))

        def continued() -> list[tuple[Completion, Grade]]:
            drawn = self.sampler.generate(requests[mine], self.decoding)
            box = self.require_box
            answers = graded(self.policy, self.grader, owners[mine], drawn, require_box=box, heads=heads[mine])
            return [(completion, grade) for completion, (_, grade) in zip(drawn, answers)]

        found = self._together(continued)
        self.cost["sampled_tokens"] += sum(len(c.token_ids) for c, _ in found)
        self.cost["prefill_tokens"] += sum(len(batch.prompt_ids[w.row]) + w.position for w in wishes)
        self.cost["graded"] += len(found)
        return branches(wishes, found)

    def _step(self, batch: RolloutBatch, weights: Tensor) -> StepResult:
        optimizer = cast("Any", self.optimizers())
        plugin = self.trainer.precision_plugin
        pairs = plugin.trained_parameters(optimizer.optimizer) if isinstance(plugin, BF16Precision) else None
        result = update_once(
            self.policy,
            self.objective,
            batch,
            weights,
            optimizer.optimizer,
            pairs=pairs,
            step=optimizer.step,
            max_tokens=self.micro_batch_tokens,
            temperature=self.logprob_temperature,
            max_grad_norm=self.max_grad_norm,
            uniform_update=self.uniform_update,
            ranks=self.ranks,
            shards=strategy.shards if isinstance(strategy := self.trainer.strategy, ShardedStrategy) else None,
            span=self._profile,
        )
        self._synced = self._synced and not result.stepped
        still = result.grad_norm > 0 and result.changed_share == 0
        if still:
            rate = optimizer.param_groups[0]["lr"]
            self._say_once(
                "still",
                f"a step at learning rate {rate:g} changed no weight: every change rounded away; raise the rate or set "
                "precision.master_weights",
            )
        if bool(batch.rewards.isnan().all()):
            self._say_once(
                "ungraded",
                f"update {self.updates_done + 1}: no rollout was graded (every reward is null), so there was nothing "
                "to learn from; look at the grader",
            )
        return result

    def _say_once(self, what: str, text: str) -> None:
        if what not in self._said and self.trainer.is_global_zero:
            print(f"rlvr-pl: {text} (said once)", file=sys.stderr)
        self._said.add(what)

    def _stopped(self, error: Exception, number: int, rollouts: Sequence[Rollout]) -> NonFiniteError:
        """Save the rollouts that made an update's numbers infinite or NaN, and return the error that says where."""
        path = RunFolder.of(self.trainer).path / "nonfinite" / f"update-{number:06d}.jsonl"
        save_evidence(path, rollouts)
        return NonFiniteError(
            f"update {number}: {error}; the run ends with update {number - 1} as its last good one; what went into "
            f"update {number} is in {path}"
        )

    def _schedule(self) -> None:
        """Learning-rate schedulers count updates, skipped ones included, so that they end with the planned length."""
        schedulers = self.lr_schedulers()
        for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
            if scheduler is not None:
                cast("Any", scheduler).step()

    def _figures(self, report: UpdateReport) -> dict[str, float]:
        batch, last = report.batch, report.steps[-1]
        lengths = batch.lengths.double()
        plus, minus = signed_mass(report.weights)
        optimizer = cast("Any", self.optimizers())
        seconds = sum(report.seconds.values())
        tokens = report.cost["sampled_tokens" if self.objective.samples else "trained_tokens"]
        status = Counter(r.grade.status for r in report.rollouts)
        return {
            "reward": float(batch.rewards.nanmean()),
            "accuracy": status[GradeStatus.CORRECT] / len(batch),
            "length": float(lengths.mean()),
            "truncation": float(batch.truncated.double().mean()),
            "uniform_groups": report.uniform_groups / (len(batch) // batch.group_size),
            "loss": last.loss,
            "grad_norm": last.grad_norm,
            "clipped": float(last.clipped),
            "stepped": float(report.stepped),
            "changed_share": last.changed_share,
            "mass_plus": plus,
            "mass_minus": minus,
            "lr": optimizer.param_groups[0]["lr"],
            "tokens_per_s": tokens / max(seconds, 1e-9),
            **{f"seconds/{name}": value for name, value in report.seconds.items()},
        }

    def _profile(self, name: str) -> Any:
        return cast("Any", self.trainer).profiler.profile(f"rlvr.{name}")

    # ---- validation ------------------------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        self._sync()
        self._panel = []

    def validation_step(self, batch: Sequence[Question], batch_idx: int) -> None:
        self._panel.append(batch)

    def on_validation_epoch_end(self) -> None:
        items = self._together(self._answer_panel)
        summary = summarize(items)
        self.validation[self.updates_done] = summary["correct"]
        self.log_dict({f"val/{name}": float(value) for name, value in summary.items()}, batch_size=summary["n"])
        sha256 = self.policy.weights_sha256()
        if not self.trainer.is_global_zero:
            return
        head = header(
            sampler=self.sampler,
            grader=self.grader,
            batch_size=self.eval_batch_size,
            decoding=self.eval_decoding,
            checkpoint=f"{self.policy.name} + {self.updates_done} updates",
            sha256=sha256,
        )
        folder = RunFolder.of(self.trainer)
        write_items(folder.items / f"val-{self.updates_done:06d}.jsonl", head, items)

    def _answer_panel(self) -> list[dict[str, Any]]:
        """Item records of this rank's share of the panel, in whole batches: outcomes hang on what is decoded
        together."""
        mine = self._panel[self.ranks.part(len(self._panel))]
        answer = partial(evaluate_batch, self.policy, self.sampler, self.grader, decoding=self.eval_decoding)
        return [item for batch in mine for item in answer(batch)]


class StageClock:
    """Wall seconds of the stages of one update, each also a profiler section."""

    def __init__(self, profile: Any) -> None:
        self.seconds: dict[str, float] = {}
        self._profile = profile

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        with self._profile(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
