"""A25: an import inside partly compiled code beside a compile that imports the same module."""

from __future__ import annotations

from pathlib import Path

from tests.helpers import SHOWS_FAULTS, run_program

PROGRAM = """
import os
import torch
import graphsafe as gs

if {installed}:
    gs.install()
sys.path.insert(0, {folder!r})

class Finder:
    def find_spec(self, name, path=None, target=None):  # a frame of Python's that Dynamo does not know
        return None

sys.meta_path.insert(0, Finder())
importing, compiling = threading.Event(), threading.Event()

@torch._dynamo.disable(recursive=False)
def load():
    importing.set()
    import loaded_inside
    return loaded_inside.value

def imports(x):
    y = x + 1
    torch._dynamo.graph_break()
    return y * load()

def backend(gm, example_inputs):  # called with the compile lock held
    compiling.set()
    assert importing.wait(60)
    time.sleep(0.5)  # until the other thread has the module's lock
    import loaded_inside
    return gm.forward

answers = []

def first():
    compiled = torch.compile(imports, backend="eager")
    answers.append(compiled(torch.ones(2)).tolist())

def second():
    answers.append(torch.compile(lambda x: x * 3, backend=backend)(torch.ones(2)).tolist())

# the parts of the first function before and after its break are there already
stand_in = sys.modules["loaded_inside"] = type(sys)("loaded_inside")
stand_in.value = 2.0
first()
del sys.modules["loaded_inside"]
importing.clear()
answers.clear()

threads = [threading.Thread(target=one, daemon=True) for one in (second, first)]
threads[0].start()
assert compiling.wait(60)
threads[1].start()
for thread in threads:
    thread.join({limit})
print(json.dumps(sorted(answers)))
sys.stdout.flush()
os._exit(0)
"""


def run(folder: Path, installed: bool, limit: float) -> object:
    (folder / "loaded_inside.py").write_text("value = 2.0\n")
    header = "import time\n"
    return run_program(header + PROGRAM.format(installed=installed, folder=str(folder), limit=limit))


def test_an_import_inside_compiled_code_and_a_compile_that_imports_both_end_and_hang_on_plain_torch(
    tmp_path: Path,
) -> None:
    if SHOWS_FAULTS:
        assert run(tmp_path, installed=False, limit=3.0) == [], "the pinned torch no longer shows the fault"
    assert run(tmp_path, installed=True, limit=60.0) == [[3.0, 3.0], [4.0, 4.0]]


COMPILED_AT_IMPORT = """
import torch
import graphsafe as gs

gs.install()
sys.path.insert(0, {folder!r})
import compiles_at_import
print(json.dumps([compiles_at_import.graphs, compiles_at_import.result]))
"""

MODULE = """
import torch

graphs = 0

def backend(gm, example_inputs):
    global graphs
    graphs += 1
    return gm.forward

result = torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2)).tolist()
"""


def test_a_module_that_calls_compiled_code_while_it_is_imported_compiles_it(tmp_path: Path) -> None:
    (tmp_path / "compiles_at_import.py").write_text(MODULE)
    assert run_program(COMPILED_AT_IMPORT.format(folder=str(tmp_path))) == [1, [2.0, 2.0]]
