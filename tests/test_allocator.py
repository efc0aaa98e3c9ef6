"""Freed memory stays with the process: what is asked for again costs no new pages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import resource, sys
import numpy as np
from rlvr_pl.allocator import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit(77)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [np.ones(2**18) for _ in range(100)]  # 100 x 2 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
faults()
print(faults())
"""


def faults(word: str, **environment: str) -> int:
    env = os.environ | environment
    done = subprocess.run([sys.executable, "-c", CODE, word], env=env, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("no glibc here")
    return int(done.stdout)


def test_pages_are_kept():
    """200 MiB are 51,200 pages of 4 KiB, or 100 of 2 MiB."""
    assert faults("keep") < faults("leave") / 10


def test_the_environment_has_the_last_word(monkeypatch):
    from rlvr_pl.allocator import keep_freed_memory

    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert keep_freed_memory() is False
