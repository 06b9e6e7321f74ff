from __future__ import annotations

import pytest
from transformers import LlamaConfig

from examples.dflash import plan as plan_module
from examples.dflash.config import InputError
from examples.dflash.drafter import Drafter
from examples.dflash.plan import drafter_config, drafter_needs, num_parameters, plan, read_shape, topology
from examples.dflash.smoke import smoke
from examples.dflash.target import TargetShape

from .models import tiny_config, tiny_target
from .test_train import configuration


@pytest.fixture
def target_dir(tmp_path):
    tiny_target().model.config.save_pretrained(tmp_path / "target")
    return str(tmp_path / "target")


def test_plan_prints_topology_shapes_and_memory_and_runs_nothing(tmp_path, target_dir, capsys):
    config = configuration(tmp_path, target=target_dir, targets=("cpu", "cpu"), drafters=("cpu", "cpu", "cpu"))
    assert plan(config) == 0
    out = capsys.readouterr().out
    assert "-> target 1 on cpu -> drafters 0, 1, 2" in out
    assert "64 tokens, 12 blocks of 4 = 48 slots" in out
    assert "features of a batch: [64, 64]" in out
    assert "cpu: about" in out and "lower: --token-budget" in out
    assert not config.out.exists()


def test_shape_without_weights_is_that_of_the_loaded_target(tmp_path, target_dir):
    shape, parameters = read_shape(configuration(tmp_path, target=target_dir))
    target = tiny_target()
    assert shape == target.shape
    assert parameters == sum(parameter.numel() for parameter in target.model.parameters())


@pytest.mark.parametrize("num_layers", [1, 3])
def test_number_of_parameters_is_the_drafters(num_layers):
    config = tiny_config(num_layers=num_layers)
    assert num_parameters(config) == sum(parameter.numel() for parameter in Drafter(config).parameters())


def test_needs_grow_with_what_they_say_lowers_them(tmp_path):
    shape = TargetShape.of(tiny_target().config)

    def total(**changes):
        config = configuration(tmp_path, **changes)
        return sum(n.num_bytes for n in drafter_needs(config, drafter_config(config, shape), topology(config), 0))

    base = total()
    for name, value in (("token_budget", 128), ("num_anchors", 24), ("loss_chunk", 32), ("num_layers", 2)):
        assert total(**{name: value}) > base, name
    assert total(num_layers=3, gradient_checkpointing=True) < total(num_layers=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": "flex"}, "--attention flex"),
        ({"num_features": 5}, "--num-features"),
        ({"mask_token_id": None}, "--mask-token-id"),
        ({"mask_token_id": 61}, "no row of an embedding"),
    ],
)
def test_plan_names_the_option_that_cannot_be(tmp_path, target_dir, changes, message):
    with pytest.raises(InputError, match=message):
        plan(configuration(tmp_path, target=target_dir, **changes))


def test_plan_may_be_for_another_machine_but_a_run_may_not(tmp_path, target_dir, capsys):
    config = configuration(tmp_path, target=target_dir, targets=("cuda:99",), drafters=("cuda:98",))
    assert plan(config) == 0
    assert "cuda:98: about" in capsys.readouterr().out
    with pytest.raises(InputError, match="--targets names cuda:99"):
        topology(config)


def test_plan_refuses_a_target_whose_documents_cannot_be_packed(tmp_path, monkeypatch):
    config = LlamaConfig(num_hidden_layers=1)
    config.layer_types = ["linear_attention"]
    config.save_pretrained(tmp_path / "target")
    monkeypatch.setattr(plan_module, "resolve_target", lambda name: tmp_path / "target")
    with pytest.raises(InputError, match="linear_attention"):
        plan(configuration(tmp_path))


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_smoke_runs_the_step_at_full_shape_and_finds_memory_flat(tmp_path, target_dir, capsys, mode):
    assert smoke(configuration(tmp_path, target=target_dir, step=mode)) == 0
    out = capsys.readouterr().out
    assert out.count("step ") == 16
    assert "flat" in out


def test_smoke_fails_when_memory_grows(tmp_path, target_dir, monkeypatch):
    from examples.dflash import smoke as smoke_module

    sizes = iter(range(100, 1000, 10))
    monkeypatch.setattr(smoke_module, "_memory_in_use", lambda device: next(sizes))
    assert smoke(configuration(tmp_path, target=target_dir)) == 1
