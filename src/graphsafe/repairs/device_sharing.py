"""A17: the same model compiled for a second device of the same kind costs a second full compile.

Cause: the keys of torch's caches, and the code that Inductor writes, name the device's index.

The repair lets a graph that was compiled for one device be found by another of the same kind. When torch's AOT cache
has nothing for a graph, the graph is looked up once more as if it were on each device that has compiled already. What
is found is loaded with the indices in Inductor's code exchanged, its kernels' binaries and the choices of its autotuner
taken along. So Dynamo traces the model once more, and nothing is lowered, scheduled or compiled again; and both devices
run the same kernels.

It leaves alone what is not plainly the same: graphs on several devices, or with constants on one; C++ wrapper code;
compiled autograd; and every graph whose first compile torch did not cache (forward and backward have to be compiled by
then).
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import os
import re
import shutil
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from ._patches import Evidence, Patches, RepairError

AOT_CACHE: Final = "torch._functorch._aot_autograd.autograd_cache"
CODE_CACHE: Final = "torch._inductor.codecache"
FAULT: Final = "A17"
MODULES: Final = (AOT_CACHE, CODE_CACHE)
EVIDENCE: Final = Evidence(
    fault="the same model compiled for a second device of the same kind costs a second full compile",
    reports=(),
    versions="all read, 2.9 to 2.15",
)

_patches = Patches()
_compiled_on: list[int] = []  # indices of the CUDA devices that something was compiled for; under the compile lock


def undo() -> None:
    _patches.undo()
    _compiled_on.clear()


class CannotMove(Exception):
    """What was found is bound to its device in a way that is not known."""


class _PerThread(threading.local):
    """From which device's code to which this thread loads, if it does."""

    def __init__(self) -> None:
        self.move: tuple[int, int] | None = None


_per_thread = _PerThread()


def probe(module: types.ModuleType) -> bool:
    """Whether torch keys what it caches by the device's index, as every torch read does."""
    name = "AOTAutogradCache" if module.__name__ == AOT_CACHE else "FxGraphCache"
    return hasattr(module, name)


def repair(module: types.ModuleType) -> None:
    """Look a graph up under other devices too, or load code for another device: as ``module`` says."""
    if module.__name__ == AOT_CACHE:
        _repair_lookup(module.AOTAutogradCache)
    else:
        _repair_load(module.FxGraphCache)


def _repair_lookup(cache: Any) -> None:
    if not isinstance(vars(cache).get("try_load"), staticmethod):
        raise RepairError("AOTAutogradCache has no try_load")
    original: Callable[..., Any] = cache.try_load
    signature = inspect.signature(original)
    if not {"mod", "args", "aot_config", "local"} <= set(signature.parameters):
        raise RepairError("AOTAutogradCache.try_load takes other arguments")

    @functools.wraps(original)
    def try_load(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs).arguments
        graph = getattr(bound["mod"], "gm", bound["mod"])
        device = _only_device(graph, bound["args"])
        if device is None:
            return result
        others = [index for index in _compiled_on if index != device and _same_kind(index, device)]
        if device not in _compiled_on:
            _compiled_on.append(device)
        if not _missed(result) or not bound["local"]:
            return result
        config = bound["aot_config"]
        info = getattr(config, "cache_info", None)
        for other in others:
            with _as_on(graph, bound["args"], device, other), _moving(other, device):
                found = original(*args, **kwargs)
            if not _missed(found):
                return found
            if hasattr(config, "cache_info") and config.cache_info is not info:
                config.cache_info = info  # what is compiled now is kept under this device's key
        return result

    _patches.attribute(cache, "try_load", staticmethod(try_load))


def _missed(result: Any) -> bool:
    return (result[0] if isinstance(result, tuple) else result) is None


def _repair_load(cache: Any) -> None:
    if not isinstance(vars(cache).get("cache_hit_post_compile"), staticmethod):
        raise RepairError("FxGraphCache has no cache_hit_post_compile")
    original: Callable[..., Any] = cache.cache_hit_post_compile

    @functools.wraps(original)
    def cache_hit_post_compile(graph: Any, *args: Any, **kwargs: Any) -> Any:
        if _per_thread.move is not None:
            move(graph, *_per_thread.move)
        return original(graph, *args, **kwargs)

    _patches.attribute(cache, "cache_hit_post_compile", staticmethod(cache_hit_post_compile))


@functools.cache
def _kind(index: int) -> tuple[object, ...]:
    properties = torch.cuda.get_device_properties(index)
    names = ("name", "major", "minor", "multi_processor_count", "total_memory", "warp_size")
    return tuple(getattr(properties, name, None) for name in names)


def _same_kind(one: int, other: int) -> bool:
    return _kind(one) == _kind(other)


def _only_device(graph: Any, args: Any) -> int | None:
    """The index of the one CUDA device that a graph works on; None where it is not plain that there is one."""
    from torch._dynamo import compiled_autograd
    from torch._inductor import config
    from torch._subclasses.fake_tensor import FakeTensor

    if config.cpp_wrapper or getattr(compiled_autograd, "compiled_autograd_enabled", False):
        return None
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if any(type(tensor) is not FakeTensor and not _is_fake_parameter(tensor) for tensor in tensors):
        return None
    devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
    for module in _graph_modules(graph):
        for node in module.graph.nodes:
            devices |= {device for device in _devices((node.args, node.kwargs)) if device.type != "cpu"}
            if node.op == "get_attr" and _on_accelerator(module, node.target):
                return None
            if node.op == "call_method" and node.target == "cuda":
                return None
    if len(devices) != 1:
        return None
    (device,) = devices
    return device.index if device.type == "cuda" and tensors else None


def _is_fake_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) and hasattr(tensor, "fake_device")


def _on_accelerator(module: torch.fx.GraphModule, target: str) -> bool:
    value: Any = module
    for name in target.split("."):
        value = getattr(value, name, None)
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


def _graph_modules(graph: Any) -> list[torch.fx.GraphModule]:
    return [module for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]


def _as_device(value: object) -> torch.device | None:
    """The device that a constant of a graph names, with an index."""
    if isinstance(value, str) and re.fullmatch(r"cuda:\d+", value):
        return torch.device(value)
    return value if isinstance(value, torch.device) and value.index is not None else None


def _devices(aggregate: Any) -> set[torch.device]:
    found: set[torch.device] = set()

    def see(value: Any) -> Any:
        device = _as_device(value)
        if device is not None:
            found.add(device)
        return value

    torch.fx.node.map_aggregate(aggregate, see)
    return found


@contextlib.contextmanager
def _as_on(graph: Any, args: Any, device_index: int, other_index: int) -> Iterator[None]:
    """The graph and its fake inputs as they would be on another device; afterwards as they were."""
    device, other = torch.device("cuda", device_index), torch.device("cuda", other_index)

    def exchange(value: Any) -> Any:
        if _as_device(value) != device:
            return value
        return str(other) if isinstance(value, str) else other

    nodes = [
        (node, node.args, node.kwargs)
        for module in _graph_modules(graph)
        for node in module.graph.nodes
        if device in _devices((node.args, node.kwargs))
    ]
    fakes: list[Any] = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.device == device]
    try:
        for node, positional, keyword in nodes:
            node.args = torch.fx.node.map_aggregate(positional, exchange)
            node.kwargs = torch.fx.node.map_aggregate(keyword, exchange)
        for fake in fakes:
            fake.fake_device = other
        yield
    finally:
        for fake in fakes:
            fake.fake_device = device
        for node, positional, keyword in nodes:
            node.args, node.kwargs = positional, keyword
        for module in {id(node.graph): node.graph.owning_module for node, *_ in nodes}.values():
            if module is not None:
                module.recompile()


@contextlib.contextmanager
def _moving(source: int, target: int) -> Iterator[None]:
    _per_thread.move = (source, target)
    try:
        yield
    finally:
        _per_thread.move = None


def move(graph: Any, source: int, target: int) -> None:
    """Make a compiled graph that was read from the cache one for another device.

    Raises:
        CannotMove: it names a third device. (Torch takes any error of a cache for a miss.)
    """
    from torch._inductor import codecache

    former, code = graph.source_code, moved_code(graph.source_code, source, target)
    bundle = graph._triton_bundle
    if bundle is not None:
        artifacts = [dataclasses.replace(artifact, device=target) for artifact in bundle.kernel_artifacts]
        graph._triton_bundle = dataclasses.replace(bundle, kernel_artifacts=artifacts, static_autotuners=[])
    graph.constants = {
        name: value.to(torch.device("cuda", target)) if isinstance(value, torch.Tensor) and value.is_cuda else value
        for name, value in (graph.constants or {}).items()
    }
    graph.device_idxs = type(graph.device_idxs)([target])
    graph.source_code, graph.cache_key = code, codecache.code_hash(code)
    with contextlib.suppress(Exception):  # without it the autotuner chooses again
        _copy_choices(former, code)


# each place in Inductor's code that holds a device's index
_PLACES: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?<=type='cuda', index=)(\d+)\b",
        r"(?<=_DeviceGuard\()(\d+)(?=\))",
        r"(?<=torch\.cuda\.set_device\()(\d+)(?=\))",
        r"(?<=get_raw_stream\()(\d+)(?=\))",
        r"(?<=\bcuda:)(\d+)\b",
    )
)


def moved_code(code: str, source: int, target: int) -> str:
    """Inductor's code for device ``source`` as code for device ``target``.

    Raises:
        CannotMove: it names another device as well.
    """

    def exchange(match: re.Match[str]) -> str:
        if int(match[1]) != source:
            raise CannotMove(f"the code names device {match[1]}, and not {source} alone: {match.string[:80]}")
        return str(target)

    for place in _PLACES:
        code = place.sub(exchange, code)
    return code


def kernel_sources(code: str) -> list[str]:
    """The sources of the Triton kernels that Inductor's code has compiled, in order."""
    found = []
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Call(func=ast.Attribute(attr="triton"), args=[_, ast.Constant(value=str(source)), *_]):
                found.append(source)
    return found


def _copy_choices(former: str, code: str) -> None:
    """Give the new kernels what the autotuner chose for the former ones, which differ in the device's index alone."""
    for old, new in zip(kernel_sources(former), kernel_sources(code), strict=True):
        source, target = choice_file(old), choice_file(new)
        if os.path.exists(source) and not os.path.exists(target):
            shutil.copyfile(source, target)


def choice_file(kernel: str) -> str:
    """Where Inductor keeps what its autotuner chose for a kernel with this source."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime.autotune_cache import AutotuneCache

    path = PyCodeCache.write(kernel)[1]
    cache: Any = AutotuneCache.create({"autotune_remote_cache": False}, path, "")
    return str(cache.local_cache[1])
