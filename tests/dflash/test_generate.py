"""regenerate: answers are the target's own, made once, and kept when a run is interrupted."""

import dataclasses
import io
import json
import sys

import pytest
import torch

from examples.dflash import generate
from examples.dflash.config import InputError
from examples.dflash.data import (
    answer_key,
    load_training_documents,
    load_training_prompts,
    read_records,
    render_prompt,
)
from examples.dflash.decode import BatchDecoder, decode

from .models import tiny_target
from .texts import CharTokenizer, conversation, tiny_run


def quiet(text):
    pass


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """A run of ten prompts and a function that makes its targets; ``loaded`` lists the devices they were made for."""
    loaded = []

    def load(directory, device, dtype):
        loaded.append(device)
        target = tiny_target()
        target.tokenizer = CharTokenizer()
        return target

    monkeypatch.setattr(generate, "resolve_target", lambda name, say: tmp_path)
    monkeypatch.setattr(generate, "load_target", load)
    config = tiny_run(tmp_path, [conversation(f"number {number} " * (1 + number % 3)) for number in range(11)])
    return config, loaded


@pytest.mark.parametrize("num_threads", [1, 2])
def test_answers_are_the_targets_own_in_the_datas_order(setup, num_threads):
    config, loaded = setup
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        path = generate.main(config, say=quiet)
        assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
    target = tiny_target()
    prompts = [render_prompt(c, config, CharTokenizer()).tokens for c in load_training_prompts(config)]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    expected = [decode(target, [prompt], config.max_new_tokens).answers[0] for prompt in prompts]
    assert [record["answer_tokens"] for record in records] == expected
    assert [record["messages"][-1]["role"] for record in records] == ["assistant"] * 10
    assert loaded == ["cpu"]
    assert not path.with_suffix(".partial").exists()


def test_second_run_makes_nothing_and_loads_nothing(setup):
    config, loaded = setup
    path = generate.main(config, say=quiet)
    before = path.read_bytes()
    generate.main(config, say=quiet)
    assert len(loaded) == 1
    assert path.read_bytes() == before


def test_another_configuration_makes_its_own_answers(setup):
    config, loaded = setup
    generate.main(config, say=quiet)
    longer = dataclasses.replace(config, max_new_tokens=14)
    generate.main(longer, say=quiet)
    assert len(loaded) == 2
    assert max(len(record["answer_tokens"]) for record in read_records(config.answers_path).values()) > 12


def test_interrupted_run_goes_on_where_it_stopped(setup, monkeypatch):
    config, _ = setup
    config = dataclasses.replace(config, decode_batch=2)
    calls = []

    batched = BatchDecoder.decode

    def failing(self, prompts, **kwargs):
        calls.append(len(prompts))
        if len(calls) in (3, 5):
            raise RuntimeError("pulled the plug")
        return batched(self, prompts, **kwargs)

    monkeypatch.setattr(BatchDecoder, "decode", failing)
    monkeypatch.setattr(generate.torch, "get_num_threads", lambda: 1)  # one thread, so that two batches come first
    with pytest.raises(ExceptionGroup) as caught:
        generate.main(config, say=quiet)
    assert caught.group_contains(RuntimeError, match="pulled the plug")
    assert not config.answers_path.exists()
    kept = read_records(config.answers_path.with_suffix(".partial"))
    assert len(kept) == sum(calls[:2])
    with config.answers_path.with_suffix(".partial").open("a") as file:
        file.write('{"key": "torn')  # as kill -9 leaves it
    with pytest.raises(ExceptionGroup):
        generate.main(config, say=quiet)
    assert len(read_records(config.answers_path.with_suffix(".partial"))) == len(kept) + calls[3]
    generate.main(config, say=quiet)
    assert sum(calls[5:]) == 10 - len(kept) - calls[3]
    assert len(load_training_documents(config, CharTokenizer(), 60, say=quiet)) == 10


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_sampled_answers_depend_on_the_seed_alone(setup):
    config, _ = setup
    hot = dataclasses.replace(config, temperature=1.5)

    def answers(config):
        path = generate.main(config, say=quiet)
        tokens = [record["answer_tokens"] for record in read(path)]
        path.unlink()
        return tokens

    expected = answers(hot)
    assert answers(hot) == expected
    assert answers(dataclasses.replace(hot, decode_batch=7)) == expected
    assert answers(hot) != answers(dataclasses.replace(hot, seed=1))


def test_further_samples_follow_the_first_answer_and_differ(setup):
    config, _ = setup
    plain = read(generate.main(config, say=quiet))
    some = dataclasses.replace(config, num_samples=3, sample_temperature=1.5)
    records = read(generate.main(some, say=quiet))
    prompts = [conversation.prompt for conversation in load_training_prompts(config)]
    assert [record["sample"] for record in records] == [0, 1, 2, 3] * 10
    assert [record["key"] for record in records] == [answer_key(p, some, k) for p in prompts for k in range(4)]
    assert [record["messages"][:-1] for record in records] == [prompt for prompt in prompts for _ in range(4)]
    assert records[::4] == plain  # the first answers are kept, whatever is drawn beside them
    for start in range(0, len(records), 4):
        assert len({tuple(record["answer_tokens"]) for record in records[start : start + 4]}) == 4


def test_samples_depend_on_seed_prompt_and_number_alone(setup):
    config, _ = setup
    some = dataclasses.replace(config, num_samples=2, sample_temperature=1.5)

    def samples(config):
        path = generate.main(config, say=quiet)
        found = {(record["messages"][0]["content"], record["sample"]): record["answer_tokens"] for record in read(path)}
        path.unlink()
        return {place: tokens for place, tokens in found.items() if place[1]}

    two = samples(some)
    three = samples(dataclasses.replace(some, num_samples=3, decode_batch=7))
    assert two == {place: tokens for place, tokens in three.items() if place[1] < 3}
    assert samples(dataclasses.replace(some, num_held_out=4)).items() <= two.items()
    other = samples(dataclasses.replace(some, seed=1))
    assert all(other[place] != tokens for place, tokens in two.items())
    assert samples(dataclasses.replace(some, sample_temperature=0.01)) != two


def test_samples_are_made_where_they_alone_are_missing(setup, monkeypatch):
    config, _ = setup
    generate.main(config, say=quiet)
    temperatures = []
    batched = BatchDecoder.decode

    def noted(self, prompts, **kwargs):
        temperatures.extend([kwargs["temperature"]] * len(prompts))
        return batched(self, prompts, **kwargs)

    monkeypatch.setattr(BatchDecoder, "decode", noted)
    generate.main(dataclasses.replace(config, num_samples=1, sample_temperature=0.9), say=quiet)
    assert temperatures == [0.9] * 10


def test_run_says_its_rate_and_how_many_answers_loop_or_were_cut(setup):
    config, _ = setup
    config = dataclasses.replace(config, max_new_tokens=60)
    said = []
    records = read(generate.main(config, say=said.append))
    answers = [record["answer_tokens"] for record in records]
    cut = sum(len(answer) == 60 and answer[-1] != 2 for answer in answers)
    looping = sum(map(generate.loops, answers))
    assert 0 < cut <= 10
    assert looping > 0
    assert said[-1] == (
        f"regenerate: of 10 answers {looping / 10:.1%} loop, and {cut / 10:.1%} were cut at --max-new-tokens 60"
    )
    assert f"10 answers of {sum(map(len, answers)):,} tokens in" in said[-2]
    assert any(line.startswith("regenerate: 3 of 10 answers, ") for line in said)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(setup, monkeypatch, capsys):
    config, _ = setup
    generate.main(config)
    assert "regenerate: 10 of 10 answers, " in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    generate.main(dataclasses.replace(config, max_new_tokens=13))
    shown = sys.stdout.getvalue()
    assert "10/10" in shown
    assert "\x1b[" in shown
    assert "10 of 10 answers, " not in shown


def test_prompt_beyond_the_targets_positions_is_named(setup):
    config, _ = setup
    config = dataclasses.replace(config, max_new_tokens=500)
    with pytest.raises(InputError, match=r"line \d+: prompt and answer may need 5\d\d positions.*has 512"):
        generate.main(config, say=quiet)
