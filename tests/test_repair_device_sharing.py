"""Code compiled for one device as code for another (A17): what can be seen without a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from graphsafe.repairs import device_sharing
from graphsafe.repairs.device_sharing import (
    CannotMove,
    _copy_choices,
    choice_file,
    kernel_sources,
    move,
    moved_code,
)

CODE = """
triton_poi_fused_0 = async_compile.triton('triton_poi_fused_0', '''
import triton
# in cuda:0
@triton_heuristics.pointwise(
    triton_meta={'device': DeviceProperties(type='cuda', index=0, multi_processor_count=132), 'xindex=0': 10},
)
def triton_poi_fused_0(x): tmp0 = "\\\\n"
''', device_str='cuda')
def call(args):
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = torch.ops.aten.full.default([10], 0, device=device(type='cuda', index=0), pin_memory=False)
        stream0 = get_raw_stream(0)
        triton_poi_fused_0.run(buf0, 0, stream=stream0)
"""


def on(device: int) -> str:
    moved = CODE.replace("index=0,", f"index={device},").replace("index=0)", f"index={device})")
    for name in ("_DeviceGuard", "set_device", "get_raw_stream"):
        moved = moved.replace(f"{name}(0)", f"{name}({device})")
    return moved.replace("cuda:0", f"cuda:{device}")


def test_moved_code_names_the_other_device_wherever_a_device_is_named_and_nowhere_else() -> None:
    assert moved_code(CODE, 0, 3) == on(3)
    assert moved_code(on(3), 3, 12) == on(12)
    assert moved_code(on(12), 12, 0) == CODE
    assert "'xindex=0': 10" in moved_code(CODE, 0, 3)


def test_moved_code_refuses_code_that_names_a_third_device() -> None:
    with pytest.raises(CannotMove, match="names device 2"):
        moved_code(CODE + "        stream2 = get_raw_stream(2)\n", 0, 1)


def test_kernel_sources_are_the_strings_that_torch_compiles() -> None:
    (source,) = kernel_sources(CODE)
    assert source.startswith("\nimport triton\n") and 'tmp0 = "\\n"' in source
    assert kernel_sources("x = other.call('a', 'b')\n") == []


def compiled(**changes: Any) -> Any:
    fields = {
        "source_code": CODE,
        "cache_key": "former",
        "device_idxs": {0},
        "constants": {"one": torch.ones(1)},
        "_triton_bundle": None,
    }
    return SimpleNamespace(**{**fields, **changes})


def test_a_compiled_graph_moves_with_its_key_and_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_sharing, "_copy_choices", lambda *_: None)
    graph = compiled()
    move(graph, 0, 1)
    assert graph.source_code == on(1)
    assert graph.device_idxs == {1} and graph.cache_key not in ("former", compiled().cache_key)
    assert graph.constants["one"].device.type == "cpu"
    again = compiled()
    move(again, 0, 1)
    assert again.cache_key == graph.cache_key


def test_the_autotuners_choices_go_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    source, target = (Path(choice_file(kernel_sources(code)[0])) for code in (CODE, on(1)))
    _copy_choices(CODE, on(1))  # nothing was chosen yet
    assert source != target and not target.exists()
    source.write_text("chosen")
    _copy_choices(CODE, on(1))
    assert target.read_text() == "chosen"
    source.write_text("chosen later")
    _copy_choices(CODE, on(1))
    assert target.read_text() == "chosen"  # the new kernel's own choice stays


class OnDevice(torch.nn.Module):
    def __init__(self, device: object) -> None:
        super().__init__()
        self.device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros_like(x, device=self.device)


@pytest.fixture
def fake() -> Any:
    with FakeTensorMode() as mode:
        x: Any = torch.empty(4)
    del mode
    x.fake_device = torch.device("cuda:1")  # as a machine with GPUs makes it
    return x


@pytest.mark.parametrize("device", [torch.device("cuda:1"), "cuda:1"])
def test_a_graph_is_looked_up_as_on_another_device_and_is_the_same_afterwards(device: object, fake: Any) -> None:
    graph = torch.fx.symbolic_trace(OnDevice(device))
    before = graph.code
    assert device_sharing._only_device(graph, [fake]) == 1
    with device_sharing._as_on(graph, [fake], 1, 0):
        graph.recompile()
        assert fake.device == torch.device("cuda:0")
        assert "cuda:1" not in graph.code and "index=1" not in graph.code
        assert device_sharing._only_device(graph, [fake]) == 0
    assert fake.device == torch.device("cuda:1")
    assert graph.code == before


def test_only_device_is_none_where_a_graph_may_not_be_on_one_device_alone(fake: Any) -> None:
    plain = torch.fx.symbolic_trace(OnDevice("cpu"))
    assert device_sharing._only_device(plain, [fake]) == 1
    assert device_sharing._only_device(plain, []) is None
    assert device_sharing._only_device(plain, [torch.ones(4)]) is None  # a real tensor
    assert device_sharing._only_device(torch.fx.symbolic_trace(OnDevice("cuda:2")), [fake]) is None
    assert device_sharing._only_device(torch.fx.symbolic_trace(lambda x: x.cuda(1)), [fake]) is None
