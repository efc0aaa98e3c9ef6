"""Five kills of real processes; `python benchmarks/crash.py --kills 50` is the full count."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
def test_killed_runs_end_like_an_undisturbed_one():
    command = [sys.executable, ROOT / "benchmarks" / "crash.py", "--kills", "5", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["kills"] == 5 and report["differences"] == {}
