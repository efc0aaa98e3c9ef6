"""Callbacks: monitors that watch a run and rules that stop it."""

if __name__ != "rlvr_pl.callbacks":
    raise ImportError(f"import this package as rlvr_pl.callbacks, not as {__name__} (two copies of a class would differ)")
