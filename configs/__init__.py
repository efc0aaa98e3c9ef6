"""Commented YAML configs; `rlvr_pl.configs` finds the shipped ones."""

if __name__ != "rlvr_pl.configs":
    raise ImportError(f"import this package as rlvr_pl.configs, not as {__name__}")
