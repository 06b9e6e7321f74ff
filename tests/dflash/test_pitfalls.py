"""What goes wrong in public trainers of DFlash drafters, and the tests that fail if it goes wrong here.

``PITFALLS`` is the table: a fault, and the tests that hold it off. The tests below it hold what no other file does.
Each fault that shows on a CPU was put into the code once, and a test of its row failed.
"""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from safetensors.torch import load_file

from examples.dflash import drafter as drafters
from examples.dflash.attention import sdpa_mask
from examples.dflash.drafter import Drafter
from examples.dflash.feature_cache import MemoryCache
from examples.dflash.features import FeatureSource
from examples.dflash.loss import labels_and_weights
from examples.dflash.pipeline import Topology
from examples.dflash.step import embed_blocks
from examples.dflash.train import head_weights

from .models import MASK_TOKEN, VOCAB, packed_row, tiny_target
from .test_train import CPU, configuration, run

BLOCK = 4

PITFALLS: dict[str, tuple[str, ...]] = {
    "a rank without anchors skips its step, and the others wait for it": (
        "dflash.test_replicas::test_an_empty_batch_on_one_replica_changes_nothing_for_the_other",
        "dflash.test_replicas::test_empty_batches_on_all_replicas_train_nothing_and_hang_nothing",
        "dflash.test_train::test_train_fills_the_last_round_with_batches_of_zero_loss",
        "cuda.test_dflash::test_an_empty_batch_on_one_replica_changes_nothing_for_the_other",
    ),
    "unsorted anchors make every tile of the mask partial": (
        "dflash.test_batches::test_anchors_are_eligible_sorted_and_first",
        "dflash.test_attention::test_flex_mask_visits_the_tiles_that_hold_a_visible_pair",
    ),
    "slots see other blocks, or the context from their anchor on": (
        "dflash.test_drafter::test_drafter_block_ignores_everything_at_and_after_its_anchor_and_other_documents",
        "dflash.test_drafter::test_drafter_equals_plain_float64_reference",
        "dflash.test_attention::test_sdpa_mask_says_who_sees_whom",
        "dflash.test_attention::test_flex_mask_says_who_sees_whom",
        "dflash.test_pitfalls::test_blocks_begin_with_their_anchors_token_and_hold_mask_tokens_alone",
        "cuda.test_dflash::test_flex_block_ignores_everything_at_and_after_its_anchor",
    ),
    "the mask's dense grid is built": (
        "cuda.test_dflash::test_flex_mask_is_built_without_its_dense_grid",
        "cuda.test_dflash_losses::test_flex_mask_of_a_sliding_layer_is_built_without_its_dense_grid",
    ),
    "recompiles, and then dense eager attention": (
        "dflash.test_telemetry::test_train_ends_with_the_reason_of_a_recompile_after_the_warm_up",
        "dflash.test_batches::test_batches_have_the_shapes_of_their_specs",
        "cuda.test_dflash_telemetry::test_train_ends_with_the_reason_of_a_recompile",
        "cuda.test_dflash_part3::test_first_batch_is_computed_even_if_all_of_it_is_cached",
    ),
    "labels are shifted by one": (
        "dflash.test_loss::test_labels_are_the_tokens_at_the_slots_own_positions",
        "dflash.test_labels::test_label_of_a_slot_is_what_the_target_says_one_place_before_it",
        "dflash.test_end_to_end::test_drafter_trained_on_a_counting_target_reaches_the_block_size",
    ),
    "hidden states are those of the next layer, or of other documents": (
        "dflash.test_target::test_features_are_the_layers_outputs_side_by_side",
        "dflash.test_target::test_target_layer_ids_are_those_of_published_drafters",
        "dflash.test_target::test_features_of_packed_documents_equal_those_of_each_alone",
        "dflash.test_features::test_source_gives_cached_documents_their_features_wherever_they_lie",
        "dflash.test_pitfalls::test_documents_of_one_length_get_their_own_features",
        "dflash.test_pitfalls::test_target_counts_positions_from_each_documents_start",
        "cuda.test_dflash::test_features_of_packed_documents_equal_those_on_the_cpu",
        "cuda.test_dflash_part3::test_cached_rows_are_not_overwritten_by_the_targets_graph",
    ),
    "the head is not the target's": (
        "dflash.test_end_to_end::test_drafter_trained_on_a_counting_target_reaches_the_block_size",
        "dflash.test_pitfalls::test_drafters_read_the_targets_own_embedding_and_head",
        "dflash.test_target_heads::test_target_whose_head_has_a_bias_is_refused",
    ),
    "what is trained on is rendered otherwise than what is served": (
        "dflash.test_chat::test_each_answer_stands_after_the_prompt_that_the_target_reads",
        "dflash.test_chat::test_qwen3_conversation_becomes_a_document_for_each_turn_as_it_was_read",
        "dflash.test_data::test_regenerated_document_holds_the_targets_own_tokens",
        "dflash.test_data::test_document_supervises_answers_and_their_end_but_no_newline_after_it",
    ),
    "the data holds the mask token": ("dflash.test_data::test_conversation_with_the_mask_token_is_skipped",),
    "norm weights in bfloat16 never move": (
        "dflash.test_variants::test_step_moves_every_parameter_of_every_variant",
        "dflash.test_drafter::test_drafter_runs_in_the_dtype_of_the_blocks_and_keeps_float32_weights",
        "dflash.test_pitfalls::test_train_in_bfloat16_keeps_float32_weights_and_moves_each",
    ),
    "softmax over a fully masked row is NaN": (
        "dflash.test_pitfalls::test_every_slot_sees_its_own_block_whatever_is_padding",
        "dflash.test_attention::test_flex_mask_of_a_row_of_padding_shows_each_block_itself",
        "dflash.test_drafter::test_drafter_is_finite_when_all_is_padding",
        "dflash.test_variants::test_step_on_padding_alone_measures_zero_and_trains_nothing",
    ),
    "anchors of a row starve its short documents": (
        "dflash.test_batches::test_shares_use_every_anchor_within_the_limits",
        "dflash.test_batches::test_shares_are_in_proportion_to_supervised_tokens",
        "dflash.test_batches::test_places_drawn_in_a_document_do_not_depend_on_its_neighbours",
    ),
    "a document's end is never drafted": (
        "dflash.test_batches::test_eligible_anchors_are_supervised_with_a_supervised_label_in_the_block",
    ),
    "memory grows": (
        "dflash.test_plan::test_smoke_runs_the_step_at_full_shape_and_finds_memory_flat",
        "dflash.test_plan::test_smoke_fails_when_memory_grows",
        "cuda.test_dflash::test_smoke_finds_peak_memory_flat",
        "cuda.test_dflash_pipeline::test_memory_after_ten_steps_is_that_after_hundreds",
    ),
    "logits of all positions exist at once": (
        "dflash.test_loss::test_block_loss_never_holds_logits_of_more_than_a_chunk",
        "dflash.test_loss::test_dpace_loss_holds_whole_blocks_in_a_chunk",
        "dflash.test_labels::test_target_tokens_need_logits_of_a_chunk_at_once_and_features_alone_need_none",
    ),
    "a resumed run loses optimizer, order or random numbers, or batches under way": (
        "dflash.test_checkpoint::test_killed_runs_go_on_bit_for_bit",
        "dflash.test_checkpoint::test_a_stopped_run_goes_on_bit_for_bit_and_repeats_no_reading",
        "dflash.test_processes::test_a_run_of_two_processes_goes_on_bit_for_bit_after_a_stop",
        "cuda.test_dflash_pipeline::test_training_resumed_from_a_checkpoint_goes_on_as_without_an_interruption",
    ),
    "a malformed sample kills the run": (
        "dflash.test_lines::test_malformed_line_is_skipped_and_named_with_its_number",
        "dflash.test_lines::test_run_stops_when_over_five_percent_of_the_lines_are_malformed",
        "dflash.test_lines::test_any_json_is_a_usable_line_or_a_reason",
    ),
    "servers ignore weights of other names": (
        "dflash.test_export::test_tensors_that_the_format_does_not_have_are_refused",
        "dflash.test_export::test_demanded_tensors_are_the_drafters",
        "dflash.test_drafter::test_drafter_parameters_are_named_and_shaped_as_servers_load_them",
    ),
    "a block crosses its document's end": (
        "dflash.test_loss::test_labels_end_with_the_document_and_the_row",
        "dflash.test_pitfalls::test_labels_end_with_the_document_even_if_all_of_the_next_one_is_supervised",
    ),
}


@pytest.mark.parametrize("name", sorted({name for names in PITFALLS.values() for name in names}))
def test_pitfalls_are_held_by_tests_that_exist(name):
    module, function = name.split("::")
    found = getattr(importlib.import_module(f"tests.{module}"), function, None)
    assert inspect.isfunction(found), name
    assert function.startswith("test_")  # else pytest would not run it


def test_labels_end_with_the_document_even_if_all_of_the_next_one_is_supervised():
    batch = packed_row((6, 6), 16, 2, BLOCK)
    batch["loss_mask"][:] = True  # padding as well
    batch["anchors"], batch["anchor_valid"] = torch.tensor([4, 9]), torch.tensor([True, True])
    names = ("tokens", "document_ids", "loss_mask", "anchors", "anchor_valid")
    for decay in (3.0, None):
        _, weights = labels_and_weights(*(batch[name] for name in names), block_size=BLOCK, decay=decay)
        assert (weights > 0).tolist() == [[True, False, False], [True, True, False]]


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("num_valid", [0, 1, 4])
def test_every_slot_sees_its_own_block_whatever_is_padding(num_valid, window):
    batch = packed_row((9,) if num_valid else (), 16, 4, BLOCK)
    valid = torch.arange(4) < num_valid
    mask = sdpa_mask(batch["anchors"], valid, batch["document_ids"], BLOCK, window, blocks_a_row=2)
    own = mask[:, 0, :, 16:].view(2, 2, BLOCK, 2, BLOCK).diagonal(dim1=1, dim2=3)  # row, slot, slot, block
    assert own.diagonal(dim1=1, dim2=2).all()
    assert own.all() == (window is None)
    context = mask[..., :16].reshape(4, BLOCK, 16)
    assert not context[num_valid:].any()


def test_blocks_begin_with_their_anchors_token_and_hold_mask_tokens_alone():
    embedding = torch.randn(VOCAB, 8)
    tokens, anchors = torch.randint(3, VOCAB - 1, (12,)), torch.tensor([0, 5, 11])
    blocks = embed_blocks(embedding, tokens, anchors, MASK_TOKEN, BLOCK)
    assert torch.equal(blocks[:, 0], embedding[tokens[anchors]])
    assert torch.equal(blocks[:, 1:], embedding[MASK_TOKEN].expand(3, BLOCK - 1, 8))


def test_train_in_bfloat16_keeps_float32_weights_and_moves_each(tmp_path):
    config = configuration(tmp_path, dtype="bfloat16", max_steps=2, lr=1e-5, weight_decay=0.0)
    target = tiny_target(dtype=torch.bfloat16)
    assert run(config, target=target)[0] == 0
    trained = drafters.load(config.drafter_path, "cpu")
    begun = Drafter(trained.config, seed=config.seed).state_dict()
    for name, weight in load_file(config.drafter_path).items():
        assert weight.dtype == torch.float32
        assert not torch.equal(weight, begun[name]), name
    norm = trained.norm.weight
    assert not torch.equal(norm, norm.bfloat16().float())  # moved by less than bfloat16 can tell


def test_documents_of_one_length_get_their_own_features():
    target, batch = tiny_target(), packed_row((9, 9), 24, 4, BLOCK)
    source = FeatureSource(target, (1, 3), MemoryCache(2**20))
    expected = FeatureSource(target, (1, 3))(batch)["features"]
    for _ in range(2):  # computed, then found
        torch.testing.assert_close(source(batch)["features"], expected)


def test_target_counts_positions_from_each_documents_start():
    target, batch, seen = tiny_target(), packed_row((9, 7), 24, 4, BLOCK), []
    target.decoder.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    FeatureSource(target, (1, 3))(batch)
    assert seen[0].tolist() == [[*range(9), *range(7)]]


def test_drafters_read_the_targets_own_embedding_and_head():
    target = tiny_target()
    devices = Topology((CPU,), (CPU,))
    embedding, head = head_weights({CPU: target}, devices, torch.float32)[CPU]
    assert embedding.data_ptr() == target.model.get_input_embeddings().weight.data_ptr()
    assert head.data_ptr() == target.model.get_output_embeddings().weight.data_ptr()
    assert not torch.equal(embedding, head)
