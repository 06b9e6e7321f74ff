"""smoke: what it times, counts, compares with the plan, and finds in a profile."""

from __future__ import annotations

import json
import types

import pytest
import torch

from examples.dflash import cost
from examples.dflash.config import InputError
from examples.dflash.plan import drafter_config, read_shape
from examples.dflash.profiling import Kernel, read_events
from examples.dflash.smoke import DOCUMENT_TOKENS, mean_document, random_batch, smoke, smoke_needs

from .models import VOCAB, tiny_target
from .test_train import configuration

CPU = torch.device("cpu")


@pytest.fixture
def target_dir(tmp_path):
    tiny_target().model.config.save_pretrained(tmp_path / "target")
    return str(tmp_path / "target")


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_smoke_writes_times_work_and_memory(tmp_path, target_dir, capsys, mode):
    config = configuration(tmp_path, target=target_dir, step=mode, smoke_steps=7)
    assert smoke(config) == 0
    record = json.loads((config.out / "smoke.json").read_text())
    out = capsys.readouterr().out
    assert len(record["step_ms"]) == 7 and len(record["losses"]) == 7 + 6
    assert 0 < record["p10_ms"] <= record["median_ms"] <= record["p90_ms"] <= max(record["step_ms"])
    shape, _ = read_shape(config)
    drafter = drafter_config(config, shape)
    useful = cost.drafter_flops(config, drafter, 64.0).useful  # the row is one document of 64 tokens
    assert record["useful_tflop"] == pytest.approx(useful / 1e12)
    assert record["tflop_per_s"] == pytest.approx(useful / 1e9 / record["median_ms"])
    assert record["tokens_per_s"] == pytest.approx(64e3 / record["median_ms"])
    assert record["share_of_peak"] is None and "its peak is unknown" in out
    planned = sum(need.num_bytes for need in smoke_needs(config, drafter, CPU))
    memory = record["memory"]
    assert memory["planned_bytes"] == planned > 0
    assert memory["planned_over_peak"] == pytest.approx(planned / memory["peak_bytes"])
    assert record["flat"] and record["finite"] and "kernels" not in record


def test_smoke_trains_on_slots_that_were_filled_before(tmp_path, target_dir, monkeypatch):
    from examples.dflash import smoke as smoke_module

    made, seen = [], []
    monkeypatch.setattr(smoke_module, "random_batch", lambda *args: made.append(len(seen)) or random_batch(*args))

    class Watched(smoke_module.DrafterStep):
        def __call__(self, batch):
            seen.append(batch["features"].data_ptr())
            return super().__call__(batch)

    monkeypatch.setattr(smoke_module, "DrafterStep", Watched)
    assert smoke(configuration(tmp_path, target=target_dir, step="eager", ring_depth=3, smoke_steps=5)) == 0
    assert made == [0, 0, 0]  # before the first step
    assert len(set(seen)) == 3 and seen[3:6] == seen[:3]


def test_smoke_profile_writes_a_trace_and_adds_up(tmp_path, target_dir, capsys):
    trace = tmp_path / "traces" / "trace.json"
    config = configuration(tmp_path, target=target_dir, step="eager", smoke_steps=2, profile=trace)
    assert smoke(config) == 0
    out, record = capsys.readouterr().out, json.loads((config.out / "smoke.json").read_text())
    assert any("name" in event for event in json.loads(trace.read_text())["traceEvents"])
    assert "a step's kernels, by kind" in out and "matrix products" in out
    kinds = record["kernels"]
    assert {"matrix products", "attention forward", "attention backward", "optimizer and clipping"} <= set(kinds)
    assert sum(entry["ms"] for entry in kinds.values()) == pytest.approx(record["span_ms"], rel=0.02)
    assert sum(entry["share"] for entry in kinds.values()) == pytest.approx(1, rel=0.02)


def test_smoke_names_the_trace_that_it_cannot_write(tmp_path, target_dir):
    (tmp_path / "file").write_text("")
    config = configuration(tmp_path, target=target_dir, step="eager", smoke_steps=1, profile=tmp_path / "file" / "x")
    with pytest.raises(OSError, match="file"):
        smoke(config)


def test_smoke_steps_below_one_are_refused(tmp_path):
    with pytest.raises(InputError, match="--smoke-steps"):
        configuration(tmp_path, smoke_steps=0)


@pytest.mark.parametrize("tokens", [64, DOCUMENT_TOKENS, 2 * DOCUMENT_TOKENS + 100])
def test_mean_document_is_that_of_the_random_batch(tmp_path, tokens):
    config = configuration(tmp_path, token_budget=tokens)
    batch = random_batch(config, VOCAB, torch.Generator().manual_seed(0))
    lengths = batch["document_ids"].bincount()
    assert mean_document(tokens) == pytest.approx(lengths[batch["document_ids"]].float().mean().item())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("triton_tem_fused_flex_attention_12", "attention forward"),
        ("triton_tem_fused_flex_attention_backward_7", "attention backward"),
        ("triton_red_fused_flex_attention_backward_mul_sum_3", "attention backward"),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("triton_tem_fused_mm_3", "matrix products"),
        ("triton_red_fused__log_softmax__to_copy_argmax_0", "loss chunk"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_4", "elementwise and reductions"),
        ("triton_poi_fused_mul_silu_9", "elementwise and reductions"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>",
            "optimizer and clipping",
        ),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::elementwise_kernel<128, 2, direct_copy_kernel_cuda>", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, AddFunctor>", "elementwise and reductions"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "collectives"),
        ("my_own_kernel", "other"),
    ],
)
def test_kernel_kind_is_told_by_its_name(name, kind):
    assert Kernel(name, 1, 1.0).kind == kind


def test_profile_counts_kernels_of_the_device_once_and_what_is_left_as_idle():
    def event(name, start, end, device_type, **more):
        span = types.SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
        return types.SimpleNamespace(name=name, time_range=span, device_type=device_type, **more)

    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [
        event("gemm", 1000, 3000, cuda),
        event("gemm", 4000, 6000, cuda),
        event("Memcpy DtoD", 8000, 9000, cuda),
        event("aten::mm", 0, 9000, cpu, self_cpu_time_total=9000),
        event("ProfilerStep", 0, 9000, cuda, is_user_annotation=True),
    ]
    profile = read_events(events, torch.device("cuda", 0), 2)
    assert profile.span_ms == 8.0
    assert profile.by_kind["matrix products"] == {"ms": 2.0, "launches": 1.0, "share": 0.5}
    assert profile.by_kind["copies"]["ms"] == 0.5
    assert profile.by_kind["idle"]["ms"] == pytest.approx(1.5)
