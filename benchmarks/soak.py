"""A long run: whether memory, open files and the time of an update stay where they were.

    python benchmarks/soak.py [--updates 2000] [--json]

Runs the embedded default as `configs/quickstart.yaml` does, with drift monitor, damage rule, validation, checkpoints
and snapshots, in this process; at a learning rate of zero, so that answers do not grow longer or shorter and the last
update has the work of the first. After a warm-up of a fifth of the updates it must hold: resident memory grows by less
than 1 KB an update (least-squares slope), the number of open files does not change, and the CPU time of the last
quarter's updates is within 10% of the first quarter's (lower quartiles, which a busy machine disturbs least). Exit
status 1 if anything does not hold.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from lightning.pytorch import Callback, Trainer

ROOT = Path(__file__).resolve().parent.parent
PAGE = os.sysconf("SC_PAGE_SIZE")
MONITORS = [
    {"class_path": "DriftMonitor", "init_args": {"every_n_updates": 20}},
    {"class_path": "DamageStop", "init_args": {"action": "warn"}},
    {"class_path": "Snapshots", "init_args": {"every_n_updates": 100, "keep": 2}},
    {"class_path": "soak.Watch"},
]


class Watch(Callback):
    """Appends ``update, resident bytes, open files, CPU seconds since the last update`` to ``soak.jsonl``."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._cpu = time.process_time()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        now = time.process_time()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
        with open("soak.jsonl", "a") as f:
            json.dump([pl_module.updates_done, resident, len(os.listdir("/proc/self/fd")), now - self._cpu], f)
            f.write("\n")
        self._cpu = time.process_time()


def soak(folder: Path, updates: int) -> dict[str, Any]:
    """Run in `folder` and judge what `Watch` saw."""
    from rlvr_pl.cli import main as rlvr_pl

    config = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    config["data"]["updates"] = updates
    config["optimizer"]["init_args"]["lr"] = 0.0
    config["validation"]["every_n_updates"] = 100
    config["trainer"] = {"callbacks": MONITORS}
    (folder / "soak.yaml").write_text(yaml.safe_dump(config))
    sys.path.insert(0, str(Path(__file__).parent))
    os.chdir(folder)
    if rlvr_pl(["fit", "--config=soak.yaml", "--run=run"]):
        raise RuntimeError("the run failed")
    rows = [json.loads(line) for line in (folder / "soak.jsonl").read_text().splitlines()]
    return judge(np.array(rows[len(rows) // 5 :], dtype=np.float64))


def judge(rows: np.ndarray) -> dict[str, Any]:
    """Figures of [updates, 4] rows after the warm-up, and whether each is as it must be."""
    update, resident, files, seconds = rows.T
    quarter = max(1, len(rows) // 4)
    first, last = (float(np.quantile(part, 0.25)) for part in (seconds[:quarter], seconds[-quarter:]))
    slope = float(np.polyfit(update, resident, 1)[0])
    return {
        "updates": int(update[-1]),
        "resident_mb": round(float(resident[-1]) / 2**20, 1),
        "bytes_an_update": round(slope, 1),
        "open_files": sorted({int(n) for n in files}),
        "cpu_s_an_update": [round(first, 4), round(last, 4)],
        "memory_flat": slope < 1024,
        "files_flat": len(set(files)) == 1,
        "no_slow_down": last < 1.1 * first,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=2000, help="updates (default 2000)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = soak(Path(folder), args.updates)
        os.chdir(ROOT)
    print(json.dumps(report) if args.json else "\n".join(f"{name}: {value}" for name, value in report.items()))
    return 0 if report["memory_flat"] and report["files_flat"] and report["no_slow_down"] else 1


if __name__ == "__main__":
    sys.exit(main())
