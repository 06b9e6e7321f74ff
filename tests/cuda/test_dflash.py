"""The example on GPUs: flex_attention against the reference, the whole step as a graph, and replicas over NCCL."""

from __future__ import annotations

import dataclasses
import json
import threading

import pytest
import torch
import torch.distributed as dist

import graphsafe
from examples.dflash import trainer as trainer_module
from examples.dflash.attention import flex_mask, sdpa_mask
from examples.dflash.drafter import DrafterConfig
from examples.dflash.pipeline import Topology
from examples.dflash.replicas import Replica
from examples.dflash.smoke import smoke
from examples.dflash.step import DrafterStep
from examples.dflash.target import Target
from examples.dflash.train import train_on

from ..dflash.models import packed_row, random_drafter, tiny_target
from ..dflash.test_replicas import joined
from ..dflash.test_train import configuration, documents
from ..helpers import run_threads

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("fresh_compiles")]
DEADLINE_S = 400.0
BLOCK = 4
FIRST = torch.device("cuda:0")
SHAPE = dict(token_budget=128, num_anchors=32, loss_chunk=64)


def on(device, batch):
    return {name: tensor.to(device) for name, tensor in batch.items()}


def row(seed=0, lengths=(60, 45), num_tokens=128, num_anchors=32):
    return packed_row(lengths, num_tokens, num_anchors, BLOCK, seed=seed)


def drafter_inputs(batch, device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(len(batch["tokens"]), 64, generator=generator)
    blocks = torch.randn(len(batch["anchors"]), BLOCK, 32, generator=generator)
    positions = batch["positions"][batch["anchors"]][:, None] + torch.arange(BLOCK)
    return (
        features.to(device, dtype),
        blocks.to(device, dtype),
        batch["positions"].to(device),
        positions.to(device),
    )


def mask_of(make, batch, device):
    return make(*(batch[name].to(device) for name in ("anchors", "anchor_valid", "document_ids")), BLOCK)


def test_flex_equals_sdpa_in_hidden_states_and_gradients():
    batch = row()
    batch["anchor_valid"][-5:] = False
    results = []
    for device, make in ((FIRST, flex_mask), (torch.device("cpu"), sdpa_mask)):
        drafter = random_drafter().to(device)
        hidden = drafter(*drafter_inputs(batch, device), mask_of(make, batch, device))
        hidden.square().mean().backward()
        results.append((hidden.detach().cpu(), [parameter.grad.cpu() for parameter in drafter.parameters()]))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-3, atol=1e-3)
    for ours, expected in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(ours, expected, rtol=5e-3, atol=1e-4)


def check_blocks_ignore_everything_at_and_after_their_anchors(drafter, batch, masks):
    features, blocks, positions, block_positions = drafter_inputs(batch, FIRST)
    with torch.no_grad():
        before = drafter(features, blocks, positions, block_positions, masks)
        for index in range(0, 32, 7):
            anchor = batch["anchors"][index]
            seen = (torch.arange(128) < anchor) & (batch["document_ids"] == batch["document_ids"][anchor])
            others = torch.where(seen.to(FIRST)[:, None], features, torch.randn_like(features))
            changed = torch.randn_like(blocks)
            changed[index] = blocks[index]
            after = drafter(others, changed, positions, block_positions, masks)
            assert torch.equal(after[index], before[index])


def test_flex_block_ignores_everything_at_and_after_its_anchor():
    batch = row()
    drafter = random_drafter().to(FIRST)
    check_blocks_ignore_everything_at_and_after_their_anchors(drafter, batch, mask_of(flex_mask, batch, FIRST))


def test_flex_mask_is_built_without_its_dense_grid():
    tokens, anchors, block_size = 16384, 2048, 16  # a dense grid of 32,768 x 49,152 is 1.5 GiB of booleans alone
    documents_of = torch.arange(tokens, device=FIRST) // 1024
    places = torch.linspace(1, tokens - 2, anchors, device=FIRST).long()
    valid = torch.ones(anchors, dtype=torch.bool, device=FIRST)
    flex_mask(places, valid, documents_of, block_size)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    flex_mask(places, valid, documents_of, block_size)
    assert torch.cuda.max_memory_allocated() - before < 64 * 2**20


def test_features_of_packed_documents_equal_those_on_the_cpu():
    cpu, batch = tiny_target(), row(lengths=(60, 45))
    gpu = Target(tiny_target().model.to(FIRST))
    names = ("tokens", "document_ids", "positions")
    expected = cpu.features(*(batch[name] for name in names), (1, 3))
    ours = gpu.features(*(batch[name].to(FIRST) for name in names), (1, 3)).cpu()
    torch.testing.assert_close(ours[:105], expected[:105], rtol=2e-3, atol=2e-3)
    other = dict(batch, tokens=batch["tokens"].clone())
    other["tokens"][:60] = 7  # the first document, all of it
    changed = gpu.features(*(other[name].to(FIRST) for name in names), (1, 3)).cpu()
    assert torch.equal(changed[60:105], ours[60:105])


def run(config, targets, drafters, fail=None):
    """Train in the pipeline. Returns the readings."""
    target = tiny_target()
    dtype = getattr(torch, config.dtype)
    models = {device: Target(tiny_target().model.to(device, dtype)) for device in dict.fromkeys(targets)}
    shape = DrafterConfig.from_target(
        target,
        num_layers=config.num_layers,
        block_size=config.block_size,
        num_features=config.num_features,
        intermediate_size=config.intermediate_size,
        mask_token_id=config.mask_token_id,
    )
    assert train_on(documents(40), models, shape, config, Topology(tuple(targets), tuple(drafters))) == 0
    lines = (config.out / "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if "event" not in (record := json.loads(line))]


def losses(readings):
    return [reading["loss"] for reading in readings]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step_as_one_graph_gives_the_losses_of_the_compiled_step(tmp_path, dtype):
    settings = dict(SHAPE, max_steps=24, dtype=dtype, num_layers=2)
    by_mode = {
        mode: losses(run(configuration(tmp_path / mode, step=mode, **settings), [FIRST], [FIRST]))
        for mode in ("graph", "compile", "eager")
    }
    assert by_mode["graph"] == by_mode["compile"]
    tolerance = 1e-2 if dtype == "float32" else 8e-2
    assert by_mode["graph"] == pytest.approx(by_mode["eager"], rel=tolerance)
    assert by_mode["graph"][-1] < by_mode["graph"][0]


def test_graph_mode_runs_the_steps_python_in_warmup_and_capture_only(tmp_path, monkeypatch):
    calls = []
    labels_and_weights = DrafterStep.__init__.__globals__["labels_and_weights"]
    monkeypatch.setitem(
        DrafterStep.__init__.__globals__,
        "labels_and_weights",
        lambda *args, **kwargs: calls.append(1) or labels_and_weights(*args, **kwargs),
    )
    config = configuration(tmp_path, max_steps=40, **SHAPE)
    run(config, [FIRST], [FIRST])
    assert len(calls) <= 3 + 2 * config.ring_depth  # warm-up, and a capture (begun again once at most) for each slot
    assert graphsafe.stats().total("replays") >= 30


def test_sdpa_trains_on_a_gpu_too(tmp_path):
    flex = losses(run(configuration(tmp_path / "flex", max_steps=8, **SHAPE), [FIRST], [FIRST]))
    sdpa = losses(run(configuration(tmp_path / "sdpa", max_steps=8, attention="sdpa", **SHAPE), [FIRST], [FIRST]))
    assert sdpa == pytest.approx(flex, rel=1e-2)


def test_gradient_checkpointing_in_the_graph_gives_the_same_losses(tmp_path):
    plain = losses(run(configuration(tmp_path / "plain", max_steps=12, **SHAPE), [FIRST], [FIRST]))
    config = configuration(tmp_path / "saved", max_steps=12, gradient_checkpointing=True, **SHAPE)
    assert losses(run(config, [FIRST], [FIRST])) == pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_smoke_finds_peak_memory_flat(tmp_path, mode):
    tiny_target().model.config.save_pretrained(tmp_path / "target")
    config = configuration(tmp_path, target=str(tmp_path / "target"), drafters=("cuda:0",), step=mode, **SHAPE)
    assert smoke(config) == 0


def test_cached_features_give_the_same_losses(tmp_path):
    plain = losses(run(configuration(tmp_path / "plain", max_steps=12, **SHAPE), [FIRST], [FIRST]))
    config = configuration(tmp_path / "cached", max_steps=12, cache_features=0.1, **SHAPE)
    assert losses(run(config, [FIRST], [FIRST])) == pytest.approx(plain, rel=1e-3)


@pytest.mark.two_gpus
@pytest.mark.parametrize(
    ("targets", "num_drafters"), [(("cuda:0",), 1), (("cuda:0", "cuda:1"), 1), (("cuda:0",), 2), (("cuda:1",), 2)]
)
def test_devices_do_not_change_the_losses(tmp_path, targets, num_drafters):
    settings = dict(SHAPE, max_steps=16)
    drafters = [torch.device("cuda", 1 - index) for index in range(num_drafters)]
    spread = run(configuration(tmp_path / "spread", **settings), [torch.device(t) for t in targets], drafters)
    if num_drafters == 1:  # another device's kernels may be tuned otherwise, and so round otherwise
        one = run(configuration(tmp_path / "one", **settings), [FIRST], [FIRST])
        assert losses(spread) == pytest.approx(losses(one), rel=1e-3)
    else:
        again = run(configuration(tmp_path / "again", **settings), [FIRST], list(reversed(drafters)))
        assert losses(spread) == pytest.approx(losses(again), rel=1e-3)
    assert losses(spread)[-1] < losses(spread)[0]


def trained(config, rows, replica, target, ready=None):
    """Global losses of a drafter that trains on ``rows`` through slots of a ring, and its weights."""
    device = target.device
    drafter = random_drafter().to(device)
    step = DrafterStep(drafter, target.embed_tokens.weight, target.lm_head_weight, config, len(rows), replica)
    if ready is not None:  # all is compiled before the first collective: see DrafterStep.warm_up
        batch = on(device, rows[0])
        features = target.features(batch["tokens"], batch["document_ids"], batch["positions"], (1, 3))
        step.warm_up({**batch, "features": features})
        ready.wait(DEADLINE_S)
    found = []
    for batch in rows:
        batch = on(device, batch)
        features = target.features(batch["tokens"], batch["document_ids"], batch["positions"], (1, 3))
        measured = replica.sum(step({**batch, "features": features}).double()).tolist()
        found.append(measured[0] / max(measured[1], 1e-9))
    step.close()
    return found, {name: weight.cpu() for name, weight in drafter.state_dict().items()}


def tiny_target_on(device):
    """Made before any thread starts: its weights come from the default generator, which a compile winds back."""
    return Target(tiny_target().model.to(device))


def two_replicas(config, rows):
    store, ready, done = dist.HashStore(), threading.Barrier(2), threading.Barrier(2)
    targets = [tiny_target_on(torch.device("cuda", number)) for number in range(2)]

    def rank(number):
        device = torch.device("cuda", number)
        with graphsafe.thread_context(device, seed=number):
            replica = Replica(number, 2, device, store)
            try:
                found = trained(config, rows[number], replica, targets[number], ready)
                graphsafe.current_context(device).synchronize()
                done.wait(DEADLINE_S)
                return found
            finally:
                replica.close()

    return run_threads(2, rank, DEADLINE_S)


def alone(config, rows):
    with graphsafe.thread_context(FIRST, seed=0):
        return trained(config, rows, Replica(0, 1, FIRST, None), tiny_target_on(FIRST))


@pytest.mark.two_gpus
@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_two_replicas_train_as_one_drafter_that_takes_both_rows(tmp_path, mode):
    config = configuration(tmp_path, step=mode, **SHAPE)
    rows = [[row(seed=k) for k in range(10)], [row(seed=50 + k, lengths=(30, 70)) for k in range(10)]]
    (first, weights), (second, weights2) = two_replicas(config, rows)
    assert first == second
    assert all(torch.equal(weights[name], weights2[name]) for name in weights)
    both = dataclasses.replace(config, token_budget=256, num_anchors=64)
    expected, _ = alone(both, [joined(*pair) for pair in zip(*rows, strict=True)])
    assert first == pytest.approx(expected, rel=1e-3)


@pytest.mark.two_gpus
def test_an_empty_batch_on_one_replica_changes_nothing_for_the_other(tmp_path):
    config = configuration(tmp_path, **SHAPE)
    full = [row(seed=k) for k in range(10)]
    empty = [row(lengths=()) for _ in range(10)]
    expected, _ = alone(config, full)
    for found, _ in two_replicas(config, [full, empty]):
        assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.two_gpus
@pytest.mark.parametrize("where", ["drafter", "target"])
def test_an_error_in_one_thread_ends_the_run_and_is_raised(tmp_path, monkeypatch, where):
    if where == "drafter":
        call = trainer_module.Trainer.__call__

        def broken(self, batch):
            if self.number == 1 and self.num_steps == 9:
                raise ZeroDivisionError("planted")
            call(self, batch)

        monkeypatch.setattr(trainer_module.Trainer, "__call__", broken)
    else:
        features, calls = Target.features, []

        def failing(self, *args):
            calls.append(1)
            if len(calls) == 20:
                raise ZeroDivisionError("planted")
            return features(self, *args)

        monkeypatch.setattr(Target, "features", failing)
    config = configuration(tmp_path, max_steps=500, log_every=5, **SHAPE)
    with pytest.raises(ZeroDivisionError, match="planted"):
        run(config, [FIRST], [torch.device("cuda:0"), torch.device("cuda:1")])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("drafter-", "target-"))]
