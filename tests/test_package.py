"""What holds for the package as a whole: layers, imports, public names, private names of torch, file sizes."""

from __future__ import annotations

import ast
import inspect
import pickle
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import graphsafe as gs

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "graphsafe"
EXAMPLES = ROOT / "examples"
MAX_LINES = 400

# A module imports only from those above it. __init__ may import all of them; repairs is the package.
LAYERS = (
    "errors",
    "padding",
    "paths",
    "reads",
    "walk",
    "repairs",
    "deadlines",
    "tasks",
    "failures",
    "cuda_errors",
    "holds",
    "gate",
    "waits",
    "compile_gate",
    "own_streams",
    "context",
    "leaf_owners",
    "tree_scopes",
    "attach",
    "workers",
    "executor",
    "steps",
    "buffers",
    "optimizers",
    "rules",
    "placement",
    "recording",
    "snapshot",
    "watch",
    "lint",
    "collector",
    "graph",
    "sessions",
    "capture",
    "structure",
    "signature",
    "bridge",
    "memory",
    "draws",
    "call_buffers",
    "cpu_buffers",
    "fast_path",
    "plans",
    "streams",
    "graphed",
    "graphed_modules",
    "loop",
    "step_plans",
    "train_step",
    "compile",
    "stats",
    "devices",
    "model_config",
    "model_packages",
    "fault_probes",
    "doctor",
)

PUBLIC_NAMES = {
    # contexts and workers
    "Executor",
    "ThreadContext",
    "Worker",
    "WorkerGroup",
    "attach",
    "current_context",
    "spawn",
    "thread_context",
    # compile
    "compile",
    "install",
    "installed",
    "uninstall",
    # step markers
    "mark_step_begin",
    "step",
    "steps",
    # graphs and whole training steps
    "Graph",
    "GraphedCallable",
    "TrainStep",
    "graphed",
    "make_graphed_callables",
    "capture",
    # static buffers and fixed shapes
    "BufferRing",
    "Spec",
    "StaticBuffers",
    "padding",
    # knowing what happens
    "Finding",
    "Stats",
    "lint",
    "stats",
    # errors and warnings
    "CaptureError",
    "GateTimeout",
    "GraphsafeError",
    "GraphsafeWarning",
    "NoContextError",
    "RingClosed",
    "ShapeMismatchError",
    "UnsupportedTorchError",
    "WrongThreadError",
}

PADDING_NAMES = {
    "Buckets",
    "Packed",
    "bucket_length",
    "fixed_nonzero",
    "masked_mean",
    "pack",
    "pad_to",
    "pad_to_bucket",
    "random_topk",
    "unpad",
}


def python_files(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    """The layer a file of the package belongs to."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return parts[0]


def internal_imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, layer) of every import from the package, wherever in the file it stands."""
    package = ("graphsafe", *path.relative_to(SOURCE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        found: list[tuple[str, ...]] = []
        if isinstance(node, ast.Import):
            found = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            found = [(*base, alias.name) for alias in node.names]
        for full_name in found:
            if full_name[0] == "graphsafe":
                yield node.lineno, full_name[1] if len(full_name) > 1 else "__init__"


def chain(node: ast.expr) -> list[str]:
    """``torch.cuda.graphs`` as a list; empty where it is no plain chain of names."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (head := chain(node.value)):
        return [*head, node.attr]
    return []


def is_private(name: str) -> bool:
    # torch documents its foreach functions under their underscored names.
    return name.startswith("_") and not name.startswith(("__", "_foreach_"))


def private_names(path: Path, root: str) -> Iterator[tuple[int, str]]:
    """(line, name) of every private name below the package ``root`` that a file uses."""
    tree = ast.parse(path.read_text())
    aliases = {root}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname for alias in node.names if alias.asname and alias.name.split(".")[0] == root}
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == root]
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == root:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if any(map(is_private, name.split("."))))
    for node in ast.walk(tree):
        parts = chain(node) if isinstance(node, ast.Attribute) else []
        if isinstance(node, ast.Call) and chain(node.func) == ["getattr"] and len(node.args) > 1:
            key = node.args[1]
            parts = [*chain(node.args[0]), str(key.value)] if isinstance(key, ast.Constant) else []
        if parts and parts[0] in aliases and any(map(is_private, parts)):
            yield node.lineno, ".".join(parts)


def test_every_module_has_its_place_in_the_layers() -> None:
    modules = {module_of(path) for path in python_files(SOURCE)} - {"__init__", "__main__"}
    assert modules == set(LAYERS)


@pytest.mark.parametrize("path", python_files(SOURCE), ids=name_of)
def test_a_module_imports_only_from_those_above_it(path: Path) -> None:
    module = module_of(path)
    if module in ("__init__", "__main__"):
        return
    allowed = set(LAYERS[: LAYERS.index(module)])
    if path.parent != SOURCE:
        allowed.add(module)  # within its own package
    wrong = [f"line {line}: {layer}" for line, layer in internal_imports(path) if layer not in allowed]
    assert not wrong, f"{name_of(path)} imports from below itself: {wrong}"


@pytest.mark.parametrize("path", python_files(SOURCE, EXAMPLES), ids=name_of)
def test_private_names_of_torch_are_used_in_repairs_alone(path: Path) -> None:
    if SOURCE / "repairs" in path.parents:
        return
    assert not list(private_names(path, "torch"))


@pytest.mark.parametrize("path", python_files(EXAMPLES), ids=name_of)
def test_examples_use_public_names_alone(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not list(private_names(path, "graphsafe"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "graphsafe":
            names = {alias.name for alias in node.names}
            known = PUBLIC_NAMES if node.module == "graphsafe" else PADDING_NAMES
            assert node.module in ("graphsafe", "graphsafe.padding") and names <= known
        elif isinstance(node, ast.Import):
            imported = {alias.name for alias in node.names if alias.name.split(".")[0] == "graphsafe"}
            assert imported <= {"graphsafe"}
        elif isinstance(node, ast.Attribute) and chain(node)[:1] in (["gs"], ["graphsafe"]):
            assert chain(node)[1] in PUBLIC_NAMES


def test_importing_graphsafe_initialises_no_cuda_and_loads_no_compiler() -> None:
    program = """
import sys, threading
import graphsafe, torch
loaded = [name for name in sys.modules if name.split(".")[:2] in (["torch", "_dynamo"], ["torch", "_inductor"])]
assert not loaded, loaded
assert not torch.cuda.is_initialized()
assert threading.active_count() == 1
assert torch.is_grad_enabled() and torch.initial_seed() == torch.default_generator.initial_seed()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_public_names_are_those_of_this_release() -> None:
    assert set(gs.__all__) == PUBLIC_NAMES and len(gs.__all__) == len(PUBLIC_NAMES)
    assert set(gs.padding.__all__) == PADDING_NAMES
    stray = {n for n, value in vars(gs).items() if not n.startswith("_") and not isinstance(value, ModuleType)}
    assert stray <= PUBLIC_NAMES


@pytest.mark.parametrize("name", sorted(PUBLIC_NAMES))
def test_a_public_name_has_a_docstring(name: str) -> None:
    assert inspect.getdoc(getattr(gs, name))


@pytest.mark.parametrize("path", python_files(SOURCE, EXAMPLES), ids=name_of)
def test_a_file_is_short_and_begins_with_what_it_is_for(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < MAX_LINES
    assert ast.get_docstring(ast.parse(text))


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert gs.__version__ == project["version"]
    assert f"## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_an_old_torch_is_refused_with_what_to_do() -> None:
    program = "import torch; torch.__version__ = '2.8.1'\nimport graphsafe"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 1 and "UnsupportedTorchError" in result.stderr and "pip install" in result.stderr
    error = gs.UnsupportedTorchError("2.8", "2.9")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
