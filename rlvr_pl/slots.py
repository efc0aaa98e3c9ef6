"""What stands where in a run: the slots a class can be chosen for, their defaults, and the callbacks of every run."""

from __future__ import annotations

from typing import Any

import rlvr_pl.callbacks
import rlvr_pl.grading
import rlvr_pl.objectives
import rlvr_pl.sampling.torch
import rlvr_pl.sampling.vllm
import rlvr_pl.sampling.vllm_server
from rlvr_pl.data.module import RunData
from rlvr_pl.data.reasoning_gym import ReasoningGym
from rlvr_pl.data.solutions import SolutionData
from rlvr_pl.grading.base import Grader
from rlvr_pl.objectives.base import Objective
from rlvr_pl.sampling.base import Sampler

# Imported, so that the parser finds their classes by name.
ROOMS = (
    rlvr_pl.grading,
    rlvr_pl.objectives,
    ReasoningGym,
    rlvr_pl.sampling.torch,
    rlvr_pl.sampling.vllm,
    rlvr_pl.sampling.vllm_server,
    SolutionData,
)
CALLBACKS: dict[str, type] = {name: getattr(rlvr_pl.callbacks, name) for name in rlvr_pl.callbacks.__all__}
# Callbacks of every run, in the order in which they see an update; RunRecord and checkpoints come last.
STANDING = {
    "progress": CALLBACKS["RunProgress"],
    "rollout_stats": CALLBACKS["RolloutStats"],
    "recorder": CALLBACKS["RolloutRecorder"],
    "tracker": CALLBACKS["Tracker"],
    "validation": CALLBACKS["Validation"],
    "time_limit": CALLBACKS["TimeLimit"],
    "checkpoint": CALLBACKS["RunCheckpoint"],
}
SLOTS: dict[str, type] = {"objective": Objective, "sampler": Sampler, "grader": Grader, "data": RunData}
ADAMW = {
    "class_path": "torch.optim.AdamW",
    "init_args": {"lr": 1e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
}
DEFAULTS: dict[str, Any] = {
    "policy.name": "embedded:start",
    "data": {"class_path": "rlvr_pl.data.module.QuestionData"},
    "objective": {"class_path": "rlvr_pl.objectives.GRPO"},
    "sampler": {"class_path": "rlvr_pl.sampling.torch.TorchSampler"},
    "grader": {"class_path": "rlvr_pl.grading.MathGrader"},
    "optimizer": ADAMW,
}
