"""rlvr-pl: matched, statistically honest RLVR experiments on PyTorch Lightning.

The names that scripts need most are here; the rest is in the rooms, for example ``rlvr_pl.objectives.RLOO``. Importing
this module imports nothing heavy, so that light commands start fast: a name is looked up when it is asked for.

>>> import rlvr_pl
>>> rlvr_pl.half_width(49, n=350) < 4
True
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlvr_pl.callbacks.base import UpdateCallback as UpdateCallback
    from rlvr_pl.core.advantage import group_advantage as group_advantage
    from rlvr_pl.core.advantage import leave_one_out as leave_one_out
    from rlvr_pl.core.collapse import CollapseCriterion as CollapseCriterion
    from rlvr_pl.core.credit import transform_credit as transform_credit
    from rlvr_pl.core.credit import tree_credit as tree_credit
    from rlvr_pl.core.logprobs import chunked_logprobs as chunked_logprobs
    from rlvr_pl.core.paired import compare as compare
    from rlvr_pl.core.passk import pass_at_k as pass_at_k
    from rlvr_pl.core.power import half_width as half_width
    from rlvr_pl.core.power import power as power
    from rlvr_pl.core.power import sample_size as sample_size
    from rlvr_pl.core.rollout_class import classify as classify
    from rlvr_pl.core.weights import signed_mass as signed_mass
    from rlvr_pl.core.weights import token_weights as token_weights
    from rlvr_pl.data.module import QuestionData as QuestionData
    from rlvr_pl.data.pools import load_questions as load_questions
    from rlvr_pl.errors import UserError as UserError
    from rlvr_pl.grading import FunctionGrader as FunctionGrader
    from rlvr_pl.grading import Grader as Grader
    from rlvr_pl.grading import GradeRequest as GradeRequest
    from rlvr_pl.grading import MathGrader as MathGrader
    from rlvr_pl.grading import grade as grade
    from rlvr_pl.module import RLVRModule as RLVRModule
    from rlvr_pl.objectives.base import Objective as Objective
    from rlvr_pl.objectives.grpo import GRPO as GRPO
    from rlvr_pl.policy import Policy as Policy
    from rlvr_pl.policy import load_policy as load_policy
    from rlvr_pl.precision import BF16Precision as BF16Precision
    from rlvr_pl.sampling.base import Decoding as Decoding
    from rlvr_pl.sampling.base import SampleRequest as SampleRequest
    from rlvr_pl.sampling.torch import TorchSampler as TorchSampler
    from rlvr_pl.types import Completion as Completion
    from rlvr_pl.types import Grade as Grade
    from rlvr_pl.types import GradeStatus as GradeStatus
    from rlvr_pl.types import Question as Question
    from rlvr_pl.types import Rollout as Rollout
    from rlvr_pl.types import RolloutBatch as RolloutBatch
    from rlvr_pl.types import StopReason as StopReason
    from rlvr_pl.types import build_batch as build_batch

__version__ = "0.1.0"

_ROOMS = {
    "BF16Precision": "precision",
    "CollapseCriterion": "core.collapse",
    "Completion": "types",
    "Decoding": "sampling.base",
    "FunctionGrader": "grading",
    "GRPO": "objectives.grpo",
    "Grade": "types",
    "GradeRequest": "grading",
    "GradeStatus": "types",
    "Grader": "grading",
    "MathGrader": "grading",
    "Objective": "objectives.base",
    "Policy": "policy",
    "Question": "types",
    "QuestionData": "data.module",
    "RLVRModule": "module",
    "Rollout": "types",
    "RolloutBatch": "types",
    "SampleRequest": "sampling.base",
    "StopReason": "types",
    "TorchSampler": "sampling.torch",
    "UpdateCallback": "callbacks.base",
    "UserError": "errors",
    "build_batch": "types",
    "chunked_logprobs": "core.logprobs",
    "classify": "core.rollout_class",
    "compare": "core.paired",
    "grade": "grading",
    "group_advantage": "core.advantage",
    "half_width": "core.power",
    "leave_one_out": "core.advantage",
    "load_policy": "policy",
    "load_questions": "data.pools",
    "pass_at_k": "core.passk",
    "power": "core.power",
    "sample_size": "core.power",
    "signed_mass": "core.weights",
    "token_weights": "core.weights",
    "transform_credit": "core.credit",
    "tree_credit": "core.credit",
}

__all__ = list(_ROOMS)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return getattr(import_module(f"rlvr_pl.{_ROOMS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_ROOMS])
