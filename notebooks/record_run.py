"""Makes the small recorded run that the notebooks read: 24 updates on the embedded default, under a minute of CPU.

python notebooks/record_run.py [FOLDER]      # default: runs/recorded
"""

from __future__ import annotations

import sys

from rlvr_pl.cli import main

SETTINGS = {
    "seed": 21,
    "policy.name": "embedded:start",
    "objective": "GRPO",
    "model.group_size": 8,
    "model.max_new_tokens": 80,
    "optimizer": "AdamW",
    "optimizer.lr": "2e-4",
    "data.train": "embedded:train",
    "data.validation": "embedded:val350",
    "data.questions_per_update": 4,
    "data.updates": 24,
    "validation.every_n_updates": 8,
    "recorder.texts": "true",
    "trainer.callbacks+": "DriftMonitor",
    "trainer.callbacks.every_n_updates": 4,
}


def record(folder: str) -> int:
    """Run, or finish, the recorded run; the exit status of `rlvr-pl fit`."""
    rule = ["--trainer.callbacks+=DamageStop", "--trainer.callbacks.action=warn"]
    return main(["fit", "--run", folder, *(f"--{name}={value}" for name, value in SETTINGS.items()), *rule])


if __name__ == "__main__":
    sys.exit(record(sys.argv[1] if len(sys.argv) > 1 else "runs/recorded"))
