"""Where torch compiles a backward lazily, on its first run; two repairs wrap that place."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ._patches import Patches, RepairError, without_dynamo


def wrap_lazy_backward(
    patches: Patches, module: types.ModuleType, scope: Callable[[str], AbstractContextManager[None]]
) -> None:
    """Have every lazy compile of a backward run inside ``scope(what)``.

    Args:
        module: torch._functorch._aot_autograd.runtime_wrappers.
        scope: entered before anything of the compile has begun.
    """
    compiler = getattr(module, "_AutogradBackwardCompiler", None)
    if hasattr(compiler, "get_or_compile"):
        _wrap_compiler(patches, compiler, scope)
    elif hasattr(module, "tracing"):
        _wrap_tracing(patches, module, scope)
    else:
        raise RepairError("torch compiles its lazy backward in an unknown place")


def _wrap_compiler(patches: Patches, compiler: Any, scope: Callable[[str], AbstractContextManager[None]]) -> None:
    original = compiler.get_or_compile

    @functools.wraps(original)
    def get_or_compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.compiled_bw is not None:
            return self.compiled_bw
        with without_dynamo(), scope("a backward"):
            return original(self, *args, **kwargs)  # it looks again whether another thread has compiled it by now

    patches.attribute(compiler, "get_or_compile", get_or_compile)


def _wrap_tracing(
    patches: Patches, module: types.ModuleType, scope: Callable[[str], AbstractContextManager[None]]
) -> None:
    """Older torch compiles inside a closure; ``tracing`` is what that closure enters first, and nothing else does."""
    original = module.tracing

    @functools.wraps(original)
    @contextmanager
    def tracing(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with without_dynamo(), scope("a backward"), original(*args, **kwargs) as context:
            yield context

    patches.attribute(module, "tracing", tracing)
