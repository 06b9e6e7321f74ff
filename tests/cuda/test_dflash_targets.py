"""Targets on a GPU: made with random weights, packed by flex_attention, and their features kept on a disk."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import Qwen3Config

from examples.dflash import cost
from examples.dflash.config import PRESETS
from examples.dflash.feature_cache import feature_cache, open_disk_cache, target_identity
from examples.dflash.features import FeatureSource
from examples.dflash.plan import plan, read_target
from examples.dflash.target import load_target

from ..dflash.models import VOCAB, packed_row, tiny_target
from ..dflash.test_train import configuration

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("fresh_compiles")]
FIRST = torch.device("cuda:0")
IDS = (1, 3)


@pytest.fixture
def qwen3(tmp_path):
    """The directory of a tiny Qwen3's configuration: norms of queries and keys, head_dim above hidden over heads."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.1,
    )
    config.save_pretrained(tmp_path / "qwen3")
    return f"random:{tmp_path / 'qwen3'}"


def test_random_target_is_made_on_the_device_in_its_dtype_and_nothing_larger():
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, state = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    name = "random:HuggingFaceTB/SmolLM2-135M-Instruct"
    target = load_target(name, FIRST, torch.bfloat16)
    weights = 2 * read_target(dataclasses.replace(PRESETS["smollm2"], target=name)).num_parameters
    assert torch.cuda.max_memory_allocated() - before < 1.5 * weights  # the head exists for a moment before it is tied
    assert {parameter.dtype for parameter in target.model.parameters()} == {torch.bfloat16}
    assert all(tensor.is_cuda for tensor in (*target.model.parameters(), *target.model.buffers()))
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert target_identity(load_target(name, FIRST, torch.bfloat16), IDS) == target_identity(target, IDS)


def test_packed_documents_of_a_qwen3_give_what_each_alone_gives(qwen3):
    target = load_target(qwen3, FIRST, torch.float32)
    batch = {name: tensor.to(FIRST) for name, tensor in packed_row((60, 45), 128, 8, 4).items()}
    packed = target.features(batch["tokens"], batch["document_ids"], batch["positions"], IDS)
    for start, length in ((0, 60), (60, 45)):
        states = target.model(input_ids=batch["tokens"][None, start : start + length], output_hidden_states=True)
        alone = torch.cat([states.hidden_states[layer + 1][0] for layer in IDS], dim=-1)
        torch.testing.assert_close(packed[start : start + length], alone, rtol=1e-3, atol=1e-3)


def test_identity_is_the_same_on_gpu_and_cpu():
    on_gpu = tiny_target()
    on_gpu.model.to(FIRST)
    assert target_identity(on_gpu, IDS) == target_identity(tiny_target(), IDS)


@pytest.mark.parametrize("memory", [0.0, 1.0])
def test_features_from_the_disk_are_those_that_were_computed(tmp_path, qwen3, memory):
    target = load_target(qwen3, FIRST, torch.bfloat16)
    config = configuration(tmp_path, cache_dir=tmp_path / "cache", cache_features=memory)
    batch = packed_row((60, 45), 128, 8, 4)

    def source():
        return FeatureSource(target, IDS, feature_cache(config, open_disk_cache(config, target, IDS)))

    first = source()(batch)["features"]
    target.features = None  # would fail if called
    again = source()(batch)["features"]
    assert again.is_cuda and again.dtype == torch.bfloat16
    assert torch.equal(again[:105], first[:105])


def test_plan_names_the_device_and_compares_its_memory(tmp_path, qwen3, capsys):
    config = configuration(
        tmp_path, target=qwen3, targets=("cuda:0",), drafters=("cuda:0",), dtype="bfloat16", num_features=2
    )
    assert plan(config) == 0
    out = capsys.readouterr().out
    assert f" of {torch.cuda.mem_get_info(FIRST)[1] / 2**30:.1f} GiB" in out
    known = cost.peak_flops(torch.cuda.get_device_name(FIRST)) is not None
    assert (torch.cuda.get_device_name(FIRST) in out) == known
    assert ("unknown for these devices" in out) != known
