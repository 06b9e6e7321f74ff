"""The drafter's losses, labels and sliding layers on GPUs: compiled and captured against eager code and the CPU."""

from __future__ import annotations

import math

import pytest
import torch

import graphsafe
from examples.dflash import drafter as drafters
from examples.dflash import loss as loss_module
from examples.dflash.attention import flex_mask, sdpa_mask
from examples.dflash.feature_cache import MemoryCache
from examples.dflash.features import FeatureSource
from examples.dflash.loss import block_loss, labels_and_weights, mean_loss
from examples.dflash.pipeline import Topology
from examples.dflash.plan import drafter_config
from examples.dflash.smoke import smoke
from examples.dflash.target import Target
from examples.dflash.train import train_on

from ..dflash.models import VOCAB, random_drafter, tiny_target
from ..dflash.runs import read_log
from ..dflash.test_train import configuration, documents
from .test_dflash import check_blocks_ignore_everything_at_and_after_their_anchors, drafter_inputs, row

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("fresh_compiles")]
BLOCK = 4
CPU, FIRST = torch.device("cpu"), torch.device("cuda:0")
SHAPE = dict(token_budget=128, num_anchors=32, loss_chunk=64, num_layers=2)
SLIDING = [dict(sliding_window=20), dict(sliding_window=2, num_full_layers=0), dict(sliding_window=9, num_layers=3)]
ALL_OPTIONS = dict(loss="dpace", labels="target", sliding_window=20, schedule="wsd")
VARIANTS = {
    "dpace": dict(loss="dpace"),
    "target labels": dict(labels="target"),
    "sliding": dict(sliding_window=20),
    "all": ALL_OPTIONS,
    "all, checkpointed": dict(ALL_OPTIONS, gradient_checkpointing=True),
}


def masks_of(make, batch, drafter, device):
    args = [batch[name].to(device) for name in ("anchors", "anchor_valid", "document_ids")]
    return {kind: make(*args, BLOCK, window) for kind, window in drafter.config.windows.items()}


def trained_once(make, device, layers, *, compiled, checkpointing=False, smoothing=0.5):
    """Loss, weight and gradients of a drafter whose labels are what a target might say."""
    batch = row()
    batch["anchor_valid"][-5:] = False
    drafter = random_drafter(**layers).to(device)
    drafter.gradient_checkpointing = checkpointing
    names = ("tokens", "document_ids", "loss_mask", "anchors", "anchor_valid")
    target_tokens = ((batch["tokens"] + 1) % VOCAB).to(device)
    decay = 4.0 if smoothing is None else None
    labels, weights = labels_and_weights(
        *(batch[name].to(device) for name in names), block_size=BLOCK, decay=decay, target_tokens=target_tokens
    )
    head = torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(2)).to(device)
    hidden = drafter(*drafter_inputs(batch, device), masks_of(make, batch, drafter, device))
    loss = block_loss(hidden, head, labels, weights, chunk=20, compiled=compiled, smoothing=smoothing)
    mean_loss(loss.weighted_sum, loss.weight).backward()
    return loss, [parameter.grad.cpu() for parameter in drafter.parameters()]


@pytest.mark.parametrize("smoothing", [None, 0.5])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("layers", [{}, *SLIDING])
def test_flex_and_sdpa_give_the_losses_and_gradients_of_the_cpu(layers, checkpointing, smoothing):
    expected, gradients = trained_once(sdpa_mask, CPU, layers, compiled=False, smoothing=smoothing)
    for make in (flex_mask, sdpa_mask):
        loss, ours = trained_once(make, FIRST, layers, compiled=True, checkpointing=checkpointing, smoothing=smoothing)
        torch.testing.assert_close(loss.weighted_sum.cpu(), expected.weighted_sum, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(loss.weight.cpu(), expected.weight, rtol=1e-3, atol=1e-3)
        assert torch.equal(loss.counts.total.cpu(), expected.counts.total)
        for gradient, wanted in zip(ours, gradients, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=5e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dpace_chunk_compiled_equals_eager(dtype):
    generator = torch.Generator(FIRST).manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=FIRST)

    hidden, head = (0.2 * normal(90, 64)).to(dtype), normal(1000, 64).to(dtype)
    labels = torch.randint(0, 1000, (90,), generator=generator, device=FIRST)
    counted = (normal(90) > -1).float()
    args = hidden, head, labels, counted, 0.5, 15
    compiled = graphsafe.compile(loss_module.chunk_cross_entropy, dynamic=False, fullgraph=True)
    with graphsafe.thread_context(FIRST, seed=0):
        ours, expected = compiled(*args), loss_module.chunk_cross_entropy(*args)
    tolerance = dict(rtol=1e-4, atol=1e-4) if dtype == torch.float32 else dict(rtol=5e-2, atol=5e-2)
    for found, wanted in zip(ours, expected, strict=True):
        if found.dtype == torch.bool:
            assert (found == wanted).float().mean() > 0.95  # ties of rounded logits
        else:
            torch.testing.assert_close(found, wanted, **tolerance)


@pytest.mark.parametrize("layers", SLIDING)
def test_flex_block_of_sliding_layers_ignores_everything_at_and_after_its_anchor(layers):
    batch = row()
    drafter = random_drafter(**layers).to(FIRST)
    masks = masks_of(flex_mask, batch, drafter, FIRST)
    check_blocks_ignore_everything_at_and_after_their_anchors(drafter, batch, masks)


def test_flex_slots_of_a_sliding_layer_see_their_window_alone():
    batch, window = row(), 9
    drafter = random_drafter(num_layers=1, num_full_layers=0, sliding_window=window).to(FIRST)
    features, blocks, positions, block_positions = drafter_inputs(batch, FIRST)
    masks = masks_of(flex_mask, batch, drafter, FIRST)
    slots = torch.arange(BLOCK)
    with torch.no_grad():
        before = drafter(features, blocks, positions, block_positions, masks)
        for place in range(0, 105, 8):
            other = features.clone()
            other[place] += 1
            after = drafter(other, blocks, positions, block_positions, masks)
            behind = batch["anchors"][:, None] + slots - place
            same = batch["document_ids"][batch["anchors"]] == batch["document_ids"][place]
            sees = (place < batch["anchors"])[:, None] & same[:, None] & (behind < window)
            assert torch.equal((after != before).any(-1).cpu(), sees)
        for slot in range(BLOCK):
            other = blocks.clone()
            other[:, slot] += 1
            after = drafter(features, other, positions, block_positions, masks)
            assert torch.equal((after != before).any(-1).cpu()[0], slots >= slot)


def test_flex_mask_of_a_sliding_layer_is_built_without_its_dense_grid():
    tokens, anchors, block_size = 16384, 2048, 16  # a grid of single slots and tiles is 12.6 M cells, of pairs 1.6 G
    documents_of = torch.arange(tokens, device=FIRST) // 1024
    places = torch.linspace(1, tokens - 2, anchors, device=FIRST).long()
    valid = torch.ones(anchors, dtype=torch.bool, device=FIRST)
    flex_mask(places, valid, documents_of, block_size, 512)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mask = flex_mask(places, valid, documents_of, block_size, 512)
    assert torch.cuda.max_memory_allocated() - before < 24 * 2**20
    full = flex_mask(places, valid, documents_of, block_size)
    visited, visited_full = ((each.kv_num_blocks.sum() + each.full_kv_num_blocks.sum()).item() for each in (mask, full))
    assert visited < visited_full  # a window saves work


def test_target_tokens_of_packed_documents_equal_those_on_the_cpu():
    cpu, batch = tiny_target(), row()
    gpu = Target(tiny_target().model.to(FIRST))
    expected = FeatureSource(cpu, (1, 3), label_chunk=50)(batch)
    for cache in (None, MemoryCache(2**20)):
        source = FeatureSource(gpu, (1, 3), cache, label_chunk=50)
        for _ in range(2):
            found = source(batch)
            assert found["target_tokens"].device == FIRST
            assert torch.equal(found["target_tokens"][:105].cpu(), expected["target_tokens"][:105])
            torch.testing.assert_close(found["features"][:105].cpu(), expected["features"][:105], rtol=2e-3, atol=2e-3)


def run(config, targets=(FIRST,), devices=(FIRST,)):
    """Train in the pipeline. Returns the readings."""
    target, dtype = tiny_target(), getattr(torch, config.dtype)
    models = {device: Target(tiny_target().model.to(device, dtype)) for device in dict.fromkeys(targets)}
    topology = Topology(tuple(targets), tuple(devices))
    assert train_on(documents(40), models, drafter_config(config, target.shape), config, topology) == 0
    return [record for record in read_log(config) if "event" not in record]


def losses(readings):
    return [reading["loss"] for reading in readings]


@pytest.mark.parametrize("name", VARIANTS)
def test_step_of_every_variant_as_one_graph_gives_the_losses_of_the_compiled_step(tmp_path, name):
    settings = dict(SHAPE, max_steps=24, **VARIANTS[name])
    by_mode = {
        mode: losses(run(configuration(tmp_path / mode, step=mode, **settings)))
        for mode in ("graph", "compile", "eager")
    }
    assert by_mode["graph"] == by_mode["compile"]
    assert by_mode["graph"] == pytest.approx(by_mode["eager"], rel=1e-2)
    assert by_mode["graph"][-1] < by_mode["graph"][0]
    assert all(math.isfinite(loss) for loss in by_mode["graph"])
    weights = [drafters.load((tmp_path / mode / "run" / "drafter.safetensors"), "cpu") for mode in ("graph", "compile")]
    for ours, expected in zip(weights[0].parameters(), weights[1].parameters(), strict=True):
        assert torch.equal(ours, expected)


def test_step_with_all_options_trains_in_bfloat16(tmp_path):
    settings = dict(SHAPE, max_steps=24, dtype="bfloat16", **ALL_OPTIONS)
    graph = losses(run(configuration(tmp_path / "graph", **settings)))
    eager = losses(run(configuration(tmp_path / "eager", step="eager", **settings)))
    assert graph == pytest.approx(eager, rel=8e-2)
    assert graph[-1] < graph[0]


@pytest.mark.parametrize("name", VARIANTS)
def test_sdpa_trains_every_variant_as_flex_does(tmp_path, name):
    settings = dict(SHAPE, max_steps=8, **VARIANTS[name])
    flex = losses(run(configuration(tmp_path / "flex", **settings)))
    sdpa = losses(run(configuration(tmp_path / "sdpa", attention="sdpa", **settings)))
    assert sdpa == pytest.approx(flex, rel=1e-2)


@pytest.mark.parametrize("name", ["dpace", "all, checkpointed"])
def test_smoke_of_a_variant_finds_peak_memory_flat(tmp_path, name):
    tiny_target().model.config.save_pretrained(tmp_path / "target")
    settings = dict(SHAPE, target=str(tmp_path / "target"), drafters=("cuda:0",), **VARIANTS[name])
    assert smoke(configuration(tmp_path, **settings)) == 0


@pytest.mark.two_gpus
def test_two_drafters_with_all_options_give_the_same_losses_from_two_targets(tmp_path):
    settings = dict(SHAPE, max_steps=16, **ALL_OPTIONS)
    devices = [torch.device("cuda", number) for number in range(2)]
    one = losses(run(configuration(tmp_path / "one", **settings), devices[:1], devices))
    two = losses(run(configuration(tmp_path / "two", **settings), devices, devices))
    assert two == pytest.approx(one, rel=1e-3)
    assert two[-1] < two[0]
