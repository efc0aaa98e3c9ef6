"""Random numbers that are a pure function of a key, so that a resumed run draws the same ones."""

from __future__ import annotations

import hashlib

import numpy as np


def key_digest(*key: int | str) -> bytes:
    """SHA-256 of the key's text."""
    return hashlib.sha256(repr(key).encode()).digest()


def generator(*key: int | str) -> np.random.Generator:
    """A Philox counter generator whose key is the first 16 bytes of `key_digest`."""
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key_digest(*key)[:16], "little")))
