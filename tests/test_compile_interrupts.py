"""A compile that an interrupt ends anywhere, or that a fork meets, leaves nothing behind."""

from __future__ import annotations

import os

import pytest

from .helpers import run_program

INTERRUPTED_EVERYWHERE = """
import itertools, logging, os
import torch, torch._dynamo
import graphsafe as gs
from graphsafe import compile_gate, context, gate
from graphsafe.repairs import compile_scope

logging.disable(logging.CRITICAL)
gs.install()
FILES = ("compile_gate.py", "compile_scope.py", "compile_confinement.py")
lines, target, where = 0, 0, None

def trace(frame, event, argument):
    global lines, where
    name = os.path.basename(frame.f_code.co_filename)
    if event == "call":
        return trace if name in FILES and "graphsafe" in frame.f_code.co_filename else None
    if event == "line":
        lines += 1
        if lines == target:
            where = f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
            sys.settrace(None)
            raise KeyboardInterrupt
    return trace

numbers = itertools.count()

def compile_once():
    names = {}
    exec(f"def f(x):\\n    return (x.sin() + {next(numbers)}).sum()\\n", names)
    with gs.thread_context("cpu") as context, context.eager():
        torch.compile(names["f"], backend="eager")(torch.ones(2))

def left_behind():
    torchs = torch._dynamo.convert_frame.compile_lock.lock
    return [name for name, is_left in {
        "a seat": bool(gate.held()) or any(one._holders or one._waiters for one in gate.all_gates()),
        "compiling": bool(compile_gate._depth.compiles or gate.compiling),
        "the compile lock": compile_gate._lock._is_owned(),
        "torch's compile lock": torchs._is_owned(),
        "an entry": bool(compile_scope._per_thread.locked),
        "a context": bool(context._per_thread.contexts),
        "confinement": not torch._C._is_multithreading_enabled(),
    }.items() if is_left]

found = []
torch.autograd.set_multithreading_enabled(True)
compile_once()
sys.settrace(trace)
compile_once()
sys.settrace(None)
num_lines = lines
for target in range(1, num_lines + 1):
    lines, where = 0, None
    try:
        sys.settrace(trace)
        compile_once()
        found.append(["no interrupt", where])
    except KeyboardInterrupt:
        pass
    except BaseException as error:
        found.append([repr(error), where])
    finally:
        sys.settrace(None)
    left = left_behind()
    if left:
        found.append([left, where])
        break
compile_once()
print(json.dumps([num_lines, found]))
"""


def test_a_compile_interrupted_at_any_line_of_its_scope_leaves_nothing_behind() -> None:
    num_lines, found = run_program(INTERRUPTED_EVERYWHERE)
    assert num_lines > 50, "the scope of a compile was not traced: the test shows nothing"
    assert found == []


FORKED = """
import os, signal
import torch, torch._dynamo
import graphsafe as gs
from graphsafe import compile_gate, gate
from graphsafe.repairs import compile_scope

gs.install()
torch.autograd.set_multithreading_enabled(False)    # as in a context
compiles, go_on = threading.Event(), threading.Event()

def slow(graph_module, inputs):
    compiles.set()
    assert go_on.wait(60)
    return graph_module.forward

def work():
    with gs.thread_context("cpu", seed=1) as context, context.eager():
        torch.compile(lambda x: x + 1, backend=slow)(torch.ones(1))

thread = threading.Thread(target=work)
thread.start()
assert compiles.wait(60)                            # 1. the thread compiles, and gave its seat back
reader, writer = os.pipe()
child = os.fork()                                   # 2. the child has no such thread
if child == 0:
    signal.alarm(30)
    found = [compile_gate._depth.compiles, len(compile_scope._per_thread.locked), len(gate.compiling)]
    found += [len(one._holders) for one in gate.all_gates()]
    found.append(torch._C._is_multithreading_enabled())
    scoped = []
    def backend(graph_module, inputs):
        scoped.append(threading.get_ident() in gate.compiling and not gate.held())
        return graph_module.forward
    with gs.thread_context("cpu", seed=2) as context, context.eager():
        value = torch.compile(lambda x: x + 2, backend=backend)(torch.ones(1)).item()
    os.write(writer, json.dumps([found, scoped, value]).encode())
    os._exit(0)
os.close(writer)
status = os.waitpid(child, 0)[1]
answer = os.read(reader, 10_000).decode()
go_on.set()                                         # 3. the parent's compile goes on
thread.join(60)
print(json.dumps([status, json.loads(answer or "null"), gate.all_gates()[0]._holders, len(gate.compiling)]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_child_forked_while_another_thread_compiles_is_as_if_it_had_never_compiled() -> None:
    status, answer, holders, compiling = run_program(FORKED)
    assert (status, holders, compiling) == (0, [], 0)
    found, scoped, value = answer
    assert not any(found), found
    assert (scoped, value) == ([True], 3.0)
