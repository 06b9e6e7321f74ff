"""What this installation has, lacks and had repaired: versions, faults of torch, devices, a model's packages.

Guarantees:
- A status says what was looked at: a repair's own probe and outcome, or a probe by behaviour in a process of its own.
- The process stays as it is, but for ``install()`` and the torch modules that it repairs, which are imported.
- Where torch sees no CUDA device, CUDA is not initialised.
"""

from __future__ import annotations

import platform
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import torch

from . import devices, repairs
from .compile import install
from .errors import MINIMUM_TORCH
from .fault_probes import Finding, Probes, Status
from .model_packages import ModelReport, inspect_model, version_of
from .repairs import stance

MAXIMUM_TORCH = (2, 15)  # the newest that the tests have run on
_BY_PROBE: Mapping[str, str] = {
    "repaired": "the repair's probe found it, and the repair is in",
    "absent": "the repair's probe says that this torch lacks it",
}
_WIDTH = 100
_GIB = 2**30


@dataclass(frozen=True)
class Fault:
    """One fault of torch on this installation.

    Attributes:
        id: as in the documentation of faults, such as ``"A1"``.
        status: ``"absent"``: this torch, or this machine, lacks it; ``"repaired"``; ``"present"``.
        fault: what users see.
        detail: how the status is known.
        advice: what to do where it is present; empty where it is not.
        checked: False where nothing could be probed here.
        attention: whether it is present although graphsafe should end it.
    """

    id: str
    status: Status
    fault: str
    detail: str
    advice: str = ""
    checked: bool = True
    attention: bool = False


@dataclass(frozen=True)
class Report:
    """What ``diagnose()`` found. ``str()`` makes a page of it, ``as_json()`` an object.

    Attributes:
        versions: of python, graphsafe, torch, triton, cuda and driver; None where there is none.
        supported: whether this torch is in the range that graphsafe is tested on.
        faults: by id.
        model: None where no model was asked about.
        attention: what somebody should do something about.
    """

    versions: Mapping[str, str | None]
    supported: bool
    faults: Mapping[str, Fault]
    devices: devices.Devices
    model: ModelReport | None
    attention: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The report as plain dicts, lists, strings and numbers."""
        found = asdict(self.devices)
        model = None if self.model is None else {**asdict(self.model), "missing": _packages(self.model)}
        return {
            **self.versions,
            "torch_supported": self.supported,
            "faults": {fault.id: fault.status for fault in self.faults.values()},
            "details": {fault.id: asdict(fault) for fault in self.faults.values()},
            "devices": found["devices"],
            "links": found["links"],
            "notes": found["notes"],
            "model": model,
            "attention": list(self.attention),
        }

    def __str__(self) -> str:
        lines = [*_version_lines(self), "", *_device_lines(self.devices), "", "Faults of torch with threads"]
        for fault in self.faults.values():
            lines += _wrapped(f"  {fault.id:<4} {fault.status:<9} ", fault.fault)
            if fault.detail not in _BY_PROBE.values():
                lines += _wrapped(" " * 17 + "why: ", fault.detail)
            if fault.advice:
                lines += _wrapped(" " * 17 + "do:  ", fault.advice)
        if self.model is not None:
            lines += ["", *_model_lines(self.model)]
        lines += ["", "Needs attention" if self.attention else "Nothing needs attention."]
        for text in self.attention:
            lines += _wrapped("  - ", text)
        return "\n".join(lines)


def diagnose(model: str | None = None) -> Report:
    """Look at this installation; takes some seconds.

    Installs the repairs for this process, as ``compile()`` does, and imports what they change.

    Args:
        model: a directory, a config.json, a .gguf file or a name on the hub, to say which packages it needs.
    Raises:
        ModelConfigError: the model has no configuration that can be read.
    Thread safety: any thread.
    Sync: none.
    """
    model_report = inspect_model(model) if model is not None else None
    probes = Probes()
    try:
        set_now = stance.current()
        hardware = devices.look()
        faults = _faults(_repaired_faults(), probes)
    finally:
        probes.close()
    torch_version = str(torch.__version__)
    versions = {
        "graphsafe": import_module(__package__).__version__,
        "python": platform.python_version(),
        "torch": torch_version,
        "triton": version_of("triton", "triton"),
        "cuda": torch.version.cuda,
        "driver": hardware.driver,
    }
    release = tuple(int(part) for part in torch_version.split("+")[0].split(".")[:2])
    supported = MINIMUM_TORCH <= release <= MAXIMUM_TORCH
    attention = []
    if not supported:
        attention.append(f"torch {torch_version} is not tested with graphsafe: {_range()} is")
    if set_now is not None:
        attention.append(f"a stance is set for the whole process right now, every thread's: {set_now}")
    if hardware.devices and versions["triton"] is None:
        attention.append("triton is missing: torch.compile cannot compile for a GPU without it")
    attention += hardware.attention
    attention += [f"{one.id} {one.status}: {one.detail}" for one in faults.values() if one.attention]
    if model_report is not None:
        attention += [f"{need.package} is missing: {need.cost} ({need.why})" for need in model_report.missing]
        attention += model_report.doubts
    return Report(versions, supported, faults, hardware, model_report, tuple(attention))


# Faults that may have no repair of their own: what users see, and what to do where they are present.
_SPAWN = "start threads with graphsafe.spawn(), a WorkerGroup or an Executor"
_UNREPAIRED = {
    "A3": ("a hang with a lock around a step and gradient checkpointing", f"{_SPAWN}, or enter a thread_context()"),
    "A8": ("settings made on the main thread are back at their defaults in a worker", _SPAWN),
    "A9": (
        "torch.compiler.set_stance in one thread changes all threads",
        "set a stance before the threads start and leave it; for one function use torch.compiler.disable()",
    ),
    "A10": (
        "one thread's skip_guard_eval_unsafe gives other threads wrong results",
        "do not skip guards while other threads run compiled code",
    ),
    "A11": ("KeyError in guarded_backend_cache when threads make a first call together", "call once, then start them"),
    "A14": ("recompiles, since threads differ in grad mode, autocast or default device", _SPAWN),
}
_NO_REPAIR = ("A9", "A10")  # graphsafe promises no end to them


def _faults(known: Mapping[str, Fault], probes: Probes) -> Mapping[str, Fault]:
    """Every fault of part A, and those of part B that have a repair, in order."""
    found = dict(known)
    findings = probes.results()
    for fault, (seen, advice) in _UNREPAIRED.items():
        one = findings.get(fault)
        if fault in found and (one is None or not one.checked or one.status != "present"):
            continue  # the repair's own word, unless the behaviour contradicts it
        if one is None:
            one = Finding("present", "not probed, and this graphsafe has no repair for it", checked=False)
        failed = fault in findings and (not one.checked or (one.status == "present" and fault not in _NO_REPAIR))
        advice = advice if one.status == "present" else ""
        found[fault] = Fault(fault, one.status, seen, one.detail, advice, one.checked, failed)
    return {fault: found[fault] for fault in sorted(found, key=lambda fault: (fault[0], int(fault[1:])))}


def _repaired_faults() -> dict[str, Fault]:
    """The faults that have a repair: installs all, and has torch import what they change."""
    install()
    troubles: dict[str, Exception] = {}
    for name in sorted({name for repair in repairs.REPAIRS for name in repair.MODULES}):
        try:
            import_module(name)
        except Exception as error:
            troubles[name] = error
    outcomes = repairs.statuses()
    return {repair.FAULT: _fault(repair, outcomes.get(repair.FAULT, "pending"), troubles) for repair in repairs.REPAIRS}


def _fault(repair: repairs.Repair, outcome: repairs.Status, troubles: Mapping[str, Exception]) -> Fault:
    seen = repair.EVIDENCE.fault
    missing = {name: troubles[name] for name in repair.MODULES if name in troubles}
    advice = "report it, with this page; graphsafe's other repairs work"
    if outcome == "repaired" or outcome == "absent":
        return Fault(repair.FAULT, outcome, seen, _BY_PROBE[outcome])
    if outcome == "pending" and missing and all(isinstance(e, ModuleNotFoundError) for e in missing.values()):
        detail = f"not installed here: {', '.join(sorted(missing))}"
        return Fault(repair.FAULT, "absent" if len(missing) == len(repair.MODULES) else "repaired", seen, detail)
    reason = "; ".join(f"{name}: {error}" for name, error in missing.items()) or _reason(repair)
    return Fault(repair.FAULT, "present", seen, f"the repair failed ({reason})", advice, attention=True)


def _reason(repair: repairs.Repair) -> str:
    """Why a repair does not fit this torch, as its probe says it when asked again."""
    for name in repair.MODULES:
        try:
            repair.probe(import_module(name))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "install() has warned why"


# The page


def _range() -> str:
    return f"{'.'.join(map(str, MINIMUM_TORCH))} to {'.'.join(map(str, MAXIMUM_TORCH))}"


def _packages(model: ModelReport) -> list[str]:
    return [need.package for need in model.missing]


def _wrapped(head: str, text: str) -> list[str]:
    """``text`` after ``head``, in lines that fit; what follows the first is indented below the text."""
    return textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head)) or [head.rstrip()]


def _version_lines(report: Report) -> Iterator[str]:
    missing = {"triton": "not installed", "cuda": "this torch is built without it", "driver": "none found"}
    for name, version in report.versions.items():
        text = version or missing.get(name, "unknown")
        if name == "torch":
            text += f" ({'supported' if report.supported else 'not tested'}: {_range()})"
        yield f"{name:<10} {text}"


def _device_lines(found: devices.Devices) -> Iterator[str]:
    yield "Devices" if found.devices else "Devices: torch sees no CUDA device"
    for one in found.devices:
        free = "?" if one.free_bytes is None else f"{one.free_bytes / _GIB:.1f}"
        memory = f"{free} of {one.total_bytes / _GIB:.1f} GiB free"
        yield f"  cuda:{one.index}  {one.name}, compute capability {one.capability}, {memory}"
    if found.links:
        links = {frozenset((link.first, link.second)): link for link in found.links}
        yield "  links (- : no peer access)"
        yield "        " + "".join(f"{one.index:>8}" for one in found.devices)
        for one in found.devices:
            pairs = (links.get(frozenset((one.index, other.index))) for other in found.devices)
            cells = ("." if p is None else f"{'' if p.peer_access else '-'}{p.label or '?'}" for p in pairs)
            yield f"  {one.index:>6}" + "".join(f"{cell:>8}" for cell in cells)
        for kind in sorted({f"{link.label}: {link.kind}" for link in found.links if link.label}):
            yield f"  {kind}"
    for note in found.notes:
        yield from _wrapped("  ", note)


def _model_lines(model: ModelReport) -> Iterator[str]:
    yield from _wrapped("Model ", f"{model.name} ({', '.join(model.model_types) or 'it names no model_type'})")
    if not model.known:
        yield "  this model type is not known: nothing can be said about the kernels it uses"
    for need in model.needs:
        have = f"have     {need.found}" if need.found else f"missing  {need.package}"
        yield from _wrapped(f"  {have}: ", need.why if need.found else f"{need.cost} ({need.why})")
    for doubt in model.doubts:
        yield from _wrapped("  ", doubt)
    if model.known and not model.missing and not model.doubts:
        yield "  no optional package is missing"
    for note in model.notes:
        yield from _wrapped("  note: ", note)
