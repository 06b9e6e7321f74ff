from __future__ import annotations

import pytest
import torch

from examples.dflash import drafter as drafter_module
from examples.dflash.attention import flex_mask, sdpa_mask
from examples.dflash.drafter import Drafter, DrafterConfig

from .models import MASK_TOKEN, packed_row, random_drafter, tiny_config, tiny_target
from .reference import block_hidden

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

BLOCK = 4


def inputs(batch, seed=0):
    """Random features and the blocks of a batch: everything but the mask that the drafter takes."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(len(batch["tokens"]), 64, generator=generator)
    blocks = torch.randn(len(batch["anchors"]), BLOCK, 32, generator=generator)
    block_positions = batch["positions"][batch["anchors"]][:, None] + torch.arange(BLOCK)
    return features, blocks, batch["positions"], block_positions


def mask_of(batch, make=sdpa_mask, **kwargs):
    return make(batch["anchors"], batch["anchor_valid"], batch["document_ids"], BLOCK, **kwargs)


def masks_of(batch, drafter, make=sdpa_mask, **kwargs):
    return {kind: mask_of(batch, make, window=window, **kwargs) for kind, window in drafter.config.windows.items()}


# one sliding layer and a full one; two sliding ones, with a window within the block and one beyond it
SLIDING = [dict(sliding_window=6), dict(sliding_window=2, num_full_layers=0), dict(sliding_window=6, num_full_layers=0)]


@pytest.mark.parametrize("layers", [{}, *SLIDING])
@pytest.mark.parametrize("blocks_a_row", [1, 2, 6])
def test_drafter_equals_plain_float64_reference(blocks_a_row, layers):
    batch = packed_row((19, 14), 40, 6, BLOCK)
    drafter = random_drafter(**layers)
    features, blocks, positions, block_positions = inputs(batch)
    hidden = drafter(features, blocks, positions, block_positions, masks_of(batch, drafter, blocks_a_row=blocks_a_row))
    for index, anchor in enumerate(batch["anchors"].tolist()):
        document = batch["document_ids"][anchor]
        seen = [p for p in range(anchor) if batch["document_ids"][p] == document]
        expected = block_hidden(
            drafter.state_dict(), drafter.config, features[seen], positions[seen], blocks[index], block_positions[index]
        )
        torch.testing.assert_close(hidden[index].double(), expected, rtol=1e-5, atol=1e-5)


def test_drafter_takes_one_mask_where_all_layers_are_full():
    batch = packed_row((19, 14), 40, 6, BLOCK)
    drafter = random_drafter()
    assert torch.equal(drafter(*inputs(batch), mask_of(batch)), drafter(*inputs(batch), masks_of(batch, drafter)))


@pytest.mark.parametrize("layers", [{}, *SLIDING])
def test_drafter_flex_equals_sdpa(layers):
    batch = packed_row((19, 14), 40, 8, BLOCK)
    batch["anchor_valid"][-2:] = False
    drafter = random_drafter(**layers)
    with torch.no_grad():
        by_sdpa = drafter(*inputs(batch), masks_of(batch, drafter))
        by_flex = drafter(*inputs(batch), masks_of(batch, drafter, flex_mask))
    torch.testing.assert_close(by_flex, by_sdpa, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layers", [{}, SLIDING[0], SLIDING[2]])
@pytest.mark.parametrize("make", [sdpa_mask, flex_mask])
def test_drafter_block_ignores_everything_at_and_after_its_anchor_and_other_documents(make, layers):
    batch = packed_row((19, 14), 40, 6, BLOCK)
    drafter = random_drafter(**layers)
    features, blocks, positions, block_positions = inputs(batch)
    masks = masks_of(batch, drafter, make)
    with torch.no_grad():
        before = drafter(features, blocks, positions, block_positions, masks)
        for index, anchor in enumerate(batch["anchors"].tolist()):
            seen = (torch.arange(len(features)) < anchor) & (batch["document_ids"] == batch["document_ids"][anchor])
            features2 = torch.where(seen[:, None], features, torch.randn_like(features))
            blocks2 = torch.randn_like(blocks)
            blocks2[index] = blocks[index]
            after = drafter(features2, blocks2, positions, block_positions, masks)
            assert torch.equal(after[index], before[index])
            # and it does see its context and its own slots
            last_seen = features.clone()
            last_seen[anchor - 1] += 1
            assert not torch.equal(drafter(last_seen, blocks, positions, block_positions, masks)[index], before[index])


@pytest.mark.parametrize("make", [sdpa_mask, flex_mask])
@pytest.mark.parametrize("window", [2, 6])
def test_drafter_slots_of_a_sliding_layer_see_their_window_alone(make, window):
    batch = packed_row((19, 14), 40, 6, BLOCK)
    drafter = random_drafter(num_layers=1, num_full_layers=0, sliding_window=window)
    features, blocks, positions, block_positions = inputs(batch)
    masks = masks_of(batch, drafter, make)

    def changed(features, blocks):  # which slots of each block [A, B]
        return (drafter(features, blocks, positions, block_positions, masks) != before).any(-1)

    slots = torch.arange(BLOCK)
    with torch.no_grad():
        before = drafter(features, blocks, positions, block_positions, masks)
        for place in range(33):
            other = features.clone()
            other[place] += 1
            behind = batch["anchors"][:, None] + slots - place
            same = batch["document_ids"][batch["anchors"]] == batch["document_ids"][place]
            sees = (place < batch["anchors"])[:, None] & same[:, None] & (behind < window)
            assert torch.equal(changed(other, blocks), sees)
        for slot in range(BLOCK):
            other = blocks.clone()
            other[:, slot] += 1
            assert torch.equal(changed(features, other)[0], (slots >= slot) & (slots - slot < window))


def test_drafter_keys_outside_the_window_do_not_matter_when_drafting():
    drafter = random_drafter(num_layers=1, num_full_layers=0, sliding_window=5)
    features, blocks, valid = torch.randn(1, 12, 64), torch.randn(1, BLOCK, 32), torch.ones(1, 12, dtype=torch.bool)
    other = features.clone()
    other[:, :8] = torch.randn(1, 8, 64)  # the block's first slot, at 12, sees places 8 to 11
    drafted = []
    for context in (features, other, features + 1):
        cache = drafter.new_cache(1, 20, "cpu", torch.float32)
        drafter.extend(cache, context, torch.arange(12)[None], valid)
        drafted.append(drafter.draft(cache, blocks, 12 + torch.arange(BLOCK)[None]))
    assert torch.equal(drafted[0], drafted[1])
    assert not torch.equal(drafted[0], drafted[2])


def test_drafter_block_slots_see_each_other_both_ways():
    batch = packed_row((19,), 24, 2, BLOCK)
    drafter = random_drafter()
    features, blocks, positions, block_positions = inputs(batch)
    with torch.no_grad():
        before = drafter(features, blocks, positions, block_positions, mask_of(batch))
        for slot in range(BLOCK):
            changed = blocks.clone()
            changed[0, slot] += 1
            after = drafter(features, changed, positions, block_positions, mask_of(batch))
            assert all(not torch.equal(after[0, other], before[0, other]) for other in range(BLOCK))
            assert torch.equal(after[1], before[1])


@pytest.mark.parametrize("layers", [{}, *SLIDING])
def test_drafter_is_finite_when_all_is_padding(layers):
    batch = packed_row((), 16, 4, BLOCK)
    drafter = random_drafter(**layers)
    features, blocks, positions, block_positions = inputs(batch)
    hidden = drafter(features, blocks, positions, block_positions, masks_of(batch, drafter))
    hidden.sum().backward()
    assert hidden.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in drafter.parameters())


@pytest.mark.parametrize("layers", [{}, *SLIDING])
def test_drafter_cached_drafting_equals_training_forward(layers):
    batch = packed_row((19, 14), 40, 6, BLOCK)
    drafter = random_drafter(**layers)
    features, blocks, positions, block_positions = inputs(batch)
    with torch.no_grad():
        trained = drafter(features, blocks, positions, block_positions, masks_of(batch, drafter))
    anchors = batch["anchors"]
    cache = drafter.new_cache(len(anchors), 20, "cpu", torch.float32)
    seen = (torch.arange(40) < anchors[:, None]) & (batch["document_ids"] == batch["document_ids"][anchors][:, None])
    # in three pieces, with gaps: what is not valid leaves no trace, and the rows' lengths differ
    for piece in (slice(0, 7), slice(7, 25), slice(25, 40)):
        rows = len(anchors)
        drafter.extend(cache, features[piece].expand(rows, -1, -1), positions[piece].expand(rows, -1), seen[:, piece])
    assert torch.equal(cache.lengths, seen.sum(1))
    kept = [keys.clone() for keys in cache.keys]
    drafted = drafter.draft(cache, blocks, block_positions)
    torch.testing.assert_close(drafted, trained, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(kept, cache.keys, strict=True))


def test_drafter_cache_drops_what_does_not_fit_and_says_so():
    drafter = random_drafter()
    cache = drafter.new_cache(2, 5, "cpu", torch.float32)
    valid = torch.tensor([[True] * 8, [True] * 3 + [False] * 5])
    drafter.extend(cache, torch.randn(2, 8, 64), torch.arange(8).expand(2, -1), valid)
    assert cache.lengths.tolist() == [8, 3]
    assert cache.max_context == 5
    hidden = drafter.draft(cache, torch.randn(2, BLOCK, 32), torch.arange(BLOCK).expand(2, -1))
    assert hidden.isfinite().all()


@pytest.mark.parametrize("layers", [{}, *SLIDING])
def test_drafter_gradient_checkpointing_changes_no_gradient(layers):
    batch = packed_row((19, 14), 40, 6, BLOCK)
    grads = []
    for on in (False, True):
        drafter = random_drafter(**layers)
        drafter.gradient_checkpointing = on
        drafter(*inputs(batch), masks_of(batch, drafter)).square().sum().backward()
        grads.append([parameter.grad for parameter in drafter.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_drafter_parameters_are_named_and_shaped_as_servers_load_them():
    drafter = Drafter(tiny_config(num_layers=2))
    layer = {
        "input_layernorm.weight": (32,),
        "post_attention_layernorm.weight": (32,),
        "self_attn.q_proj.weight": (64, 32),
        "self_attn.k_proj.weight": (32, 32),
        "self_attn.v_proj.weight": (32, 32),
        "self_attn.o_proj.weight": (32, 64),
        "self_attn.q_norm.weight": (16,),
        "self_attn.k_norm.weight": (16,),
        "mlp.gate_proj.weight": (40, 32),
        "mlp.up_proj.weight": (40, 32),
        "mlp.down_proj.weight": (32, 40),
    }
    expected = {"fc.weight": (32, 64), "hidden_norm.weight": (32,), "norm.weight": (32,)}
    expected |= {f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    state = drafter.state_dict()
    assert {name: tuple(weight.shape) for name, weight in state.items()} == expected
    assert {weight.dtype for weight in state.values()} == {torch.float32}


def test_drafter_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    first = Drafter(tiny_config(), seed=5).state_dict()
    torch.manual_seed(2)
    again, other = Drafter(tiny_config(), seed=5).state_dict(), Drafter(tiny_config(), seed=6).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


def test_drafter_runs_in_the_dtype_of_the_blocks_and_keeps_float32_weights():
    batch = packed_row((19, 14), 40, 6, BLOCK)
    drafter = random_drafter()
    features, blocks, positions, block_positions = inputs(batch)
    exact = drafter(features, blocks, positions, block_positions, mask_of(batch))
    half = drafter(features.bfloat16(), blocks.bfloat16(), positions, block_positions, mask_of(batch))
    half.float().square().sum().backward()
    assert half.dtype == torch.bfloat16
    assert all(parameter.grad.dtype == torch.float32 for parameter in drafter.parameters())
    torch.testing.assert_close(half.float(), exact, rtol=0.1, atol=0.2)


def test_drafter_saved_and_loaded_is_the_same(tmp_path):
    drafter = random_drafter()
    path = tmp_path / "run" / "drafter.safetensors"
    drafter_module.save(drafter, path)
    loaded = drafter_module.load(path, "cpu")
    assert loaded.config == drafter.config
    state = drafter.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in loaded.state_dict().items())
    assert sorted(p.name for p in path.parent.iterdir()) == ["drafter.json", "drafter.safetensors"]
    assert path.stat().st_mode == path.with_suffix(".json").stat().st_mode
    assert drafter_module.load(path, "cpu", torch.bfloat16).fc.weight.dtype == torch.bfloat16


def test_drafter_save_leaves_the_old_file_whole_when_writing_fails(tmp_path, monkeypatch):
    path = tmp_path / "drafter.safetensors"
    drafter_module.save(random_drafter(seed=1), path)
    old = path.read_bytes()

    def broken(weights, where):
        where.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(drafter_module, "save_file", broken)
    with pytest.raises(OSError, match="disk full"):
        drafter_module.save(random_drafter(seed=2), path)
    assert path.read_bytes() == old
    assert sorted(p.name for p in tmp_path.iterdir()) == ["drafter.json", "drafter.safetensors"]


def test_drafter_config_follows_the_target():
    target = tiny_target()
    with pytest.raises(ValueError, match="--mask-token-id"):
        DrafterConfig.from_target(target, num_layers=2, block_size=8, num_features=3)
    config = DrafterConfig.from_target(
        target,
        num_layers=3,
        block_size=8,
        num_features=3,
        mask_token_id=MASK_TOKEN,
        sliding_window=64,
        num_full_layers=2,
    )
    assert config.layer_types == ("sliding_attention", "full_attention", "full_attention")
    assert config.windows == {"sliding_attention": 64, "full_attention": None}
    assert tiny_config().windows == {"full_attention": None}
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (32, 48, 16)
    assert (config.num_heads, config.num_kv_heads, config.rope_theta) == (4, 2, 5000.0)
    assert config.target_layer_ids == (1, 2, 3)
    assert (config.vocab_size, config.num_target_layers, config.rms_norm_eps) == (61, 6, 1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": 61}, "mask_token_id 61"),
        ({"num_kv_heads": 3}, "evenly"),
        ({"target_layer_ids": (1, 6)}, "layers 0 to 5"),
        ({"sliding_window": 0}, "window of 0"),
    ],
)
def test_drafter_config_refuses_what_cannot_be(change, message):
    import dataclasses

    with pytest.raises(ValueError, match=message):
        dataclasses.replace(tiny_config(), **change)
