"""Decoding on GPUs: steps and rounds as CUDA graphs give what eager ones give, run no Python, and keep memory flat."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import graphsafe
from examples.dflash import generate
from examples.dflash.config import PRESETS
from examples.dflash.data import Prompt
from examples.dflash.decode import BatchDecoder, decode
from examples.dflash.evaluate import evaluate
from examples.dflash.lookup import LookupDrafting
from examples.dflash.speculate import ModelDrafting, SpeculativeDecoder, speculate
from examples.dflash.stepping import TargetDecoder
from examples.dflash.target import Target

from ..dflash.models import random_drafter, tiny_target
from ..dflash.test_evaluate import accept_everything, accept_one_too_many
from ..dflash.texts import CharTokenizer, conversation, tiny_run

pytestmark = pytest.mark.cuda
FIRST = torch.device("cuda:0")
COUNT = 40
PROMPTS = [[5, 9, 11], [7, 3, 20, 33, 8, 40, 12], [50], [4, 4, 4, 4, 4], [9, 8, 7], [30, 31, 32, 33, 34, 35]]
BATCHES = (PROMPTS[:4], PROMPTS[4:], PROMPTS[1:5])
NUM_LENGTHS = 4  # visible lengths of 16 to 64


@pytest.fixture(autouse=True)
def exact_float32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def in_context():
    with graphsafe.thread_context(FIRST):
        yield


def on_gpu(target: Target, dtype: torch.dtype = torch.float32) -> Target:
    moved = Target(target.model.to(FIRST, dtype), target.tokenizer)
    moved.eos_token_ids = target.eos_token_ids
    return moved


def decoder_of(target, **options):
    return BatchDecoder(target, COUNT, num_rows=4, max_prompt=7, visible_step=16, **options)


def speculative_of(target, drafting, **options):
    return SpeculativeDecoder(target, drafting, COUNT, num_rows=4, max_prompt=7, visible_step=16, **options)


@pytest.fixture
def num_passes(monkeypatch):
    """Counts the passes whose Python runs; prefills are not among them."""
    calls = []
    step = TargetDecoder.step
    monkeypatch.setattr(TargetDecoder, "step", lambda self, *args: calls.append(1) or step(self, *args))
    return calls


@pytest.mark.usefixtures("in_context")
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_graphed_decode_equals_eager_for_batch_after_batch(temperature, num_passes):
    target = on_gpu(tiny_target())
    expected = []
    for number, batch in enumerate(BATCHES):
        seeds = [10 * number + row for row in range(len(batch))]
        expected.append(decode(target, batch, COUNT, temperature=temperature, seeds=seeds).answers)
    num_passes.clear()
    with decoder_of(target) as decoder:
        for number, batch in enumerate(BATCHES):
            seeds = [10 * number + row for row in range(len(batch))]
            assert decoder.decode(batch, temperature=temperature, seeds=seeds).answers == expected[number]
        assert 1 <= decoder.num_captures <= NUM_LENGTHS
    assert len(num_passes) <= 4 * NUM_LENGTHS  # warm-up, and a capture (begun again once at most)


@pytest.mark.usefixtures("in_context")
def test_sampled_answers_are_those_of_the_cpu():
    cpu, seeds = tiny_target(), [1, 2, 3, 4]
    expected = decode(cpu, PROMPTS[:4], COUNT, temperature=1.0, seeds=seeds).answers
    with decoder_of(on_gpu(tiny_target())) as decoder:
        assert decoder.decode(PROMPTS[:4], temperature=1.0, seeds=seeds).answers == expected


@pytest.mark.usefixtures("in_context")
def test_graphed_decode_stops_early_once_all_rows_have_ended(num_passes):
    target = on_gpu(tiny_target())
    answers = decode(target, PROMPTS[:4], COUNT).answers
    target.eos_token_ids = tuple(answer[place] for place, answer in zip((0, 2, 3, 5), answers, strict=True))
    expected = decode(target, PROMPTS[:4], COUNT)
    assert max(map(len, expected.answers)) <= 6
    with decoder_of(target) as decoder:
        ours = decoder.decode(PROMPTS[:4])
    assert ours.answers == expected.answers
    assert ours.num_calls <= 16


@pytest.mark.usefixtures("in_context")
@pytest.mark.parametrize("kind", ["drafter", "lookup"])
@pytest.mark.parametrize("ends", [False, True])
def test_graphed_speculation_equals_eager_and_the_target_alone(kind, ends, num_passes):
    target, drafter = on_gpu(tiny_target()), random_drafter().to(FIRST)

    def drafting():
        return ModelDrafting(drafter, target) if kind == "drafter" else LookupDrafting(4)

    if ends:
        answers = decode(target, PROMPTS[:4], COUNT).answers
        target.eos_token_ids = (answers[1][0], answers[2][9])
    alone = [decode(target, batch, COUNT).answers for batch in BATCHES]
    eager = [speculate(target, drafting(), batch, COUNT) for batch in BATCHES]
    num_passes.clear()
    with speculative_of(target, drafting()) as decoder:
        ours = [decoder.decode(batch) for batch in BATCHES]
        assert decoder.num_captures >= 1
    assert ours == eager
    assert [done.answers for done in ours] == alone
    assert len(num_passes) <= 4 * NUM_LENGTHS


@pytest.mark.usefixtures("in_context")
def test_warmed_up_decoders_capture_nothing_more():
    target, drafter = on_gpu(tiny_target()), random_drafter().to(FIRST)
    for decoder in (
        decoder_of(target),
        speculative_of(target, ModelDrafting(drafter, target)),
        speculative_of(target, LookupDrafting(4)),
    ):
        with decoder:
            decoder.warm_up(PROMPTS)
            captures = decoder.num_captures
            assert 1 < captures <= NUM_LENGTHS
            for batch in BATCHES:
                assert decoder.decode(batch).answers == decode(target, batch, COUNT).answers
            assert decoder.num_captures == captures


def test_memory_is_flat_over_batches():
    target, drafter = on_gpu(tiny_target()), random_drafter().to(FIRST)
    with (
        graphsafe.thread_context(FIRST),
        speculative_of(target, ModelDrafting(drafter, target)) as decoder,
    ):
        decoder.warm_up(PROMPTS)
        for batch in BATCHES:
            decoder.decode(batch)
        used = torch.cuda.memory_reserved()
        for _ in range(5):
            for batch in BATCHES:
                decoder.decode(batch)
        assert torch.cuda.memory_reserved() == used


@pytest.mark.usefixtures("in_context")
def test_close_gives_the_cache_back():
    target = on_gpu(tiny_target())
    decode(target, PROMPTS[:4], 20)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    decoder = BatchDecoder(target, 20, num_rows=256, max_prompt=4000)  # 1.6 GB
    decoder.decode(PROMPTS)
    assert decoder.num_captures >= 1
    assert torch.cuda.memory_allocated() > before + 2**29
    decoder.close()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() < before + 2**26


@pytest.mark.usefixtures("in_context")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replays_give_the_logits_of_eager_steps_bit_for_bit(dtype):
    target = on_gpu(tiny_target(), dtype)
    batches = [batch for batch in BATCHES if len(batch) == 4]  # of other sizes eager kernels may be others
    with decoder_of(target) as graphed, decoder_of(target, graphed=False) as eager:
        for batch in batches:
            ours, expected = graphed.decode(batch), eager.decode(batch)
            assert torch.equal(ours.tops, expected.tops)
            assert torch.equal(ours.gaps, expected.gaps)
        assert graphed.num_captures >= 1


@pytest.mark.usefixtures("in_context")
def test_graphed_steps_are_faster_where_launches_are_what_costs():
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=24,
        num_attention_heads=4,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    target = on_gpu(Target(LlamaForCausalLM(config)))

    def seconds(graphed):
        with BatchDecoder(target, 100, num_rows=4, max_prompt=8, graphed=graphed) as decoder:
            decoder.warm_up(PROMPTS[:4])
            decoder.decode(PROMPTS[:4])
            began = time.perf_counter()
            decoder.decode(PROMPTS[:4])
            return time.perf_counter() - began

    assert seconds(True) < seconds(False) / 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_evaluation_runs_as_graphs_and_its_checks_hold(dtype):
    config = dataclasses.replace(
        PRESETS["demo"], targets=("cuda:0",), max_new_tokens=COUNT, decode_batch=4, min_acceptance=1.0, dtype=dtype
    )
    target = on_gpu(tiny_target(), getattr(torch, dtype))
    drafter = random_drafter().to(FIRST, getattr(torch, dtype))
    prompts = [Prompt(number, number + 1, tokens) for number, tokens in enumerate(PROMPTS)]

    def run(**options):
        return evaluate(target, lambda lane: ModelDrafting(drafter, lane), prompts, config, **options)

    evaluation = run()
    assert evaluation.acceptance >= 1
    assert evaluation.passed or dtype == "bfloat16"  # a random model's rounding may exceed a near-tie
    report = evaluation.report()
    assert "ran as CUDA graphs, captured before the clock started: target alone, drafter, prompt lookup" in report
    assert "6 one at a time" in report
    for accept in (accept_everything, accept_one_too_many):
        assert not run(accept=accept, num_single=0).lossless


@pytest.mark.parametrize("targets", [("cuda:0",), pytest.param(("cuda:0", "cuda:1"), marks=pytest.mark.two_gpus)])
def test_regenerate_writes_the_same_answers_as_on_the_cpu(tmp_path, monkeypatch, targets):
    def load(directory, device, dtype):
        target = Target(tiny_target().model.to(device), CharTokenizer())
        return target

    monkeypatch.setattr(generate, "resolve_target", lambda name, say: tmp_path)
    monkeypatch.setattr(generate, "load_target", load)
    lines = [conversation(f"number {number} " * (1 + number % 3)) for number in range(11)]
    config = tiny_run(tmp_path, lines, num_samples=2, sample_temperature=1.2)

    def answers(config):
        path = generate.main(config, say=lambda text: None)
        found = [json.loads(line) for line in path.read_text().splitlines()]
        path.unlink()
        return [(record["sample"], record["answer_tokens"]) for record in found]

    assert answers(dataclasses.replace(config, targets=targets)) == answers(config)
