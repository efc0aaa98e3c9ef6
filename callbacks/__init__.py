"""Callbacks: monitors that watch a run and rules that stop it. Nothing is imported until it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

if __name__ != "rlvr_pl.callbacks":
    raise ImportError(
        f"import this package as rlvr_pl.callbacks, not as {__name__} (two copies of a class would differ)"
    )

_ROOMS = {
    "CompletionTable": "completion_table",
    "DamageStop": "damage_stop",
    "DriftMonitor": "drift_monitor",
    "EntropyRatioStop": "stop_rules",
    "LoopShareStop": "stop_rules",
    "NonFiniteStop": "stop_rules",
    "RolloutRecorder": "recorder",
    "RolloutStats": "rollout_stats",
    "RunCheckpoint": "checkpoint",
    "RunProgress": "progress",
    "RunRecord": "run_record",
    "SamplerCanary": "sampler_canary",
    "SignedMassStop": "stop_rules",
    "Snapshots": "snapshots",
    "TimeLimit": "time_limit",
    "Tracker": "tracker",
    "UpdateCallback": "base",
    "Validation": "validation",
}

__all__ = list(_ROOMS)


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return getattr(import_module(f"rlvr_pl.callbacks.{_ROOMS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_ROOMS])
