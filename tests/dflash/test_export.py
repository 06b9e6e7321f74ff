"""Exported drafters: what the formats demand, whole or not at all, and the same drafter when read back."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from examples.dflash import __main__ as command_line
from examples.dflash import evaluate as evaluation
from examples.dflash import export as module
from examples.dflash.config import PRESETS, InputError
from examples.dflash.drafter import Drafter, DrafterConfig, save
from examples.dflash.export import export, load_exported, write_directory
from examples.dflash.formats import Verifier, tensor_shapes

from .models import MASK_TOKEN, NUM_LAYERS, VOCAB, random_drafter, tiny_target
from .texts import CharTokenizer, conversation, counting_target, tiny_run

FORMATS = ["servers", "speculators"]
FILES = {"config.json", "model.safetensors"}
VERIFIER = Verifier("target", ("LlamaForCausalLM",), 512)


@pytest.fixture
def run(tmp_path):
    """A run whose drafter is trained, with the configuration of its target in a directory."""
    target = tiny_target().model.config
    target.architectures = ["LlamaForCausalLM"]
    target.save_pretrained(tmp_path / "target")
    config = dataclasses.replace(PRESETS["demo"], out=tmp_path / "run", target=str(tmp_path / "target"))
    save(random_drafter(), config.drafter_path)
    return config


def weights_of(drafter, dtype=torch.float32):
    return {name: tensor.detach().to(dtype) for name, tensor in drafter.state_dict().items()}


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def same_bits(found, expected):
    assert set(found) == set(expected)
    return all(torch.equal(bits(found[name]), bits(expected[name])) for name in expected)


def sliding(drafter):
    """The same weights in a drafter of one sliding and one full layer."""
    drafter.config = dataclasses.replace(drafter.config, sliding_window=3)
    assert drafter.config.layer_types == ("sliding_attention", "full_attention")
    return drafter


def change(directory, **fields):
    """Set fields of a config.json; None takes one away, and ``dflash`` and ``layers`` are those of its parts."""
    path = directory / "config.json"
    record = json.loads(path.read_text())
    parts = {"dflash": "dflash_config", "layers": "transformer_layer_config"}
    for name, value in fields.items():
        part, entries = (record[parts[name]], value) if name in parts else (record, {name: value})
        for key, entry in entries.items():
            part[key] = entry
            if entry is None:
                del part[key]
    path.write_text(json.dumps(record))


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exported_drafter_reads_back_as_it_was(format_, dtype, run):
    place = export(dataclasses.replace(run, export_format=format_, dtype=dtype))
    assert place == run.out / f"export-{format_}"
    assert {path.name for path in place.iterdir()} == FILES
    assert same_bits(load_file(place / "model.safetensors"), weights_of(random_drafter(), getattr(torch, dtype)))
    again = load_exported(place, dtype=getattr(torch, dtype))
    assert again.config == random_drafter().config
    assert same_bits(again.state_dict(), weights_of(random_drafter(), getattr(torch, dtype)))


def test_servers_config_is_what_transformers_makes_the_drafter_of(run):
    config = AutoConfig.from_pretrained(export(run))
    assert (config.model_type, config.architectures) == ("qwen3", ["DFlashDraftModel"])
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (32, 40, 2)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert (config.vocab_size, config.rms_norm_eps, config.max_position_embeddings) == (VOCAB, 1e-5, 512)
    assert (config.hidden_act, config.attention_bias, config.tie_word_embeddings) == ("silu", False, False)
    assert (config.layer_types, config.sliding_window) == (["full_attention"] * 2, None)
    assert (config.num_target_layers, config.block_size, config.dtype) == (NUM_LAYERS, 4, torch.float32)
    assert config.dflash_config == {"mask_token_id": MASK_TOKEN, "target_layer_ids": [1, 3], "block_size": 4}


def test_servers_config_says_rope_theta_to_older_readers_too(run):
    record = json.loads((export(run) / "config.json").read_text())
    assert (record["rope_theta"], record["rope_scaling"], record["torch_dtype"]) == (5000.0, None, "float32")


def test_sliding_layers_are_exported_and_read_back(run):
    save(sliding(random_drafter()), run.drafter_path)
    place = export(run)
    config = AutoConfig.from_pretrained(place)
    assert (config.layer_types, config.sliding_window) == (["sliding_attention", "full_attention"], 3)
    assert "causal" not in config.dflash_config  # it would hold for the full layer too
    assert load_exported(place).config == sliding(random_drafter()).config


def test_window_that_no_layer_has_is_left_out(run):
    drafter = random_drafter()
    drafter.config = dataclasses.replace(drafter.config, sliding_window=3, num_full_layers=5)
    save(drafter, run.drafter_path)
    again = load_exported(export(run)).config
    assert again == random_drafter().config
    assert again.layer_types == drafter.config.layer_types


def test_speculators_config_counts_layers_from_the_embeddings_and_names_the_verifier(run):
    record = json.loads((export(dataclasses.replace(run, export_format="speculators")) / "config.json").read_text())
    assert record["aux_hidden_state_layer_ids"] == [2, 4]
    assert (record["mask_token_id"], record["block_size"], record["draft_vocab_size"]) == (MASK_TOKEN, 4, VOCAB)
    assert record["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    verifier = {"name_or_path": str(Path(run.target).resolve()), "architectures": ["LlamaForCausalLM"]}
    assert record["speculators_config"]["verifier"] == verifier
    assert record["sliding_window_non_causal"] is True  # false makes full layers causal in vLLM
    assert record["transformer_layer_config"]["rope_parameters"]["rope_theta"] == 5000.0


def test_verifier_keeps_its_name_on_the_hub(run, monkeypatch):
    monkeypatch.setattr(module, "resolve_target", lambda name: Path(run.target))
    place = export(dataclasses.replace(run, export_format="speculators", target="someone/model"))
    record = json.loads((place / "config.json").read_text())
    assert record["speculators_config"]["verifier"]["name_or_path"] == "someone/model"


def test_speculators_library_loads_what_is_exported(run):
    library = pytest.importorskip("speculators", exc_type=ImportError)
    tiny_target().model.save_pretrained(run.target)
    place = export(dataclasses.replace(run, export_format="speculators"))
    model = library.SpeculatorModel.from_pretrained(str(place))
    found = model.state_dict()
    assert same_bits({name: found[name] for name in weights_of(random_drafter())}, weights_of(random_drafter()))
    model.save_pretrained(str(run.out / "again"))
    assert load_exported(run.out / "again").config == random_drafter().config


@pytest.mark.parametrize("num_layers", [1, 3])
def test_demanded_tensors_are_the_drafters(num_layers):
    drafter = random_drafter(num_layers=num_layers, num_features=1)
    assert tensor_shapes(drafter.config) == {name: tuple(w.shape) for name, w in drafter.state_dict().items()}
    assert len(tensor_shapes(drafter.config)) == 3 + 11 * num_layers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_theta": None}, "its rope_theta is None"),
        ({"target_layer_ids": [3, 1]}, "from the lowest to the highest"),
        ({"target_layer_ids": [1, NUM_LAYERS - 1]}, "target's last layer, 5"),
        ({"target_layer_ids": [1, NUM_LAYERS]}, "The target has layers 0 to 5"),
        ({"mask_token_id": VOCAB}, "mask_token_id 61 is no row"),
        ({"block_size": 1}, "nothing to draft"),
        ({"num_target_layers": 7}, r"trained for a target of .* \(32, 61, 7\).* has \(32, 61, 6\)"),
        ({"vocab_size": 70, "mask_token_id": 65}, "trained for a target of"),
    ],
)
def test_drafter_that_servers_would_run_wrongly_is_refused(fields, message, run):
    path = run.drafter_path.with_suffix(".json")
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(InputError, match=message):
        export(run)
    assert not (run.out / "export-servers").exists()


def test_speculators_refuses_sliding_layers(run):
    save(sliding(random_drafter()), run.drafter_path)
    with pytest.raises(InputError, match=r"sliding layers.*--export-format servers"):
        export(dataclasses.replace(run, export_format="speculators"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_position_embeddings": 0}, "does not say max_position_embeddings"),
        ({"layer_types": ["sliding_attention"] * NUM_LAYERS, "model_type": "qwen3"}, "cannot be used"),
        ({"model_type": "unheard-of"}, "cannot be used"),
    ],
)
def test_target_that_cannot_be_used_is_named(fields, message, run):
    change(Path(run.target), **fields)
    with pytest.raises(InputError, match=message):
        export(run)


def test_values_that_are_not_finite_are_refused(run):
    drafter = random_drafter()
    with torch.no_grad():
        drafter.norm.weight[3] = float("nan")
    save(drafter, run.drafter_path)
    with pytest.raises(InputError, match=r"norm\.weight holds values that are not finite"):
        export(run)


def without(weights, name):
    return {key: tensor for key, tensor in weights.items() if key != name}


BROKEN = [
    (lambda weights: without(weights, "fc.weight"), r"it lacks fc\.weight"),
    (lambda weights: weights | {"lm_head.weight": torch.ones(61, 32)}, r"lm_head\.weight, which this drafter has not"),
    (lambda weights: weights | {"norm.weight": torch.ones(31)}, r"norm\.weight has the shape \[31\], not \[32\]"),
]


@pytest.mark.parametrize(("broken", "message"), BROKEN)
def test_tensors_that_the_format_does_not_have_are_refused(broken, message, tmp_path):
    drafter = random_drafter()
    with pytest.raises(InputError, match=message):
        write_directory(tmp_path / "export", "servers", drafter.config, VERIFIER, broken(weights_of(drafter)))
    assert not any(tmp_path.iterdir())


def test_tensors_of_two_dtypes_are_refused(tmp_path):
    drafter = random_drafter()
    weights = weights_of(drafter) | {"norm.weight": torch.ones(32, dtype=torch.bfloat16)}
    with pytest.raises(InputError, match="mixes bfloat16, float32"):
        write_directory(tmp_path / "export", "servers", drafter.config, VERIFIER, weights)


def test_former_export_is_replaced(run):
    export(run)
    save(random_drafter(seed=1), run.drafter_path)
    place = export(run)
    assert same_bits(load_exported(place).state_dict(), weights_of(random_drafter(seed=1)))
    assert {path.name for path in place.iterdir()} == FILES
    assert {path.name for path in run.out.iterdir()} == {"drafter.json", "drafter.safetensors", "export-servers"}


def one_bit_off(weights, path, metadata):
    weights = dict(weights)
    weights["norm.weight"] = weights["norm.weight"].clone()
    weights["norm.weight"].view(torch.uint8)[0] ^= 1
    save_file(weights, path, metadata)


def no_space(weights, path, metadata):
    Path(path).write_bytes(b"half")
    raise OSError(28, "No space left on device", str(path))


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [(one_bit_off, RuntimeError, r"norm\.weight reads back with other values"), (no_space, OSError, "No space")],
)
def test_former_export_stays_where_the_new_one_cannot_be_written(fault, error, message, run, monkeypatch):
    place = export(run)
    save(random_drafter(seed=1), run.drafter_path)
    monkeypatch.setattr(module, "save_file", fault)
    with pytest.raises(error, match=message):
        export(run)
    assert same_bits(load_exported(place).state_dict(), weights_of(random_drafter()))
    assert {path.name for path in run.out.iterdir()} == {"drafter.json", "drafter.safetensors", "export-servers"}


def test_configuration_that_reads_back_otherwise_is_not_put_in_place(run, monkeypatch):
    def forgetful(*args):
        return module_write(*args) | {
            "block_size": 5,
            "dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 3]},
        }

    module_write = module.write
    monkeypatch.setattr(module, "write", forgetful)
    with pytest.raises(RuntimeError, match=r"config\.json reads back as .*block_size=5"):
        export(run)
    assert not (run.out / "export-servers").exists()


def test_former_export_comes_back_when_the_new_one_cannot_be_renamed(run, monkeypatch):
    place = export(run)
    save(random_drafter(seed=1), run.drafter_path)
    rename = Path.rename

    def only_the_former(self, to):
        if self.name == "new":
            raise OSError(5, "Input/output error", str(self))
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", only_the_former)
    with pytest.raises(OSError, match="Input/output"):
        export(run)
    assert same_bits(load_exported(place).state_dict(), weights_of(random_drafter()))


def test_other_files_are_never_removed(run, tmp_path):
    kept = tmp_path / "mine"
    kept.mkdir()
    (kept / "thesis.tex").write_text("all of it")
    with pytest.raises(InputError, match=r"holds thesis\.tex, which export would remove"):
        export(dataclasses.replace(run, export_dir=kept))
    with pytest.raises(InputError, match="is a file"):
        export(dataclasses.replace(run, export_dir=kept / "thesis.tex"))
    assert (kept / "thesis.tex").read_text() == "all of it"


def test_exported_directory_is_exported_again_in_the_other_format(run):
    first = export(run)
    place = export(dataclasses.replace(run, drafter=first, export_format="speculators", export_dir=run.out / "other"))
    assert same_bits(load_exported(place).state_dict(), weights_of(random_drafter()))


@pytest.mark.parametrize(("broken", "message"), BROKEN)
def test_directory_with_other_tensors_is_not_loaded(broken, message, run):
    place = export(run)
    save_file(broken(weights_of(random_drafter())), place / "model.safetensors")
    with pytest.raises(InputError, match=message):
        load_exported(place)


def test_missing_and_torn_files_are_named(run, tmp_path):
    place = export(run)
    weights = (place / "model.safetensors").read_bytes()
    (place / "model.safetensors").write_bytes(weights[:-1])
    with pytest.raises(InputError, match=r"model\.safetensors is no whole safetensors file"):
        load_exported(place)
    (place / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"has no model\.safetensors"):
        load_exported(place)
    (place / "config.json").write_text('{"architectures": [')
    with pytest.raises(InputError, match=r"config\.json cannot be read"):
        load_exported(place)
    with pytest.raises(InputError, match=r"has no config\.json"):
        load_exported(tmp_path)


ROPE = {"rope_type": "default", "rope_theta": 5000.0}
SLIDING = {"use_sliding_window": True, "sliding_window": 3}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "describes no DFlash drafter"),
        ({"hidden_size": None}, "does not say hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"head_dim": "16"}, "head_dim is '16', but it must be an integer"),
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"rope_theta": None, "rope_parameters": None}, "does not say rope_theta"),
        ({"rope_theta": 1e6}, "two different rope_theta"),
        ({"rope_parameters": ROPE | {"rope_type": "yarn"}}, "rope_type is 'yarn', which this drafter does not do"),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": 5000.0}, "rope_parameters is no JSON object"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"dflash_config": None}, "does not say dflash_config"),
        ({"dflash": {"mask_token_id": VOCAB}}, "mask_token_id 61 is no row"),
        ({"dflash": {"mask_token_id": None}}, "does not say mask_token_id"),
        ({"dflash": {"target_layer_ids": [1, 9]}}, "layers 0 to 5"),
        ({"dflash": {"target_layer_ids": 3}}, "must be a list of integers"),
        ({"dflash": {"conv_kernel_size": 2, "selector_rank": 0}}, "sets conv_kernel_size, which"),
        ({"dflash": {"causal": True}}, "causal is True"),
        ({"is_causal": True}, "is_causal is True"),
        (
            {"layer_types": ["full_attention", "sliding_attention"], **SLIDING},
            "layers, of which sliding_attention come",
        ),
        ({"layer_types": ["full_attention"]}, "This drafter has 2 layers"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "does not say use_sliding_window: true"),
        (
            {"layer_types": ["sliding_attention", "full_attention"], **SLIDING, "dflash": {"causal": False}},
            "causal is False",
        ),
    ],
)
def test_servers_config_that_asks_for_another_model_is_refused(fields, message, run):
    place = export(run)
    change(place, **fields)
    with pytest.raises(InputError, match=message):
        load_exported(place)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3'"),
        ({"draft_vocab_size": 32}, "draft_vocab_size is 32"),
        ({"sample_from_anchor": True}, "sample_from_anchor is True"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, "layers 0 to 5"),
        ({"num_target_layers": None}, "does not say num_target_layers"),
        ({"layers": {"layer_types": ["sliding_attention", "full_attention"], **SLIDING}}, "has sliding layers"),
    ],
)
def test_speculators_config_that_asks_for_another_model_is_refused(fields, message, run):
    place = export(dataclasses.replace(run, export_format="speculators"))
    change(place, **fields)
    with pytest.raises(InputError, match=message):
        load_exported(place)


def test_harmless_fields_of_other_writers_are_read(run):
    place = export(run)
    change(
        place, rope_parameters=None, block_size=9, dflash={"causal": False, "mask_token": "<|MASK|>", "use_swa": False}
    )
    assert load_exported(place).config == random_drafter().config  # the block_size of dflash_config wins, as in SGLang


def three_token_drafter(target, seed):
    """Random; its drafts are right about every third time, where only three tokens are ever said."""
    config = DrafterConfig.from_target(
        target, num_layers=2, block_size=4, num_features=2, intermediate_size=32, mask_token_id=60
    )
    drafter, generator = Drafter(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_((parameter.dim() == 1) + 0.3 * torch.randn(parameter.shape, generator=generator))
    return drafter


def outcome(evaluated):
    """All that an evaluation counts; no seconds."""
    record = evaluated.as_dict()
    counted = {key: value for key, value in record["drafter"].items() if key != "seconds"}
    answers = [(prompt.line, answer, rounds) for prompt, answer, rounds in evaluated.drafter.results]
    return counted, evaluated.acceptance, evaluated.lossless, answers, evaluated.alone


def test_exported_drafter_evaluates_as_the_original_does(tmp_path, monkeypatch):
    target = counting_target(3, vocabulary=61)
    target.model.config.save_pretrained(tmp_path / "target")
    monkeypatch.setattr(evaluation, "load_target", lambda *args: target)
    lines = [conversation(f"number {number}") for number in range(5)]
    config = tiny_run(tmp_path, lines, num_held_out=4, max_new_tokens=40, target=str(tmp_path / "target"))
    target.tokenizer = CharTokenizer()
    save(three_token_drafter(target, seed=1), config.out / "other.safetensors")
    other = outcome(evaluation.main(dataclasses.replace(config, drafter=config.out / "other.safetensors")))
    save(three_token_drafter(target, seed=0), config.drafter_path)
    original = outcome(evaluation.main(config))
    assert original[1] > 1.1 and original != other  # so another drafter would be noticed
    for format_ in FORMATS:
        place = export(dataclasses.replace(config, export_format=format_))
        assert outcome(evaluation.main(dataclasses.replace(config, drafter=place))) == original


def test_evaluate_names_the_drafter_that_is_not_there(run, tmp_path):
    with pytest.raises(InputError, match=r"no drafter at .*gone\. --drafter takes"):
        evaluation._load_drafter(dataclasses.replace(run, drafter=tmp_path / "gone"), torch.device("cpu"))


def test_evaluate_names_the_exported_drafter_of_another_target(run):
    place = export(run)
    config = dataclasses.replace(run, drafter=place)
    with pytest.raises(InputError, match="export-servers was trained for a target of"):
        evaluation.check_drafter(load_exported(place), counting_target(), config)


def test_command_exports_and_says_how_to_serve(run, capsys):
    arguments = ["export", "--preset", "demo", "--out", str(run.out), "--target", run.target, "--dtype", "bfloat16"]
    assert command_line.main(arguments) == 0
    said = capsys.readouterr().out
    assert "25 tensors (bfloat16" in said
    assert '"num_speculative_tokens": 3' in said and "--speculative-num-draft-tokens 4" in said
    assert load_file(run.out / "export-servers" / "model.safetensors")["fc.weight"].dtype == torch.bfloat16


def test_command_exits_with_2_when_there_is_no_drafter(tmp_path, capsys):
    assert command_line.main(["export", "--preset", "demo", "--out", str(tmp_path)]) == 2
    assert "Run train first" in capsys.readouterr().err
