"""The decoder's cache: rows are independent, and what is past a row's position is as if it were not there."""

import threading

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.dflash.decode import TargetDecoder, cut_at_end, decode, pad_prompts
from examples.dflash.target import Target

from .models import VOCAB, tiny_target

PROMPTS = [[5, 9, 11], [7, 3, 20, 33, 8, 40, 12], [50], [4, 4, 4, 4, 4]]


def plain_answer(target, prompt, count):
    """One forward pass over everything for each token: no cache, no batch."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(target.model(torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] in target.eos_token_ids:
                break
    return tokens[len(prompt) :]


def tiny_qwen3():
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=2,
    )
    return Target(Qwen3ForCausalLM(config))


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


def test_decode_draws_from_its_generator_when_sampling():
    target = tiny_target()

    def sampled(seed):
        return decode(target, PROMPTS, 8, temperature=1.5, generator=torch.Generator().manual_seed(seed)).answers

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_decode_ends_early_when_stopped():
    stop = threading.Event()
    stop.set()
    assert all(len(answer) == 1 for answer in decode(tiny_target(), PROMPTS, 20, stop=stop).answers)


def test_rejected_tokens_leave_no_trace_in_the_cache():
    target = tiny_target()
    tokens, lengths = pad_prompts(PROMPTS, "cpu")
    decoder = TargetDecoder(target, len(PROMPTS), 40, layer_ids=(1, 3))
    decoder.prefill(tokens, lengths)
    block = torch.arange(4)
    wrong = torch.randint(3, VOCAB, (len(PROMPTS), 4))
    decoder.step(wrong, lengths[:, None] + block, 20)
    right = torch.randint(3, VOCAB, (len(PROMPTS), 4))
    said = decoder.step(right, lengths[:, None] + block, 20)
    for row, prompt in enumerate(PROMPTS):
        alone = target.model(torch.tensor([prompt + right[row].tolist()]), output_hidden_states=True)
        torch.testing.assert_close(said.logits[row], alone.logits[0, -4:], rtol=1e-4, atol=1e-4)
        features = torch.cat([alone.hidden_states[layer + 1][0, -4:] for layer in (1, 3)], dim=-1)
        torch.testing.assert_close(said.features[row], features, rtol=1e-4, atol=1e-4)


def test_dropped_rows_leave_the_others_as_they_were():
    target = tiny_target()
    tokens, lengths = pad_prompts(PROMPTS, "cpu")
    decoder = TargetDecoder(target, len(PROMPTS), 40)
    decoder.prefill(tokens, lengths)
    rows = torch.tensor([1, 3])
    decoder.keep(rows)
    said = decoder.step(torch.tensor([[6], [8]]), lengths[rows][:, None], 10)
    for index, row in enumerate(rows.tolist()):
        alone = target.model(torch.tensor([[*PROMPTS[row], (6, 8)[index]]])).logits[0, -1]
        torch.testing.assert_close(said.logits[index, 0], alone, rtol=1e-4, atol=1e-4)


def test_cut_at_end_keeps_the_end():
    assert cut_at_end([5, 2, 7, 2], (2, 3)) == [5, 2]
    assert cut_at_end([5, 7], (2,)) == [5, 7]
    assert cut_at_end([5, 7], ()) == [5, 7]
