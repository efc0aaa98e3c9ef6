"""Lightning's advice that does not apply to a run here, left out."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

HUSHED = (
    ".*does not have many workers.*",
    ".*dataloader is not resumable.*",
    ".*LightningCLI's args.*",
    ".*will be overridden by `FitCLI.*",
    ".*in eval mode at the start of training.*",
    ".*overridden `transfer_batch_to_device`.*",
    ".*isinstance\\(treespec, LeafSpec\\).*",
    ".*across ranks is zero.*",
    ".*sync_dist=True.*",  # every rank logs figures of the whole update
    ".*lr_scheduler.step.*before `optimizer.step.*",  # a skipped update; schedulers count updates
    "(?s).*was deprecated in v4.*removed in v5.*",  # jsonargparse, about calls that Lightning makes
)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Leave out Lightning's advice that does not apply here (loaders without workers, modules in eval mode, the step
    inside our own hooks); its errors and other warnings pass."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for text in HUSHED:
            warnings.filterwarnings("ignore", message=text)
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels):
                logger.setLevel(level)
