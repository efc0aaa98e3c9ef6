"""Commands that read records start without torch, transformers or scipy.stats."""

from __future__ import annotations

import subprocess
import sys

LIGHT = ("power", "compare", "noise_floor", "passk", "coverage", "boxed", "weights_diff", "entropy_grad")


def test_no_heavy_import_at_start() -> None:
    code = (
        "import argparse, importlib, sys\n"
        f"for name in {LIGHT!r}:\n"
        "    importlib.import_module(f'rlvr_pl.analysis.{name}').add_arguments(argparse.ArgumentParser())\n"
        "print(sorted({'torch', 'transformers', 'scipy', 'safetensors', 'lightning'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
