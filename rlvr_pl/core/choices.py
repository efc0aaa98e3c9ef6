"""Names given as text: one check that says which ones are accepted."""

from __future__ import annotations

from typing import Any, get_args


def check_choice(name: str, value: object, literal: Any) -> None:
    """Raise ValueError naming the setting, its value and the accepted ones unless `value` is one of the `Literal`'s."""
    accepted = get_args(literal)
    if value not in accepted:
        raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(map(str, accepted))}")
