"""A22: guards go out of use while another thread evaluates them: on plain torch they are freed under its feet."""

from __future__ import annotations

from types import SimpleNamespace

import graphsafe
from graphsafe.repairs import freed_guards
from tests.helpers import SHOWS_FAULTS, run_program

PROGRAM = """
import gc, os, sys, weakref
import torch
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
import graphsafe as gs

installed = {installed}
if installed:
    gs.install()
inside, go_on = threading.Event(), threading.Event()

def new_type():
    class Factor:
        value = 2.0
    return Factor

def scaled(x, factor):
    return x * factor.value

def wait(_):
    if threading.current_thread() is slow:
        inside.set()
        assert go_on.wait(60)
    return True

compiled = torch.compile(scaled, backend="eager")
answers = []
first, second = new_type(), new_type()
slow = threading.Thread(target=lambda: answers.append(compiled(torch.ones(2), second()).tolist()))
compiled(torch.ones(2), first())
[entry] = _debug_get_cache_entry_list(scaled.__code__)
passes = lambda _: True
for guard in (wait, passes):
    try:
        entry.guard_manager.root.add_lambda_guard(guard, ["in Python"], None)
    except TypeError:  # older torch
        entry.guard_manager.root.add_lambda_guard(guard, ["in Python"])
kept = weakref.ref(passes)  # lives as long as the guards
del guard, passes, entry

slow.start()
assert inside.wait(60)  # 1. a thread is in the guards of the first type's entry
del first
gc.collect()  # 2. the first type ends, and its guards go out of use
seen = [kept() is not None]
if not installed:  # to go on is to crash
    print(json.dumps(seen))
    sys.stdout.flush()
    os._exit(0)
go_on.set()  # 3. the thread goes on in them
slow.join()
assert answers == [[2.0, 2.0]]
seen.append(kept() is not None)
del second
gc.collect()  # 4. other guards go out of use, and nobody is inside a compiled call
seen.append(kept() is not None)
print(json.dumps(seen))
"""


def test_guards_live_as_long_as_a_thread_is_in_them_and_no_longer_than_until_others_go() -> None:
    assert run_program(PROGRAM.format(installed=True)) == [True, True, False]
    if SHOWS_FAULTS:
        assert run_program(PROGRAM.format(installed=False)) == [False]


MANY = """
import torch
import graphsafe as gs

gs.install()
torch._dynamo.config.recompile_limit = 1000

def train(index):
    for _ in range(4):
        model = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Tanh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = torch.compile(optimizer.step, backend="eager")
        for number in range(3):
            model(torch.full((2, 5), float(index + number))).square().sum().backward()
            step()
            optimizer.zero_grad()

threads = [threading.Thread(target=train, args=(index,)) for index in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps("whole"))
"""


def test_threads_whose_optimizers_come_and_go_do_not_crash() -> None:
    assert run_program(MANY) == "whole"  # plain torch crashes in about every other run


def test_undo_frees_what_nobody_can_be_in() -> None:
    was_installed = bool(graphsafe.installed())
    graphsafe.install()
    guards = SimpleNamespace()
    freed_guards._kept.append(freed_guards._Kept(guards, None, {-1}))  # no thread has this identity
    try:
        graphsafe.uninstall()
        assert all(kept.guards is not guards for kept in freed_guards._kept)
    finally:
        if was_installed:
            graphsafe.install()
