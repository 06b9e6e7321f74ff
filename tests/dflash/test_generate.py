"""regenerate: answers are the target's own, made once, and kept when a run is interrupted."""

import dataclasses
import json

import pytest
import torch

from examples.dflash import generate
from examples.dflash.config import InputError
from examples.dflash.data import load_training_documents, load_training_prompts, read_records, render_prompt
from examples.dflash.decode import decode

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

    def failing(target, prompts, *args, **kwargs):
        calls.append(len(prompts))
        if len(calls) in (3, 5):
            raise RuntimeError("pulled the plug")
        return decode(target, prompts, *args, **kwargs)

    monkeypatch.setattr(generate, "decode", failing)
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


def test_sampled_answers_depend_on_the_seed_alone(setup):
    config, _ = setup
    hot = dataclasses.replace(config, temperature=1.5)

    def answers(config):
        path = generate.main(config, say=quiet)
        records = [json.loads(line)["answer_tokens"] for line in path.read_text().splitlines()]
        path.unlink()
        return records

    assert answers(hot) == answers(hot)
    assert answers(hot) != answers(dataclasses.replace(hot, seed=1))


def test_prompt_beyond_the_targets_positions_is_named(setup):
    config, _ = setup
    config = dataclasses.replace(config, max_new_tokens=500)
    with pytest.raises(InputError, match=r"line \d+: prompt and answer may need 5\d\d positions.*has 512"):
        generate.main(config, say=quiet)
