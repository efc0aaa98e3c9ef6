"""Objectives: one family a file, each a small class over signed token weights."""

if __name__ != "rlvr_pl.objectives":
    raise ImportError(
        f"import this package as rlvr_pl.objectives, not as {__name__} (two copies of a class would differ)"
    )

from rlvr_pl.objectives.base import Objective
from rlvr_pl.objectives.fork_credit import ForkCredit
from rlvr_pl.objectives.grpo import GRPO, ORL, DrGRPO, ORLMask, ORLSeqmean
from rlvr_pl.objectives.sft import ExpertIterationSFT

__all__ = [
    "GRPO",
    "ORL",
    "DrGRPO",
    "ExpertIterationSFT",
    "ForkCredit",
    "ORLMask",
    "ORLSeqmean",
    "Objective",
]
