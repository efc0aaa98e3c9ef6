"""Objectives: one family a file, each a small class over signed token weights."""

if __name__ != "rlvr_pl.objectives":
    raise ImportError(
        f"import this package as rlvr_pl.objectives, not as {__name__} (two copies of a class would differ)"
    )

from rlvr_pl.objectives.base import Objective
from rlvr_pl.objectives.cispo import CISPO
from rlvr_pl.objectives.clipped import BNPO, DAPO, GSPO, LUSPO, Clipped, ClippedGRPO
from rlvr_pl.objectives.covariance import ClipCov, KLCov
from rlvr_pl.objectives.entropy_masked import EntropyMasked
from rlvr_pl.objectives.fork_credit import ForkCredit
from rlvr_pl.objectives.gdpo import GDPO
from rlvr_pl.objectives.gmpo import GMPO
from rlvr_pl.objectives.grpo import GRPO, ORL, DrGRPO, ORLMask, ORLSeqmean
from rlvr_pl.objectives.max_rl import MaxRL
from rlvr_pl.objectives.opo import OPO
from rlvr_pl.objectives.pass_at_k import PassAtK
from rlvr_pl.objectives.policy_gradient import PolicyGradient
from rlvr_pl.objectives.ratio import Ratio
from rlvr_pl.objectives.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from rlvr_pl.objectives.rloo import RLOO
from rlvr_pl.objectives.sapo import SAPO
from rlvr_pl.objectives.sft import ExpertIterationSFT
from rlvr_pl.objectives.signed import NSR, PSR, SignedReinforce, WeightedReinforce
from rlvr_pl.objectives.terms import EntropyBonus, KLPenalty, MismatchCorrection, OffPolicyMask
from rlvr_pl.objectives.vespo import VESPO

__all__ = [
    "BNPO",
    "CISPO",
    "DAPO",
    "GDPO",
    "GMPO",
    "GRPO",
    "GSPO",
    "LUSPO",
    "NSR",
    "OPO",
    "ORL",
    "PSR",
    "RLOO",
    "SAPO",
    "VESPO",
    "ClipCov",
    "Clipped",
    "ClippedGRPO",
    "DrGRPO",
    "EntropyBonus",
    "EntropyMasked",
    "ExpertIterationSFT",
    "ForkCredit",
    "KLCov",
    "KLPenalty",
    "MaxRL",
    "MismatchCorrection",
    "ORLMask",
    "ORLSeqmean",
    "Objective",
    "OffPolicyMask",
    "PassAtK",
    "PolicyGradient",
    "Ratio",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "SignedReinforce",
    "WeightedReinforce",
]
