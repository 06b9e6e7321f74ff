"""Calls back when a module is imported for the first time, whoever imports it.

Guarantees:
- Nothing is imported on its own account, and a module's import never fails or changes because of the callback's hook:
  its spec and loader are the ones it would have had.
- The callback runs once the module is whole, in the importing thread, before the import statement returns.
"""

from __future__ import annotations

import importlib
import sys
import threading
import types
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec


class ImportHook(MetaPathFinder):
    """Calls ``imported(module)`` after the first import of each of ``names``, once added to ``sys.meta_path``."""

    def __init__(self, names: frozenset[str], imported: Callable[[types.ModuleType], None]) -> None:
        self.names, self.imported = names, imported
        self._searching = threading.local()  # the name this thread asks the other finders for

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.names or getattr(self._searching, "name", None) == fullname:
            return None
        self._searching.name = fullname
        try:
            spec = _find_spec(self, fullname, path, target)
        finally:
            self._searching.name = None
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.imported)
        return spec


def _find_spec(
    hook: ImportHook, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None
) -> ModuleSpec | None:
    for finder in list(sys.meta_path):
        if finder is not hook and hasattr(finder, "find_spec"):
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
    return None


class _Loader(Loader):
    """Loads with ``loader``, takes its own name out of the module, and tells."""

    def __init__(self, loader: Loader, imported: Callable[[types.ModuleType], None]) -> None:
        self.loader, self.imported = loader, imported

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.imported(module)


def imported_module(name: str) -> types.ModuleType | None:
    """The module if it is imported, waiting for another thread's import of it to end; None if nobody imports it."""
    module = sys.modules.get(name)
    if module is None:
        return None
    if getattr(module.__spec__, "_initializing", False):
        module = importlib.import_module(name)
    return module
