"""Speculative decoding: what it is worth, and that the lossless check passes what is right and fails what is not."""

import dataclasses
import json

import pytest
import torch

import graphsafe
from examples.dflash import evaluate as command
from examples.dflash import speculate as speculate_module
from examples.dflash.config import PRESETS, InputError
from examples.dflash.data import Prompt
from examples.dflash.decode import decode, loops
from examples.dflash.drafter import save
from examples.dflash.evaluate import evaluate, first_difference, is_tie
from examples.dflash.lookup import History, LookupDrafting
from examples.dflash.speculate import ModelDrafting, SpeculativeDecoder, speculate

from .models import random_drafter, tiny_target
from .texts import CharTokenizer, conversation, counting_target, tiny_run

CONFIG = dataclasses.replace(PRESETS["demo"], max_new_tokens=25, decode_batch=4, min_acceptance=1.0)
PROMPTS = [
    Prompt(number, number + 1, [5 + (7 * number + 3 * place) % 50 for place in range(2 + number % 4)])
    for number in range(6)
]


class CountingOracle:
    """A drafter that knows a counting target, wrong from draft ``right`` on."""

    layer_ids = ()
    on_host = False

    def __init__(self, block_size, right=None, vocabulary=61):
        self.block_size = block_size
        self.offsets = torch.arange(1, block_size)
        self.offsets[right:] += 1 if right is not None else 0
        self.vocabulary = vocabulary

    def start(self, prompts, first, max_length, features, valid):
        pass

    def propose(self, last, positions, visible):
        return (last[:, None] + self.offsets) % self.vocabulary

    def observe(self, committed, features, positions, valid):
        pass

    def keep(self, rows):
        pass


def accept_everything(drafts, posterior):
    return torch.full_like(drafts[:, 0], drafts.shape[1])


def accept_one_too_many(drafts, posterior):
    right = (drafts == posterior[:, :-1]).cumprod(dim=1).sum(dim=1)
    return (right + 1).clamp(max=drafts.shape[1])


def test_drafter_that_knows_the_target_reaches_the_block_size():
    evaluation = evaluate(counting_target(), lambda lane: CountingOracle(8), PROMPTS, CONFIG)
    assert evaluation.acceptance == 8.0
    assert evaluation.passed
    assert evaluation.drafter.accepted == [0] * 8 + [3 * len(PROMPTS)]


@pytest.mark.parametrize("right", [0, 1, 3])
def test_acceptance_counts_the_right_drafts_and_the_targets_own_token(right):
    config = dataclasses.replace(CONFIG, max_new_tokens=1 + 4 * (right + 1))
    evaluation = evaluate(counting_target(), lambda lane: CountingOracle(8, right), PROMPTS, config)
    assert evaluation.acceptance == right + 1
    assert evaluation.lossless


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_drafter_accepts_next_to_nothing_and_is_lossless(dtype):
    target = tiny_target(dtype=getattr(torch, dtype))
    drafter = random_drafter().to(getattr(torch, dtype))
    evaluation = evaluate(
        target, lambda lane: ModelDrafting(drafter, lane), PROMPTS, dataclasses.replace(CONFIG, dtype=dtype)
    )
    assert 1.0 <= evaluation.acceptance < 1.3
    assert evaluation.lossless


def test_corrupted_drafter_stays_lossless():
    target, drafter = tiny_target(), random_drafter()
    with torch.no_grad():
        drafter.layers[0].mlp.down_proj.weight.mul_(1e4)
        drafter.fc.weight[0].fill_(float("nan"))
    evaluation = evaluate(target, lambda lane: ModelDrafting(drafter, lane), PROMPTS, CONFIG)
    assert evaluation.lossless


@pytest.mark.parametrize("accept", [accept_everything, accept_one_too_many])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_corrupted_verifier_fails_the_check(accept, dtype):
    target = tiny_target(dtype=getattr(torch, dtype))
    drafter = random_drafter().to(getattr(torch, dtype))
    config = dataclasses.replace(CONFIG, dtype=dtype)
    evaluation = evaluate(target, lambda lane: ModelDrafting(drafter, lane), PROMPTS, config, accept=accept)
    assert not evaluation.lossless
    assert not evaluation.passed
    assert "not lossless" in evaluation.verdict()
    assert f"line {evaluation.drafter.failures[0].line}: token" in evaluation.report()


def test_low_acceptance_fails():
    config = dataclasses.replace(CONFIG, min_acceptance=2.5, max_new_tokens=17)
    evaluation = evaluate(counting_target(), lambda lane: CountingOracle(8, 1), PROMPTS, config)
    assert evaluation.lossless
    assert not evaluation.passed
    assert "acceptance length 2.00 is below --min-acceptance 2.50" in evaluation.verdict()


def test_speculation_stops_at_end_of_text_within_a_block():
    target = counting_target()
    target.eos_token_ids = (30,)
    done = speculate(target, CountingOracle(8), [[20], [40], [27]], 25)
    assert done.answers == [list(range(21, 31)), [*range(41, 61), *range(5)], [28, 29, 30]]


def test_drafting_in_a_batch_equals_each_prompt_alone():
    target, drafter = tiny_target(), random_drafter()
    tokens = [prompt.tokens for prompt in PROMPTS]
    together = speculate(target, ModelDrafting(drafter, target), tokens, 25)
    alone = [speculate(target, ModelDrafting(drafter, target), [prompt], 25) for prompt in tokens]
    assert together.answers == [done.answers[0] for done in alone]
    assert together.num_rounds == [done.num_rounds[0] for done in alone]


@pytest.fixture
def in_context():
    with graphsafe.thread_context("cpu"):
        yield


def graphed_decoder(target, drafting, **options):
    settings = {"num_rows": 4, "max_prompt": 6, "graphed": True, "visible_step": 8} | options
    return SpeculativeDecoder(target, drafting, 25, **settings)


def drafting_of(kind, target, drafter):
    return ModelDrafting(drafter, target) if kind == "drafter" else LookupDrafting(4)


@pytest.mark.usefixtures("in_context")
@pytest.mark.parametrize("kind", ["drafter", "lookup"])
@pytest.mark.parametrize("ends", [False, True])
def test_graphed_speculation_equals_eager_for_batch_after_batch(kind, ends):
    target, drafter = tiny_target(), random_drafter()
    tokens = [prompt.tokens for prompt in PROMPTS]
    if ends:  # two answers end early, one in its first token
        answers = decode(target, tokens, 25).answers
        target.eos_token_ids = (answers[1][0], answers[2][9])
    with graphed_decoder(target, drafting_of(kind, target, drafter)) as decoder:
        for batch in (tokens[:4], tokens[4:], tokens[1:4]):
            expected = speculate(target, drafting_of(kind, target, drafter), batch, 25)
            assert decoder.decode(batch) == expected
            assert expected.answers == decode(target, batch, 25).answers
        assert 1 <= decoder.num_captures <= 5  # visible lengths 8 to 40


@pytest.mark.usefixtures("in_context")
@pytest.mark.parametrize("right", [2, 7])
def test_graphed_speculation_counts_as_eager_where_drafts_are_accepted(right):
    target = counting_target()
    target.eos_token_ids = (30,)
    prompts = [[20], [40], [27], [29], [3, 4, 5, 6]]
    expected = speculate(target, CountingOracle(8, right), prompts, 25)
    with graphed_decoder(target, CountingOracle(8, right), num_rows=7) as decoder:
        assert decoder.decode(prompts) == expected
    assert expected.answers[2:4] == [[28, 29, 30], [30]]
    assert expected.num_rounds[3] == 0
    assert sum(expected.num_rounds) == sum(expected.accepted)
    committed = sum(count * number for number, count in enumerate(expected.accepted))
    assert committed == sum(len(answer) - 1 for answer in expected.answers)


@pytest.mark.usefixtures("in_context")
def test_drafter_observes_nothing_of_rows_that_have_ended():
    target = counting_target()
    target.eos_token_ids = (30,)
    seen = torch.zeros(6, dtype=torch.int64)

    class Watching(CountingOracle):
        def observe(self, committed, features, positions, valid):
            seen.add_(valid.any(1))

    with graphed_decoder(target, Watching(8, 2), num_rows=6) as decoder:
        done = decoder.decode([[20], [40], [27], [29], [3, 4, 5, 6]])
    assert seen.tolist() == [*done.num_rounds, 0]  # the last row is padding


@pytest.mark.usefixtures("in_context")
def test_warmed_up_speculation_captures_nothing_more():
    target, drafter = tiny_target(), random_drafter()
    tokens = [prompt.tokens for prompt in PROMPTS]
    with graphed_decoder(target, ModelDrafting(drafter, target)) as decoder:
        decoder.warm_up(tokens)
        captures = decoder.num_captures
        assert captures == 5
        for batch in (tokens[:4], tokens[4:]):
            assert decoder.decode(batch) == speculate(target, ModelDrafting(drafter, target), batch, 25)
        assert decoder.num_captures == captures


def test_speculation_looks_seldom_where_the_device_drafts(monkeypatch):
    """Rounds between two looks go on past the end of answers, and must change nothing."""
    target = counting_target()
    target.eos_token_ids = (30,)
    prompts = [[20], [40], [27], [29], [3, 4, 5, 6]]
    expected = speculate(target, CountingOracle(8, 2), prompts, 25)
    monkeypatch.setattr(speculate_module, "_look_every", lambda target, drafting: 4)
    assert speculate(target, CountingOracle(8, 2), prompts, 25) == expected


def test_evaluation_as_graphs_passes_and_fails_as_eagerly():
    target, drafter = tiny_target(), random_drafter()

    def run(**options):
        return evaluate(target, lambda lane: ModelDrafting(drafter, lane), PROMPTS, CONFIG, **options)

    eager, graphed = run(), run(graphed=True, num_single=2)
    assert graphed.passed
    assert graphed.alone == eager.alone
    assert graphed.drafter.accepted == eager.drafter.accepted
    report = graphed.report()
    assert "ran as CUDA graphs, captured before the clock started: target alone, drafter, prompt lookup" in report
    assert "2 one at a time" in report
    assert "ran eagerly: target alone, drafter, prompt lookup" in eager.report()
    assert "one at a time" not in eager.report()
    assert graphed.as_dict()["target_alone"]["graphed"] is True
    assert not run(graphed=True, accept=accept_everything).lossless


def test_lookup_drafts_what_followed_the_longest_suffix():
    history = History([1, 2, 3, 9, 2, 3, 7, 1, 2, 3])
    assert history.draft(4) == [9, 2, 3, 7]  # after 1 2 3, not the later 2 3
    history.extend([8])
    assert history.draft(4) == []
    history.extend([2])
    assert history.draft(2) == [3, 8]


def test_lookup_is_right_on_an_answer_that_repeats_its_prompt():
    target = counting_target(10)
    done = speculate(target, LookupDrafting(4), [[*range(10), 0, 1]], 13)
    assert done.answers == [[(2 + number) % 10 for number in range(13)]]
    assert done.num_rounds == [3]


def test_looping_answers_are_left_out_of_the_second_score():
    evaluation = evaluate(counting_target(10), lambda lane: CountingOracle(8, vocabulary=10), PROMPTS[:1], CONFIG)
    assert loops(evaluation.alone[1])
    assert evaluation.score(evaluation.drafter, looping=False).num_prompts == 0


def test_first_difference_counts_a_missing_token():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_ties_are_judged_by_dtype():
    assert is_tie(9e-5, 20.0, "float32")
    assert not is_tie(2e-4, 20.0, "float32")
    assert is_tie(0.4, 20.0, "bfloat16")  # an ulp of 20 is 0.125
    assert not is_tie(0.5, 20.0, "bfloat16")


@pytest.fixture
def run(tmp_path, monkeypatch):
    target = tiny_target()
    target.tokenizer = CharTokenizer()
    monkeypatch.setattr(command, "resolve_target", lambda name: tmp_path)
    monkeypatch.setattr(command, "load_target", lambda *args: target)
    return tiny_run(tmp_path, [conversation(f"number {number}") for number in range(6)], num_held_out=3)


def test_command_writes_its_outcome(run, capsys):
    save(random_drafter(), run.drafter_path)
    evaluation = command.main(run)
    record = json.loads((run.out / "evaluation.json").read_text())
    assert record["passed"] is evaluation.passed is True
    assert record["drafter"]["all"]["num_prompts"] == 3
    *_, verdict, where = capsys.readouterr().out.splitlines()
    assert verdict.startswith("PASSED: acceptance length 1.0") and str(run.out / "evaluation.json") in where


def test_command_says_when_there_is_no_drafter(run):
    with pytest.raises(InputError, match=r"no drafter at .*Run train first"):
        command.main(run)


def test_command_refuses_the_drafter_of_another_target(run):
    drafter = random_drafter()
    drafter.config = dataclasses.replace(drafter.config, num_target_layers=7)
    save(drafter, run.drafter_path)
    with pytest.raises(InputError, match="trained for a target of"):
        command.main(run)


def test_torn_drafter_is_named(tmp_path):
    config = dataclasses.replace(PRESETS["demo"], out=tmp_path)
    for weights, shape in ((b"\x10", "{}"), (b"", "{")):
        config.drafter_path.write_bytes(weights)
        config.drafter_path.with_suffix(".json").write_text(shape)
        with pytest.raises(InputError, match="no whole drafter"):
            command._load_drafter(config, torch.device("cpu"))
