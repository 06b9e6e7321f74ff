"""The configuration refuses what cannot run, naming the option."""

import dataclasses

import pytest

from examples.dflash.config import PRESETS, Config, InputError, check_split, note_split, preset


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("token_budget", 0),
        ("token_budget", 8),
        ("block_size", 1),
        ("lr", 0.0),
        ("targets", ("tpu:0",)),
        ("drafters", ()),
        ("targets", ("cpu", "cuda:0")),
        ("warmup_ratio", 1.0),
        ("num_held_out", -1),
        ("max_steps", 0),
        ("min_acceptance", 9.0),
    ],
)
def test_config_names_the_option_when_its_value_cannot_run(option, value):
    with pytest.raises(InputError, match="--" + option.replace("_", "-")):
        dataclasses.replace(PRESETS["demo"], **{option: value})


def test_devices_may_be_given_with_commas_or_apart():
    joined = Config(targets=("cuda:0,cuda:1",), drafters=("cuda:2", "cuda:3"))
    assert joined.targets == ("cuda:0", "cuda:1")
    assert joined.drafters == ("cuda:2", "cuda:3")


def test_presets_carry_their_own_name():
    assert {name: config.preset for name, config in PRESETS.items()} == {name: name for name in PRESETS}


def test_preset_lists_the_names_when_unknown():
    with pytest.raises(InputError, match="demo, smollm2"):
        preset("nonsense")


def test_training_path_is_the_data_itself_when_answers_are_not_regenerated():
    config = PRESETS["demo"]
    assert config.training_path == config.answers_path
    given = dataclasses.replace(config, regenerate=False)
    assert given.training_path == given.data


def test_evaluate_refuses_prompts_that_training_has_seen(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n")
    trained = dataclasses.replace(PRESETS["demo"], data=data, out=tmp_path / "run", num_held_out=4)
    check_split(trained)  # nothing is known of a run that noted nothing
    note_split(trained)
    check_split(trained)
    check_split(dataclasses.replace(trained, num_held_out=2))
    with pytest.raises(InputError, match="--num-held-out is 20"):
        check_split(dataclasses.replace(trained, num_held_out=20))
    check_split(dataclasses.replace(trained, num_held_out=20, data=tmp_path / "other.jsonl"))
