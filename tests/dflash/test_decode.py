"""The decoder's cache: rows are independent, and what is past a row's position is as if it were not there."""

import gc
import threading
import weakref

import pytest
import torch

import graphsafe
from examples.dflash.decode import BatchDecoder, cut_at_end, decode, draw, loops
from examples.dflash.packed import grouped_attention
from examples.dflash.stepping import NUM_WARMUPS, TargetDecoder, pad_prompts

from .models import VOCAB, tiny_qwen3, tiny_target

PROMPTS = [[5, 9, 11], [7, 3, 20, 33, 8, 40, 12], [50], [4, 4, 4, 4, 4]]
CPU = torch.device("cpu")


def plain_answer(target, prompt, count):
    """One forward pass over everything for each token: no cache, no batch."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(target.model(torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] in target.eos_token_ids:
                break
    return tokens[len(prompt) :]


@pytest.mark.parametrize("make", [tiny_target, tiny_qwen3])
def test_decode_in_a_batch_equals_each_prompt_alone_without_a_cache(make):
    target = make()
    decoded = decode(target, PROMPTS, 20)
    assert decoded.answers == [plain_answer(target, prompt, 20) for prompt in PROMPTS]


def test_decode_stops_at_end_of_text_and_says_how_sure_it_was():
    target = tiny_target()
    answer = plain_answer(target, PROMPTS[1], 20)
    target.eos_token_ids = (answer[3],)
    decoded = decode(target, [PROMPTS[1]], 20)
    assert decoded.answers == [answer[: answer.index(answer[3]) + 1]]
    logits = target.model(torch.tensor([PROMPTS[1]])).logits[0, -1]
    best = logits.topk(2).values
    torch.testing.assert_close(decoded.gaps[0, 0], best[0] - best[1], rtol=1e-4, atol=1e-5)


def test_decode_draws_from_each_rows_seed_whatever_the_batch():
    target = tiny_target()

    def sampled(prompts, seeds):
        return decode(target, prompts, 8, temperature=1.5, seeds=seeds).answers

    together = sampled(PROMPTS, [1, 2, 3, 4])
    assert sampled(PROMPTS[::-1], [4, 3, 2, 1]) == together[::-1]
    assert [sampled([prompt], [seed])[0] for prompt, seed in zip(PROMPTS, [1, 2, 3, 4], strict=True)] == together
    others = sampled(PROMPTS, [5, 2, 6, 7])
    assert others[1] == together[1]
    assert all(others[row] != together[row] for row in (0, 2, 3))


def test_draws_follow_the_shares_at_the_temperature():
    logits = torch.tensor([[1.0, -torch.inf, 3.0, 0.0, 2.0, -torch.inf]])
    noise = (torch.arange(20_000, dtype=torch.float64)[:, None] + 0.5) / 20_000
    for temperature in (0.5, 1.0, 2.0):
        drawn = draw(logits.expand(20_000, -1), torch.tensor(temperature), noise)
        found = torch.bincount(drawn[:, 0], minlength=6) / 20_000
        torch.testing.assert_close(found, (logits[0] / temperature).softmax(-1), rtol=0, atol=2e-4)


def test_decode_ends_early_when_stopped():
    stop = threading.Event()
    stop.set()
    assert all(len(answer) == 1 for answer in decode(tiny_target(), PROMPTS, 20, stop=stop).answers)


def test_rejected_tokens_leave_no_trace_in_the_cache():
    target = tiny_target()
    tokens, lengths = pad_prompts(PROMPTS, CPU)
    decoder = TargetDecoder(target, len(PROMPTS), 40, layer_ids=(1, 3))
    decoder.prefill(tokens, lengths)
    block = torch.arange(4)
    wrong = torch.randint(3, VOCAB, (len(PROMPTS), 4))
    decoder.step(wrong, lengths[:, None] + block, decoder.visible_length(21))
    right = torch.randint(3, VOCAB, (len(PROMPTS), 4))
    said = decoder.step(right, lengths[:, None] + block, decoder.visible_length(21))
    for row, prompt in enumerate(PROMPTS):
        alone = target.model(torch.tensor([prompt + right[row].tolist()]), output_hidden_states=True)
        torch.testing.assert_close(said.logits[row], alone.logits[0, -4:], rtol=1e-4, atol=1e-4)
        features = torch.cat([alone.hidden_states[layer + 1][0, -4:] for layer in (1, 3)], dim=-1)
        torch.testing.assert_close(said.features[row], features, rtol=1e-4, atol=1e-4)


def test_dropped_rows_leave_the_others_as_they_were():
    target = tiny_target()
    tokens, lengths = pad_prompts(PROMPTS, CPU)
    decoder = TargetDecoder(target, len(PROMPTS), 40)
    decoder.prefill(tokens, lengths)
    rows = torch.tensor([1, 3])
    decoder.keep(rows)
    said = decoder.step(torch.tensor([[6], [8]]), lengths[rows][:, None], decoder.visible_length(11))
    for index, row in enumerate(rows.tolist()):
        alone = target.model(torch.tensor([[*PROMPTS[row], (6, 8)[index]]])).logits[0, -1]
        torch.testing.assert_close(said.logits[index, 0], alone, rtol=1e-4, atol=1e-4)


def test_cut_at_end_keeps_the_end():
    assert cut_at_end([5, 2, 7, 2], (2, 3)) == [5, 2]
    assert cut_at_end([5, 7], (2,)) == [5, 7]
    assert cut_at_end([5, 7], ()) == [5, 7]


def test_answers_that_repeat_eight_tokens_loop():
    assert loops([1, 2, 3] * 10)
    assert not loops(list(range(100)))
    assert not loops([1, 2, 3])


def test_grouped_attention_equals_attention_over_repeated_keys():
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 6, 5, 8), torch.randn(3, 2, 9, 8), torch.randn(3, 2, 9, 8)
    seen = torch.rand(3, 1, 5, 9) < 0.7
    seen[..., 0] = True
    mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    keys, values = key.repeat_interleave(3, dim=1), value.repeat_interleave(3, dim=1)
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=0.3)
    ours = grouped_attention(query, key, value, mask.repeat(1, 1, 3, 1), 0.3)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("max_length", "first", "expected"), [(40, 5, [8, 16, 24, 32, 40]), (37, 17, [24, 32, 40])])
def test_visible_lengths_cover_every_row_in_few_steps(max_length, first, expected):
    decoder = TargetDecoder(tiny_target(), 1, max_length, visible_step=8)
    assert decoder.visible_lengths(first) == expected
    assert all(decoder.visible_length(length) in expected for length in range(first, max_length + 1))
    assert len(TargetDecoder(tiny_target(), 1, 10_000).visible_lengths(1)) <= 16


# as graphs: on the CPU a replay runs the captured function again, on the same tensors


@pytest.fixture
def in_context():
    with graphsafe.thread_context("cpu"):
        yield


def graphed_decoder(target, **options):
    settings = {"num_rows": 5, "max_prompt": 9, "graphed": True, "visible_step": 8} | options
    return BatchDecoder(target, 20, **settings)


@pytest.mark.usefixtures("in_context")
@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("ends", [False, True])
def test_graphed_decode_equals_eager_for_batch_after_batch(temperature, ends):
    target = tiny_target()
    if ends:  # each answer ends at another place, one in its first token
        target.eos_token_ids = tuple(
            answer[place] for place, answer in zip((0, 4, 9, 13), decode(target, PROMPTS, 20).answers, strict=True)
        )
    others = [[30, 31, 5, 5, 6, 7, 9, 10, 11], [8, 9]]
    with graphed_decoder(target) as decoder:
        for batch, seeds in ((PROMPTS, [1, 2, 3, 4]), (others, [5, 6]), (PROMPTS[1:], [2, 3, 4])):
            drawing = {"temperature": temperature, "seeds": seeds}
            ours, expected = decoder.decode(batch, **drawing), decode(target, batch, 20, **drawing)
            assert ours.answers == expected.answers
            assert ours.num_calls == expected.num_calls
            for name in ("gaps", "tops"):
                pairs = zip(getattr(ours, name), getattr(expected, name), expected.answers, strict=True)
                for mine, theirs, answer in pairs:
                    torch.testing.assert_close(mine[: len(answer)], theirs[: len(answer)], rtol=1e-4, atol=1e-4)
        assert 1 <= decoder.num_captures <= 4  # visible lengths 8 to 32
    assert decoder.num_captures == 0


@pytest.mark.usefixtures("in_context")
def test_warmed_up_decoder_captures_nothing_more_and_draws_the_same_answers():
    target = tiny_target()
    with graphed_decoder(target, num_rows=2) as decoder:
        decoder.warm_up(PROMPTS)
        assert decoder.num_captures == 4
        for batch in (PROMPTS[:2], PROMPTS[2:]):
            assert decoder.decode(batch).answers == decode(target, batch, 20).answers
        assert decoder.num_captures == 4


@pytest.mark.usefixtures("in_context")
def test_graphed_step_runs_its_python_in_warmup_and_capture_alone():
    """On the CPU replays run it too, so the calls are told apart by what the graphed function counts."""
    with graphed_decoder(tiny_target()) as decoder:
        for _ in range(4):
            decoder.decode(PROMPTS)
        _, steps = decoder._shared
        counts = steps._graphed.stats()
    assert counts.captures == 4
    assert counts.eager_calls <= NUM_WARMUPS * 4
    assert counts.replays == 4 * 19 - counts.eager_calls


@pytest.mark.usefixtures("in_context")
def test_step_that_cannot_be_captured_runs_eagerly_with_a_warning():
    target = tiny_target()
    expected = decode(target, PROMPTS, 20).answers
    target.decoder.norm.register_forward_hook(lambda module, args, output: output * float(output.abs().max() > -1))
    with graphed_decoder(target) as decoder:
        with pytest.warns(UserWarning, match="without CUDA graphs, which is slower"):
            assert decoder.decode(PROMPTS).answers == expected
        assert decoder.num_captures == 0
        assert decoder.decode(PROMPTS).answers == expected


@pytest.mark.usefixtures("in_context")
def test_closed_decoder_lets_its_cache_go_at_once():
    gc.disable()
    try:
        decoder = graphed_decoder(tiny_target())
        decoder.decode(PROMPTS)
        cache = weakref.ref(decoder._shared[0].decoder._cache)
        decoder.close()
        assert cache() is None
    finally:
        gc.enable()


def test_graphed_decode_asks_for_a_context():
    with pytest.raises(graphsafe.NoContextError), graphed_decoder(tiny_target()) as decoder:
        decoder.decode(PROMPTS)
