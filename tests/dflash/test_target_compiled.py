"""The target's layers compiled for features: one form for all of them, the same features, and decoding untouched."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._dynamo.utils import counters

import graphsafe
from examples.dflash import threads
from examples.dflash.config import InputError
from examples.dflash.features import FeatureSource
from examples.dflash.packed import document_mask
from examples.dflash.stepping import TargetDecoder

from .models import packed_row, tiny_qwen3, tiny_target
from .test_train import configuration, run

IDS = (1, 3)


@pytest.fixture(autouse=True)
def fresh_compiles():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()
    graphsafe.uninstall()


def num_forms():
    """Compiled frames and the graphs in them so far."""
    return counters["frames"]["ok"], counters["stats"]["unique_graphs"]


@torch.no_grad()
def read_with_block_mask(target, batch):
    """Features as on CUDA, where flex_attention reads a BlockMask."""
    tokens = batch["tokens"]
    out = torch.zeros(len(tokens), len(IDS), target.hidden_size)
    with target.collecting({layer: out[:, place] for place, layer in enumerate(IDS)}):
        target.decoder(
            input_ids=tokens[None],
            position_ids=batch["positions"][None],
            attention_mask=document_mask(batch["document_ids"]),
            use_cache=False,
        )
    return out.flatten(1)


@pytest.mark.parametrize("make", [tiny_target, tiny_qwen3])
def test_compiled_layers_give_the_same_features_in_one_form_for_all_layers(make):
    target, batch = make(), packed_row((70, 58), 128, 8, 4)
    expected = target.features(batch["tokens"], batch["document_ids"], batch["positions"], IDS)
    target.compile_layers()
    with target.compiled_layers():
        ours = read_with_block_mask(target, batch)
        assert num_forms() == (1, 1)
        other = packed_row((30, 98), 128, 8, 4, seed=1)
        again = read_with_block_mask(target, other)
        assert num_forms() == (1, 1)  # nor does another packing need a form of its own
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    expected = target.features(other["tokens"], other["document_ids"], other["positions"], IDS)
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-4)


def test_compiled_layers_are_for_this_block_and_thread_alone():
    target, batch = tiny_target(), packed_row((60,), 64, 8, 4)
    row = tuple(batch[name] for name in ("tokens", "document_ids", "positions"))
    tokens = batch["tokens"][None, :20]

    def decode():
        with torch.inference_mode():
            return TargetDecoder(target, 1, 40, IDS).prefill(tokens, torch.tensor([20]))

    before, features = decode(), target.features(*row, IDS)
    target.compile_layers()
    found = []
    with target.compiled_layers():
        thread = threading.Thread(target=lambda: found.extend((decode(), target.features(*row, IDS))))
        thread.start()
        thread.join(60)
    after = decode()
    assert num_forms() == (0, 0)
    for said in (found[0], after):
        assert torch.equal(said.logits, before.logits) and torch.equal(said.features, before.features)
    assert torch.equal(found[1], features)


def test_compile_layers_again_does_nothing():
    target = tiny_target()
    target.compile_layers()
    forwards = [layer.forward for layer in target.decoder.layers]
    target.compile_layers()
    assert [layer.forward for layer in target.decoder.layers] == forwards


def test_feature_source_leaves_layers_eager_on_the_cpu():
    target, batch = tiny_target(), packed_row((40,), 64, 8, 4)
    expected = FeatureSource(target, IDS)(batch)["features"]
    assert torch.equal(FeatureSource(target, IDS, compiled=True)(batch)["features"], expected)
    assert num_forms() == (0, 0)


@pytest.mark.parametrize("target_step", ["eager", "compile"])
def test_target_step_reaches_the_source_of_features(tmp_path, monkeypatch, target_step):
    asked = []

    class Watched(FeatureSource):
        def __init__(self, *args, **kwargs):
            asked.append(kwargs["compiled"])
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(threads, "FeatureSource", Watched)
    run(configuration(tmp_path, target_step=target_step, max_steps=1))
    assert asked == [target_step == "compile"]


def test_target_step_compile_is_refused_when_the_step_is_eager(tmp_path):
    with pytest.raises(InputError, match="--target-step"):
        configuration(tmp_path, step="eager", target_step="compile")
