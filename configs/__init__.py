"""The shipped configs: commented YAML, one file per recipe or arm."""

import os
from pathlib import Path

if __name__ != "rlvr_pl.configs":
    raise ImportError(f"import this package as rlvr_pl.configs, not as {__name__}")

FOLDER = Path(__file__).parent


def here_or_shipped(path: Path, name: str) -> Path:
    """`path`, or the shipped config called `name` where nothing is at `path`."""
    shipped = FOLDER / name
    return shipped if not os.path.lexists(path) and shipped.is_file() else path


def find_config(name: str) -> Path:
    """Path of a shipped config, for example ``quickstart.yaml`` or ``qwen3_0.6b_math/orl.yaml``."""
    path = FOLDER / name
    if not path.is_file():
        known = sorted(str(p.relative_to(FOLDER)) for p in FOLDER.rglob("*.yaml"))
        raise FileNotFoundError(f"no shipped config {name}; there are {', '.join(known)}")
    return path
