"""How long a wait inside graphsafe may last."""

from __future__ import annotations

import os

from .errors import GraphsafeError

DEFAULT_TIMEOUT_S = 120.0


def timeout_s() -> float:
    """The deadline of a wait, in seconds: ``GRAPHSAFE_TIMEOUT_S``, 120 without it."""
    text = os.environ.get("GRAPHSAFE_TIMEOUT_S")
    if text is None:
        return DEFAULT_TIMEOUT_S
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value > 0:
        raise GraphsafeError(f"GRAPHSAFE_TIMEOUT_S is {text!r}; it is a positive number of seconds, such as 120.")
    return value
