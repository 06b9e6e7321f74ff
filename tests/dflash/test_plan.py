from __future__ import annotations

import dataclasses
import socket

import huggingface_hub
import pytest
import torch
from transformers import LlamaConfig

from examples.dflash import memory, tables
from examples.dflash import plan as plan_module
from examples.dflash.config import PRESETS, InputError
from examples.dflash.data import Document
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


def test_plan_refuses_a_target_whose_documents_cannot_be_packed(tmp_path):
    config = LlamaConfig(num_hidden_layers=1)
    config.layer_types = ["linear_attention"]
    config.save_pretrained(tmp_path / "target")
    with pytest.raises(InputError, match="linear_attention"):
        plan(configuration(tmp_path, target=str(tmp_path / "target")))


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


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("there is no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def anywhere(config, tmp_path):
    return dataclasses.replace(config, out=tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "anchors", "parameters"), [("qwen3-4b", 2048, "4022 M"), ("qwen3-8b", 1536, "8191 M")]
)
def test_plan_of_a_large_preset_needs_no_network(tmp_path, capsys, no_network, name, anchors, parameters):
    config = anywhere(PRESETS[name], tmp_path)
    assert (config.token_budget, config.num_anchors, config.block_size, config.gamma) == (49152, anchors, 16, 7.0)
    assert plan(config) == 0
    out = capsys.readouterr().out
    assert f"{parameters} parameters" in out
    assert "of layers 1, 9, 17, 25, 33; mask token 151669" in out
    assert "cuda:0, cuda:1, cuda:2, cuda:3, cuda:4, cuda:5: about" in out
    assert "on NVIDIA H200s" in out and "tokens/s" in out and "bounded by" in out
    assert "a million tokens" in out and "Assumed: useful work at 45%" in out
    assert "answers.jsonl is not there: regenerate writes it" in out


@pytest.mark.parametrize("name", ["qwen3-4b", "qwen3-8b"])
def test_large_presets_fit_80_gb(tmp_path, name):
    config = anywhere(PRESETS[name], tmp_path)
    shape, parameters = read_shape(config)
    devices = topology(config, must_exist=False)
    for needs in memory.estimate(config, shape, parameters, devices).values():
        assert sum(need.num_bytes for need in needs) < 72 * 2**30


def test_plan_of_a_random_target_is_that_of_the_target(tmp_path, capsys, no_network):
    config = anywhere(PRESETS["qwen3-4b"], tmp_path)
    assert read_shape(dataclasses.replace(config, target="random:Qwen/Qwen3-4B")) == read_shape(config)


def test_unknown_target_without_a_network_is_an_input_error(tmp_path, no_network, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # else it tries again for long
    with pytest.raises(InputError, match="nobody/nothing"):
        plan(configuration(tmp_path, target="nobody/nothing"))


def fake_documents(monkeypatch, tmp_path, lengths):
    documents = [Document(i, [5] * n, [True] * n, 0) for i, n in enumerate(lengths)]
    monkeypatch.setattr(plan_module, "load_training_documents", lambda *args, **kwargs: documents)
    path = tmp_path / "data.jsonl"
    path.write_text("{}\n")
    return path


def test_plan_counts_the_data_and_what_the_caches_hold_of_it(tmp_path, target_dir, capsys, monkeypatch):
    path = fake_documents(monkeypatch, tmp_path, [64, 32, 32])  # two full rows
    config = configuration(
        tmp_path, target=target_dir, data=path, regenerate=False, cache_dir=tmp_path / "cache", cache_features=1.0
    )
    config = dataclasses.replace(config, cache_disk=128 * 64 * 4 / 2 / 2**30)  # half of all features
    assert plan(config) == 0
    out = capsys.readouterr().out
    assert "3, 128 tokens; 2 batches an epoch" in out
    assert "100% of the rows" in out
    assert "holds 50% of them" in out and "holds 100% of them, a target thread" in out
    assert "Documents of 48 tokens (in the data)" in out
    assert not (tmp_path / "cache").exists()


def test_plan_tells_the_time_of_the_run_where_the_data_is_known(tmp_path, target_dir, capsys, monkeypatch):
    path = fake_documents(monkeypatch, tmp_path, [60] * 30)
    changes = dict(target=target_dir, data=path, regenerate=False, dtype="bfloat16", max_steps=None, epochs=3)
    config = configuration(tmp_path, targets=("cuda:90",), drafters=("cuda:91", "cuda:92"), **changes)
    assert plan(config) == 0
    assert "for 90 batches" in capsys.readouterr().out
    assert plan(dataclasses.replace(config, max_steps=10)) == 0
    assert "for 20 batches" in capsys.readouterr().out


def test_plan_does_not_read_data_that_is_large_or_that_it_cannot_tokenise(tmp_path, target_dir, capsys, monkeypatch):
    path = tmp_path / "data.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    config = configuration(tmp_path, target=target_dir, data=path, regenerate=False)
    assert plan(config) == 0
    assert "not read" in capsys.readouterr().out
    monkeypatch.setattr(plan_module, "MAX_DATA_BYTES", 10)
    assert plan(config) == 0
    assert "too much to read" in capsys.readouterr().out


def test_plan_says_unknown_on_the_cpu(tmp_path, target_dir, capsys):
    assert plan(configuration(tmp_path, target=target_dir)) == 0
    assert "measured in smoke" in capsys.readouterr().out


def test_plan_says_plainly_what_does_not_fit_and_still_exits_with_0(tmp_path, target_dir, capsys, monkeypatch):
    monkeypatch.setattr(plan_module, "device_bytes", lambda device: 2**20)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Strange Device 9")
    config = configuration(tmp_path, target=target_dir, targets=("cuda:0",), drafters=("cuda:0",), dtype="bfloat16")
    assert plan(config) == 0
    out = capsys.readouterr().out
    assert "DOES NOT FIT" in out
    assert "unknown for these devices" in out
    monkeypatch.setattr(memory, "device_bytes", lambda device: 2**20)
    assert "DOES NOT FIT" in memory.describe_needs(torch.device("cuda:0"), [memory.Need("a", 2**21, "")])
    assert "DOES NOT FIT" not in memory.describe_needs(torch.device("cuda:0"), [memory.Need("a", 2**19, "")])


def test_head_is_counted_where_it_is_a_copy_only(tmp_path):
    shape = TargetShape.of(tiny_target().config)

    def has_head(targets, drafters):
        config = configuration(tmp_path, targets=targets, drafters=drafters)
        needs = memory.estimate(config, shape, 1000, topology(config, must_exist=False))
        return [need.what for need in needs[torch.device(drafters[0])]].count("embedding and head")

    assert has_head(("cuda:0",), ("cuda:1",)) == 1
    assert has_head(("cuda:0",), ("cuda:0",)) == 0


def test_tables_have_lines_on_a_terminal_and_none_elsewhere(capsys, monkeypatch):
    table = tables.Table("memory [cuda:0]", [("1 GiB", "weights [a]"), ("20 GiB", "b")], ("size", "what"), "a note")
    tables.show([table])
    plain = capsys.readouterr().out
    assert plain.splitlines()[:4] == ["memory [cuda:0]", "  size    what", "  1 GiB   weights [a]", "  20 GiB  b"]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    tables.show([table])
    rich = capsys.readouterr().out
    assert "weights [a]" in rich and "memory [cuda:0]" in rich and "a note" in rich
    assert "\u2500" in rich
