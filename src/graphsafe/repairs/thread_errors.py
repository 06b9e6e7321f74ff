"""B10: a capture fails because of another thread, whose error alone says why, and that one is lost.

A thread that dies of an error hands it to ``threading.excepthook``, which prints it, or whatever an application makes
of it. The repair tells of it first, so that a capture that failed meanwhile can show it.
"""

from __future__ import annotations

import threading
import types
from typing import Any, Final

from ._patches import Evidence, Patches
from .hooks import hooks

FAULT: Final = "B10"
MODULES: Final = ("threading",)
EVIDENCE: Final = Evidence(
    fault="a capture fails without saying why: the useful error is in another thread, and lost",
    reports=("pytorch/pytorch#175425",),
    versions="all read, 2.9 to 2.15",
)

_patches = Patches()
undo = _patches.undo


def probe(module: types.ModuleType) -> bool:
    """No torch looks at the errors of other threads; false where Python cannot tell of them."""
    return hasattr(module, "excepthook")


def repair(module: types.ModuleType) -> None:
    """Have threads that die of an error tell of it, and then do what they did."""
    before = module.excepthook
    active = True

    def excepthook(args: Any, /) -> Any:
        if active:
            hooks.saw_error(args.exc_value)
        return before(args)

    def put_back() -> None:
        nonlocal active
        active = False
        if threading.excepthook is excepthook:  # else someone has put theirs on top of it, or theirs back
            threading.excepthook = before

    module.excepthook = excepthook  # type: ignore[attr-defined]
    _patches.later(put_back)
