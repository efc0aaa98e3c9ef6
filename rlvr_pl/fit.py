"""`rlvr-pl fit`: the life of a run folder around `Trainer.fit`."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from rlvr_pl import __version__
from rlvr_pl.callbacks.base import UpdateCallback
from rlvr_pl.callbacks.checkpoint import check_content, latest_checkpoint
from rlvr_pl.data.module import RunData
from rlvr_pl.errors import RunFailure, UserError
from rlvr_pl.launch import agreed, rank_lost, said_once
from rlvr_pl.mistakes import accuse, accuse_library, accusing
from rlvr_pl.module import RLVRModule
from rlvr_pl.objectives.base import check_weights
from rlvr_pl.quiet import quiet_lightning
from rlvr_pl.records import RunFolder, atomic_write_text, sha256_file
from rlvr_pl.settings import FitCLI
from rlvr_pl.types import Completion, Grade, GradeStatus, Rollout, StopReason, build_batch

# What a resumed run may be told: on how many devices it goes on, and where the servers of its sampler are by now.
WHERE = (
    "--trainer.devices",
    "--trainer.num_nodes",
    "--trainer.strategy",
    "--trainer.accelerator",
    "--sampler.url",
    "--sampler.folder",
)
PACKAGES = ("torch", "lightning", "transformers", "math-verify", "numpy")


def fit(argv: Sequence[str]) -> int:
    """Run ``rlvr-pl fit`` with these arguments and return the exit status. A user's mistake raises `UserError`."""
    with quiet_lightning(), said_once():
        words = _expand_resume(list(argv))
        notes: list[str] = []  # said once no mistake was found
        cli = FitCLI(
            words, lambda config, text: agreed(lambda: settle(config, text, default_run(words, config), notes))
        )
        module, data = cli.model, cli.datamodule
        run = Run(cli.folder, cli.text, module, data, ["rlvr-pl", "fit", *argv])
        check_objective(module, data)
        check_data(module, data)
        if cli.checkpoint is not None:
            shapes = {name: weight.shape for name, weight in module.state_dict().items()}
            check_history(cli.folder, check_content(cli.checkpoint, shapes), cli.config["rollout_stats"]["window"])
        first = cli.trainer.is_global_zero
        begun = first and not cli.config["overwrite"] and has_begun(cli.folder, cli.checkpoint)
        check_callbacks(cli.trainer, module, begun)
        if first:
            for note in (*notes, *cli.notes):
                print(f"rlvr-pl: {note}", file=sys.stderr)
            run.open(fresh=cli.checkpoint is None, replace=cli.config["overwrite"])
        try:
            cli.trainer.fit(module, datamodule=data, ckpt_path=cli.checkpoint, weights_only=True)
            if first:
                run.close()
                print(run.outcome(), file=sys.stderr)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            explain(error, run, cli)
            raise
        finally:
            if first:
                run.release()
            module.sampler.close()
            module.grader.close()
            run.folder.unlock()
    return 0


def explain(error: BaseException, run: Run, cli: FitCLI) -> None:
    """Raise the `UserError` or `RunFailure` that says in a line what ended a run; nothing where the fault is ours."""
    module, path = run.module, run.folder.path
    if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
        error = error.__context__  # which Lightning puts a plain sys.exit() in the place of
    if isinstance(error, MisconfigurationException):  # what Lightning refuses when it begins
        raise UserError(" ".join(str(error).split())) from error
    if isinstance(error, OSError):
        raise RunFailure(
            f"{error.filename or path}: {error.strerror or error}; the run ended after update {module.updates_done}; "
            f"once this is mended, continue it with --resume {path}"
        ) from error
    if rank_lost(error):
        raise RunFailure(
            "another process of this run ended (killed, or its machine lost); the run ended after update "
            f"{module.updates_done}; continue it with --resume {path}"
        ) from error
    accuse(error, [*module.parts, run.data, *cast("Any", cli.trainer).callbacks])
    accuse_library(error, cli.trainer.loggers, cli.checkpoint)


def settle(config: Any, text: str, default: Path, notes: list[str]) -> tuple[RunFolder, Path | None]:
    """The run folder and the checkpoint it continues from, if any; what is to be said of it goes to `notes`. Changes
    nothing on disk, but that it locks a run to be continued and sets damaged checkpoints of it aside."""
    folder = RunFolder(config.resume or config.run or default)
    if folder.path.exists() and not folder.path.is_dir():
        raise UserError(f"--run {folder.path}: a file; name a folder")
    state = folder.read_json("run.json")
    finished = state is not None and state.get("state") == "finished"
    if config.resume is not None:
        if state is None:
            raise UserError(f"--resume {folder.path}: no run to continue here (no run.json)")
        check_config(folder, state)
        if finished:
            raise UserError(f"--resume {folder.path}: finished after {state.get('updates')} updates; begin a new run")
        return folder, _continued(folder, notes)
    strangers = folder.strangers() if folder.path.exists() else []
    if not strangers and (not folder.path.exists() or all(p.name.startswith(".") for p in folder.path.iterdir())):
        return folder, None
    if config.overwrite:
        if state is None:
            raise UserError(f"--overwrite: {folder.path} is not a run folder (no run.json); it will not be removed")
        if strangers:
            raise UserError(
                f"--overwrite: {folder.path} holds what is not this run's ({', '.join(strangers)}); move it"
            )
        return folder, None
    config_file = folder.path / "config.yaml"
    same = config_file.is_file() and config_file.read_bytes() == text.encode()
    if same and not finished:
        notes.append(f"{folder.path} holds this run unfinished; continuing it")
        return folder, _continued(folder, notes)
    if state is None and not config_file.exists():
        raise UserError(f"--run {folder.path}: holds files that are no run's; choose another folder")
    what = "this run, finished" if same else "another run"
    raise UserError(f"{folder.path} holds {what}; choose another --run, or pass --overwrite to replace it")


def check_config(folder: RunFolder, state: Mapping[str, Any]) -> None:
    """UserError when the settings of a run are not those with which it began: its records would be of two runs."""
    path = folder.path / "config.yaml"
    begun = state.get("config_sha256")
    if begun is not None and path.is_file() and sha256_file(path) != begun:
        raise UserError(
            f"--resume {folder.path}: {path} was changed since the run began (sha256 {begun[:12]}); undo that, or "
            f"begin another run with it: --config {path} --run NEW"
        )


def _continued(folder: RunFolder, notes: list[str]) -> Path | None:
    folder.lock()
    checkpoint = latest_checkpoint(folder.checkpoints)
    if checkpoint is None and folder.recorded():
        notes.append(f"{folder.path}: no checkpoint to go on from; begins again, its records of updates removed")
    return checkpoint


def default_run(argv: Sequence[str], config: Any) -> Path:
    """``runs/<config file>-<objective>-<time>``, a name that nothing has yet."""
    files = [Path(v).stem for k, v in pairwise(argv) if k in ("--config", "-c")]
    objective = config.objective.class_path.rsplit(".", 1)[-1]
    base = "-".join([*files[:1], objective, time.strftime("%Y%m%d-%H%M%S")])
    path, copy = Path("runs") / base, 1
    while path.exists():
        copy += 1
        path = Path("runs") / f"{base}-{copy}"
    return path


class Run:
    """The life of a run folder: opened before the first update, closed after the last."""

    def __init__(self, folder: RunFolder, text: str, module: RLVRModule, data: RunData, command: Sequence[str]) -> None:
        self.folder = folder
        self.text = text
        self.module = module
        self.data = data
        self.command = list(command)
        self.state: str | None = None  # as run.json has it; None before it is opened

    def open(self, *, fresh: bool, replace: bool) -> None:
        """Make the folder (or take over the unfinished one) and say in run.json that it runs."""
        path = self.folder.path
        try:
            self._remove(replace and path.exists())
            Path(os.path.realpath(path)).mkdir(parents=True, exist_ok=True)
            self.folder.lock()
            self.folder.sweep()
            if fresh:
                # an unfinished run without a checkpoint begins again, and its rows with it
                for record in self.folder.recorded():
                    record.unlink()
                atomic_write_text(path / "config.yaml", self.text)
                self.data.record(self.folder)
        except OSError as error:
            raise UserError(
                f"--run {path}: cannot write there ({error.strerror}); mend that or name another folder"
            ) from None
        self._write("running")

    def _remove(self, there: bool) -> None:
        """Remove the old run, if it is there: all of it at once by its name, so that a kill leaves no half of it in the
        way; and what a kill left of an earlier one."""
        path = Path(os.path.realpath(self.folder.path))
        for left in path.parent.glob(f".{path.name}.removed-*"):
            if (left / "run.json").is_file():
                shutil.rmtree(left, ignore_errors=True)
        if there:
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}.removed-", dir=path.parent))
            self.folder.lock()
            path.rename(old)
            self.folder.unlock()
            shutil.rmtree(old)

    def close(self) -> None:
        """Keep the final policy of a run that reached its end or its stop rule; leave any other to be resumed."""
        module = self.module
        finished = module.updates_done >= self.data.updates or module.stopped_by == "damage"
        if finished:
            module.policy.save(self.folder.snapshots / "final", overwrite=True)
        self._write("finished" if finished else "stopped")

    def release(self) -> None:
        """Leave no run that says it is running when it is not: what an error ended is stopped."""
        if self.state == "running":
            self._write("stopped")

    def outcome(self) -> str:
        """What the run came to, in one line."""
        module, path = self.module, self.folder.path
        count = f"{module.updates_done} of {self.data.updates} updates"
        counts = list(module.validation.values())
        n = len(self.data.validation)
        right = f"; validation {counts[0]} -> {counts[-1]} of {n} right" if len(counts) > 1 and n else ""
        if self.state != "finished":
            return f"rlvr-pl: stopped after {count}{right}; continue with --resume {path}"
        why = " (stopped by its damage rule)" if module.stopped_by == "damage" else ""
        none = "; no rollout of it was graded (every reward is null)" if self._ungraded() else ""
        return f"rlvr-pl: finished after {count}{why}{right}{none}; policy in {path}/snapshots/final"

    def _ungraded(self) -> bool:
        """Whether no update of the run had a reward, by its own records."""
        rewards = [row.get("reward") for row in self.folder.table("metrics.csv").rows()]
        return bool(rewards) and all(reward in ("", "nan") for reward in rewards)

    def _write(self, state: str) -> None:
        before = self.folder.read_json("run.json") or {}
        module = self.module
        now = time.strftime("%Y-%m-%dT%H:%M:%S")
        manifest = {
            "state": state,
            "updates": module.updates_done,
            "planned_updates": self.data.updates,
            "stopped_by": module.stopped_by,
            "config_sha256": sha256_file(self.folder.path / "config.yaml"),
            "objective": type(module.objective).__name__,
            "start": module.policy.name,
            "start_sha256": module.policy.sha256,
            "order_sha256": self.data.schedule.sha256,
            "seed": module.seed,
            "engine": module.sampler.engine,
            "deterministic": module.sampler.deterministic,
            "started": before.get("started", now),
            "written": now,
            "command": before.get("command", self.command),
            "versions": {"python": platform.python_version(), "rlvr-pl": __version__, **_versions()},
            "threads": torch.get_num_threads(),
        }
        self.folder.write_json("run.json", manifest)
        self.state = state


def check_objective(module: RLVRModule, data: RunData) -> None:
    """Ask the objective for the weights of two made-up groups of the run's first two questions, so that a wrong setting
    or shape shows before a token is sampled. Completions differ in length, so that some of the batch is padding."""
    size, cap = module.group_size, module.decoding.max_new_tokens
    uids = [question.uid for question in islice(data.planned_questions(), 2)] or ["q"]
    grades = [Grade(GradeStatus.CORRECT, 1.0), *[Grade(GradeStatus.WRONG, 0.0)] * (2 * size - 1)]
    rollouts = []
    for i, grade in enumerate(grades):
        length = min(2 + i % min(size, 8), cap)
        completion = Completion(tuple(range(1, length + 1)), StopReason.EOS, (0.0,) * length)
        rollouts.append(Rollout(uids[i // size % len(uids)], i % size, (0,), completion, "", grade))
    batch = build_batch(rollouts, size, update=1, cap=cap)
    zeros = torch.zeros(batch.mask.shape)
    batch = batch.replace(old_logprobs=zeros, start_logprobs=zeros, entropy=zeros, sampling_entropy=zeros)
    try:
        batch = batch.replace(extras=module.objective.prepare(batch))
        check_weights(module.objective, module.objective.token_weights(batch), batch)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, LookupError) and any(told in uids for told in error.args):
            return  # it has a table of its own, perhaps not filled yet: the first update shows
        accuse(error, [module.objective])
        if isinstance(error, ValueError):  # one of our own classes refuses its settings
            raise UserError(f"objective {type(module.objective).__name__}: {error}") from None
        raise


def has_begun(folder: RunFolder, checkpoint: Path | None) -> bool:
    """Whether the run of this folder has done an update, be it lost again or not."""
    manifest, metrics = folder.read_json("run.json") or {}, folder.path / "metrics.csv"
    recorded = metrics.is_file() and metrics.read_bytes().count(b"\n") > 1  # its first line names the columns
    return checkpoint is not None or bool(manifest.get("updates")) or recorded


def check_history(folder: RunFolder, done: Mapping[str, Any], window: int) -> None:
    """Refuse to go on from a checkpoint whose run has lost rows of its tables: what follows would have no past.

    Args:
        folder: of the run.
        done: what the checkpoint says of it.
        window: updates in a row of ``windows.csv``.
    """
    last = done["updates_done"]
    each = range(1, last + 1)
    ends = range(window, last + 1, window)
    needed = {"metrics.csv": each, "updates.csv": each, "windows.csv": ends, "validation.csv": done["validation"]}
    for name, updates in needed.items():
        table = folder.table(name)
        if missing := table.missing(updates):
            what = f"no row of update {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            raise UserError(
                f"--resume {folder.path}: {table.path} has {what}, but the checkpoint is of update {last}; put the "
                f"file back, or begin another run: --config {folder.path}/config.yaml --run NEW"
            )


def check_callbacks(trainer: Any, module: RLVRModule, begun: bool) -> None:
    """Refuse, before anything is written, callbacks that cannot do their work in this run."""
    trainer.strategy._lightning_module = module  # as Trainer.fit begins, so that a callback sees the module
    for callback in trainer.callbacks:
        if isinstance(callback, UpdateCallback):
            with accusing([callback]):
                callback.check(trainer, begun)


def check_data(module: RLVRModule, data: RunData) -> None:
    """Refuse, before anything is written, data that this policy and this objective cannot learn from."""
    name = type(module.objective).__name__
    if module.objective.samples and data.stored:
        raise UserError(f"--objective {name}: samples its rollouts, but data.class_path SolutionData has stored ones")
    if not (module.objective.samples or data.stored):
        raise UserError(f"--objective {name}: learns from stored solutions; use `rlvr-pl distill`")
    data.check(module.policy)
    check_prompts(module, data)


def check_prompts(module: RLVRModule, data: RunData) -> None:
    """Refuse, before anything is written, a question whose prompt and completion do not fit the policy's context."""
    policy = module.policy
    room = policy.max_context - max(module.decoding.max_new_tokens, module.eval_decoding.max_new_tokens)
    for question in {q.uid: q for q in data.planned_questions()}.values():
        length = len(policy.prompt_ids(question))
        if length > room:
            raise UserError(
                f"{question.called}: its prompt has {length} tokens, which leaves no room for a completion in "
                f"the context of {policy.max_context}; lower model.max_new_tokens or leave the question out"
            )


def _expand_resume(argv: list[str]) -> list[str]:
    """Put the config of a run to be resumed in front. The run's own settings are the only ones, but for the devices on
    which it goes on: these change nothing of what it computes."""
    at = next((i for i, word in enumerate(argv) if word.split("=")[0] == "--resume"), None)
    if at is None:
        return argv
    inline = "=" in argv[at]
    run = argv[at].partition("=")[2] if inline else argv[at + 1] if at + 1 < len(argv) else ""
    rest = argv[:at] + argv[at + (1 if inline else 2) :]
    words = [word for word in rest if word.startswith("--")]
    if any(".".join(word.split("=")[0].split(".")[:2]) not in WHERE for word in words) or (rest and not words):
        raise UserError(
            "--resume takes every setting from the run folder; give it no other argument (but where it goes on: "
            f"{', '.join(WHERE)})"
        )
    config = Path(run) / "config.yaml"
    if not config.is_file():
        raise UserError(f"--resume {run}: no run to continue here (no config.yaml)")
    return ["--config", str(config), "--resume", run, *rest]


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
