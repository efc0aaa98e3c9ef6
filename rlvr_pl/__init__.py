"""rlvr-pl: matched, statistically honest RLVR experiments on PyTorch Lightning.

This module imports nothing heavy, so that light commands start fast; import what you need from its rooms, for example
``from rlvr_pl.objectives import GRPO`` or ``from rlvr_pl.core.paired import compare``.
"""

__version__ = "0.1.0"
