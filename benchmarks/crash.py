"""Kills runs with SIGKILL and holds what they end with against a run that nothing disturbed.

    python benchmarks/crash.py [--kills 50] [--seed 0] [--json]

Every run is `rlvr-pl fit` in a process of its own, killed several times and begun again by the same command. Half of
the kills come at a named moment inside an update, torn writes included; the other half at a random time. Then
weights, optimizer state, masters, records, windows, verdict and ledger must equal those of the undisturbed run bit for
bit (clock readings aside), with no row twice or missing and nothing half-written left behind. Exit status 1 if anything
differs.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import csv
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

PLAN = Path("kill.json")
"""In the working folder: the moment at which the next process is to die, ``[point, occurrence]``."""
UPDATES = 6
KILLS_A_RUN = 6
CLOCK = ("seconds/", "tokens_per_s")
CONFIG = f"""
seed: 3
policy: {{name: embedded:start}}
objective: SignedReinforce # learns from every update, whatever the rewards
model: {{group_size: 4, max_new_tokens: 64, eval_max_new_tokens: 32, uniform_update: step}}
precision: {{master_weights: true}}
optimizer: {{class_path: torch.optim.AdamW, init_args: {{lr: 3.0e-4}}}}
lr_scheduler: {{class_path: WarmupCosine, init_args: {{warmup: 2}}}}
data: {{updates: {UPDATES}, validation: embedded:drift}}
validation: {{every_n_updates: 3}}
checkpoint: {{every_n_updates: 2}}
rollout_stats: {{window: 3}}
trainer:
  logger: false
  callbacks:
    - {{class_path: DriftMonitor, init_args: {{n: 8, every_n_updates: 2}}}}
    - {{class_path: DamageStop, init_args: {{criterion: {{window: 2, truncation: 1.0}}, action: warn}}}}
    - {{class_path: Snapshots, init_args: {{every_n_updates: 3}}}}
    - crash.Kill
"""


# ---- in the run that is to die -------------------------------------------------------------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Kill(Callback):
    """Ends the process at the moment that `PLAN` names. Without a plan it does nothing."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if not PLAN.exists():
            return
        point, occurrence = json.loads(PLAN.read_text())
        owner, name, killer = points(trainer, pl_module)[point]
        method, calls = getattr(owner, name), 0

        def watched(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == occurrence:
                PLAN.unlink()
                killer(method, *args, **kwargs)
                die()
            return method(*args, **kwargs)

        setattr(owner, name, watched)


def points(trainer: Trainer, module: Any) -> dict[str, tuple[Any, str, Callable[..., Any]]]:
    """Moments of a run: the object and method at which each is met, and what still happens before the end."""
    import torch

    from rlvr_pl import module as glue
    from rlvr_pl import records, update
    from rlvr_pl.callbacks import checkpoint
    from rlvr_pl.policy import Policy

    def before(method: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def after(method: Any, *args: Any, **kwargs: Any) -> None:
        method(*args, **kwargs)

    def torn_rows(method: Any, file: Any, rows: Any) -> None:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        with file.path.open("a") as f:
            f.write(text[: len(text) * 2 // 3])

    def torn_line(method: Any, table: Any, row: Any) -> None:
        with table.path.open("a") as f:
            f.write(",".join(str(value) for value in row.values())[:7])

    def torn_checkpoint(method: Any, io: Any, content: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        method(io, content, path)
        os.truncate(path, os.path.getsize(path) // 2)

    def lost_tail(method: Any, path: Any, text: str) -> None:  # as after a power loss: a name without its content
        os.truncate(Path(path).with_suffix(".ckpt"), 1000)
        method(path, text)

    return {
        "sampling": (module.sampler, "generate", before),
        "sampled": (module.sampler, "generate", after),
        "grading": (module.grader, "grade", before),
        "backward": (torch.Tensor, "backward", after),
        "gradient clipped": (update, "clip", after),
        "optimizer stepped": (update, "_changed_share", before),
        "rollouts torn": (records.JsonlFile, "append", torn_rows),
        "rollouts written": (records.JsonlFile, "append", after),
        "table torn": (records.CsvTable, "append", torn_line),
        "table written": (records.CsvTable, "append", after),
        "file before its rename": (os, "replace", before),
        "file renamed": (os, "replace", after),
        "validation": (glue, "summarize", before),
        "checkpoint torn": (checkpoint.CheckpointFile, "save_checkpoint", torn_checkpoint),
        "checkpoint without its hash": (checkpoint, "atomic_write_text", before),
        "checkpoint cut by a power loss": (checkpoint, "atomic_write_text", lost_tail),
        "checkpoint hashed": (checkpoint, "atomic_write_text", after),
        "policy folder": (Policy, "save", before),
        "policy folder written": (Policy, "save", after),
        "training ended": (trainer.strategy, "teardown", before),
    }


POINTS = (
    "rollouts torn", "checkpoint cut by a power loss", "optimizer stepped", "validation", "checkpoint torn", "sampling",
    "grading", "backward", "table torn", "checkpoint without its hash", "file before its rename", "sampled",
    "gradient clipped", "rollouts written", "table written", "file renamed", "checkpoint hashed", "policy folder",
    "policy folder written", "training ended",
)  # fmt: skip


# ---- the runs ------------------------------------------------------------------------------------------------------


def start(folder: Path, run: str) -> subprocess.Popen[bytes]:
    """`rlvr-pl fit` on `run` in the working folder `folder`."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    words = ["fit", "--config", "config.yaml", "--run", run]
    code = "import sys; from rlvr_pl.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stderr=(folder / f"{run}.log").open("ab"),
    )


def finish(folder: Path, run: str) -> float:
    """Run to the end; returns the wall seconds. RuntimeError with the last words of a run that fails."""
    began = time.monotonic()
    _check(folder, run, start(folder, run).wait(), 0)
    return time.monotonic() - began


def kill_at(folder: Path, run: str, point: str, occurrence: int) -> bool:
    """Begin or continue the run and let it die at a point; False if it ended before it came there."""
    (folder / PLAN).write_text(json.dumps([point, occurrence]))
    status = start(folder, run).wait()
    (folder / PLAN).unlink(missing_ok=True)
    _check(folder, run, status, 0, -signal.SIGKILL)
    return status != 0


def kill_after(folder: Path, run: str, seconds: float) -> bool:
    """Begin or continue the run and kill it after so many seconds; False if it ended before."""
    process = start(folder, run)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _check(folder, run, process.returncode, 0, -signal.SIGKILL)
    return process.returncode != 0


def _check(folder: Path, run: str, status: int, *allowed: int) -> None:
    if status not in allowed:
        raise RuntimeError(f"{run} ended with status {status}: {(folder / f'{run}.log').read_text()[-2000:]}")


def moments(kills: int, rng: random.Random) -> Iterator[tuple[str, int | float]]:
    """Endless (point, occurrence) and ("random time", share of what is left to run) in turn."""
    for i in range(10 * kills):
        if i % 2 == 0:
            point = POINTS[i // 2 % len(POINTS)]
            rare = point.startswith(("checkpoint", "policy", "validation", "training"))
            yield point, 1 + ("cut" in point) if rare else rng.randint(1, 4)  # the cut one has another before it
        else:
            yield "random time", rng.uniform(0.2, 1.0)


def is_finished(run: Path) -> bool:
    """Whether the run says so; a kill may come after that, while the process ends."""
    manifest = run / "run.json"
    return manifest.exists() and json.loads(manifest.read_text())["state"] == "finished"


def crash(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Everything: an undisturbed run, then disturbed ones until `kills` processes have died; what differed."""
    (folder / "config.yaml").write_text(CONFIG)
    longest = finish(folder, "whole")
    died: Counter[str] = Counter()
    differences: dict[str, list[str]] = {}
    runs, alive = 0, 0
    for point, when in moments(kills, random.Random(seed)):
        if alive == 0:
            runs, alive = runs + 1, KILLS_A_RUN
        run = f"run{runs}"
        began = time.monotonic()
        by_clock = point == "random time"
        end = kill_after(folder, run, when * longest) if by_clock else kill_at(folder, run, point, int(when))
        if by_clock and not end:  # the machine was slower before, or little was left to do
            longest = min(longest, time.monotonic() - began)
        died[point] += end
        print(f"{died.total()}/{kills} {run}: {point} {when:.3g} {'killed' if end else 'finished'}", file=sys.stderr)
        done = is_finished(folder / run)
        alive = 0 if done else alive - 1
        enough = died.total() == kills
        if alive == 0 or enough:
            if not done:
                finish(folder, run)
            if found := differ(folder / "whole", folder / run):
                differences[run] = found
            alive = 0
        if enough:
            break
    return {"kills": died.total(), "runs": runs, "by_point": dict(died.most_common()), "differences": differences}


# ---- what must be equal --------------------------------------------------------------------------------------------


def differ(one: Path, other: Path) -> list[str]:
    """What differs between two finished run folders, clock readings aside."""
    files = [{p.relative_to(run): p for p in run.rglob("*") if p.is_file() and _counts(p)} for run in (one, other)]
    found = [f"only in {(one, other)[name not in files[0]]}: {name}" for name in sorted(set(files[0]) ^ set(files[1]))]
    both = sorted(set(files[0]) & set(files[1]))
    return found + [str(name) for name in both if _content(files[0][name]) != _content(files[1][name])]


def _counts(path: Path) -> bool:
    """All but what was set aside with a message, and the lock."""
    return path.name != ".lock" and path.suffix not in (".torn", ".damaged")


def _content(path: Path) -> Any:
    if path.suffix == ".ckpt":
        return _comparable(path)
    if path.parent.name == "checkpoints":
        return json.loads(path.read_text())["update"]  # the hash is of the clock reading as well
    if path.name == "metrics.csv":
        with path.open() as f:
            return [{k: v for k, v in row.items() if not k.startswith(CLOCK)} for row in csv.DictReader(f)]
    if path.name in ("cost.json", "run.json"):
        clock = ("wall_seconds", "started", "written", "command")
        return {k: v for k, v in json.loads(path.read_text()).items() if k not in clock}
    return path.read_bytes()


def _comparable(path: Path) -> Any:
    """The content of a checkpoint with tensors as bytes and without RunRecord's clock."""
    import torch

    def plain(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return str(x.dtype), tuple(x.shape), x.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        if isinstance(x, dict):
            return {k: plain(v) for k, v in x.items() if k != "RunRecord"}
        return [plain(v) for v in x] if isinstance(x, (list, tuple)) else x

    return plain(torch.load(path, weights_only=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="processes to kill (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = crash(Path(folder), args.kills, args.seed)
    if args.json:
        print(json.dumps(report))
    else:
        print(f"{report['kills']} kills in {report['runs']} runs: {report['by_point']}")
        print(f"differences: {report['differences'] or 'none'}")
    return 1 if report["differences"] else 0


if __name__ == "__main__":
    sys.exit(main())
