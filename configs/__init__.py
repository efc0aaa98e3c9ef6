"""The shipped configs: commented YAML, one file per recipe or arm."""

from pathlib import Path

if __name__ != "rlvr_pl.configs":
    raise ImportError(f"import this package as rlvr_pl.configs, not as {__name__}")

FOLDER = Path(__file__).parent


def find_config(name: str) -> Path:
    """Path of a shipped config, for example ``quickstart.yaml`` or ``qwen3_0.6b_math/orl.yaml``."""
    path = FOLDER / name
    if not path.is_file():
        known = sorted(str(p.relative_to(FOLDER)) for p in FOLDER.rglob("*.yaml"))
        raise FileNotFoundError(f"no shipped config {name}; there are {', '.join(known)}")
    return path
