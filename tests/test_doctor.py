"""The doctor: what it says is what was seen, it changes nothing, and its exit status can be relied on."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from graphsafe import devices, doctor, fault_probes, model_packages, repairs
from graphsafe.compile import install, installed, uninstall
from graphsafe.errors import GraphsafeWarning
from graphsafe.fault_probes import Finding, Probes
from graphsafe.model_config import ModelConfigError
from graphsafe.repairs import private, stance
from graphsafe.repairs._patches import Evidence, RepairError
from tests.helpers import SHOWS_FAULTS

ROOT = Path(__file__).parents[1]
TIME_LIMIT_S = 150
PART_A = {f"A{number}" for number in range(1, 16)}
STATUSES = {"present", "repaired", "absent"}
main = importlib.import_module("graphsafe.__main__").main


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """The doctor installs the repairs; each test ends as it began."""
    was_installed = bool(installed())
    yield
    uninstall()
    if was_installed:
        install()


@pytest.fixture(scope="module")
def findings() -> Mapping[str, Finding]:
    """What the probes see on this installation."""
    return Probes().results()


@pytest.fixture
def known_findings(monkeypatch: pytest.MonkeyPatch) -> dict[str, Finding]:
    """Stands in for the probing process; a test may change it."""
    found = {fault: Finding("repaired", "a stand-in") for fault in fault_probes.PROBES}

    class StandIn:
        def results(self) -> Mapping[str, Finding]:
            return found

        def close(self) -> None:
            pass

    monkeypatch.setattr(doctor, "Probes", StandIn)
    return found


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch, known_findings: dict[str, Finding]) -> dict[str, Finding]:
    """As ``known_findings``, on a machine whose GPUs need no attention."""
    monkeypatch.setattr(devices, "look", lambda: devices.Devices((), (), None, (), ()))
    return known_findings


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "graphsafe", *arguments], capture_output=True, text=True, timeout=TIME_LIMIT_S
    )


def write_config(folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


# Faults


def test_doctor_prints_one_json_object_with_every_fault() -> None:
    done = run_cli("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == (1 if report["attention"] else 0), done.stderr
    assert {*PART_A, "B9", "B17", "B18"} <= set(report["faults"])
    assert set(report["faults"].values()) <= STATUSES
    assert report["torch"] == torch.__version__ and report["model"] is None
    assert set(report["details"]) == set(report["faults"])
    for fault, detail in report["details"].items():
        assert detail["status"] == report["faults"][fault] and detail["fault"] and detail["detail"]
        assert bool(detail["advice"]) == (detail["status"] == "present")


def test_statuses_agree_with_the_repairs(sound: dict[str, Finding]) -> None:
    report = doctor.diagnose()
    outcomes = repairs.statuses()
    assert set(outcomes) == {repair.FAULT for repair in repairs.REPAIRS}
    for fault, outcome in outcomes.items():
        if outcome in ("repaired", "absent"):
            assert report.faults[fault].status == outcome
        else:  # what is changed is not installed here
            assert outcome == "pending" and "not installed" in report.faults[fault].detail


def test_a_repair_that_fails_is_present_and_needs_attention(
    monkeypatch: pytest.MonkeyPatch, sound: dict[str, Finding], capsys: pytest.CaptureFixture[str]
) -> None:
    def probe(module: types.ModuleType) -> bool:
        raise RepairError("this torch has moved it")

    broken = types.SimpleNamespace(
        FAULT="A1", MODULES=("torch.random",), EVIDENCE=Evidence("a strange error", (), "all"), probe=probe
    )
    broken.repair = broken.undo = lambda *_: None
    others = tuple(repair for repair in repairs.REPAIRS if repair.FAULT != "A1")
    uninstall()
    monkeypatch.setattr(repairs, "REPAIRS", (broken, *others))
    with pytest.warns(GraphsafeWarning, match="A1"):
        assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["faults"]["A1"] == "present" and report["faults"]["A2"] == "repaired"
    assert "moved it" in report["details"]["A1"]["detail"]
    assert any("A1" in text and "moved it" in text for text in report["attention"])


def test_a_repair_of_what_is_not_installed_is_absent(
    monkeypatch: pytest.MonkeyPatch, sound: dict[str, Finding]
) -> None:
    absent = types.SimpleNamespace(
        FAULT="A12", MODULES=("no_such_package.part",), EVIDENCE=Evidence("an error", (), "all")
    )
    absent.probe = absent.repair = absent.undo = lambda *_: None
    uninstall()
    monkeypatch.setattr(repairs, "REPAIRS", (*(repair for repair in repairs.REPAIRS if repair.FAULT != "A12"), absent))
    report = doctor.diagnose()
    assert report.faults["A12"].status == "absent" and "no_such_package" in report.faults["A12"].detail
    assert not report.attention


def test_faults_without_a_repair_are_seen_by_behaviour(findings: Mapping[str, Finding]) -> None:
    assert all(finding.checked for finding in findings.values()), findings
    assert findings["A3"].status == findings["A14"].status == "repaired"
    assert findings["A8"].status in ("repaired", "absent")
    if SHOWS_FAULTS:
        assert findings["A9"].status == findings["A10"].status == "present"
        assert findings["A8"].status == "repaired", "a plain thread saw the setting: the probe is no proof any more"


def test_what_merely_may_happen_needs_no_attention_and_says_what_to_do(
    sound: dict[str, Finding], findings: Mapping[str, Finding]
) -> None:
    sound.update(findings)
    report = doctor.diagnose()
    assert not report.attention
    for fault in ("A9", "A10"):
        assert report.faults[fault].status == findings[fault].status
        assert bool(report.faults[fault].advice) == (findings[fault].status == "present")


@pytest.mark.parametrize("fault", ["A3", "A8", "A11", "A14"])
def test_a_mechanism_that_does_not_work_needs_attention(sound: dict[str, Finding], fault: str) -> None:
    sound[fault] = Finding("present", "it did not hold")
    (text,) = doctor.diagnose().attention
    assert fault in text and "it did not hold" in text


def test_a_stance_that_is_set_needs_attention(sound: dict[str, Finding]) -> None:
    with torch.compiler.set_stance("eager_on_recompile", skip_guard_eval_unsafe=True):
        (text,) = doctor.diagnose().attention
    assert "eager_on_recompile" in text and "skip_guard_eval_unsafe" in text
    assert not doctor.diagnose().attention


def test_diagnosis_leaves_the_process_as_it_is() -> None:
    def state() -> tuple[object, ...]:
        config: Any = torch.compiler.config
        return (
            stance.current(),
            config.cache_key_tag,
            private.multithreading_enabled(),
            torch.is_grad_enabled(),
            torch.get_rng_state().tolist(),
            torch.cuda.is_initialized(),
        )

    before = state()
    report = doctor.diagnose()
    assert state() == before or report.devices.devices  # looking at a device initialises CUDA
    assert state()[:-1] == before[:-1]
    assert {*PART_A} <= set(report.faults)
    text = str(report)
    assert max(map(len, text.splitlines())) <= 100
    assert all(re.search(rf"^  {fault} +(present|repaired|absent) ", text, re.M) for fault in report.faults)


def test_probes_that_cannot_run_are_no_result(monkeypatch: pytest.MonkeyPatch, sound: dict[str, Finding]) -> None:
    late = Probes(deadline_s=0.01)
    found = late.results()
    assert late._process is not None and late._process.poll() is not None  # ended, not left behind
    assert {(finding.status, finding.checked) for finding in found.values()} == {("present", False)}
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert "could be started" in Probes().results()["A9"].detail
    sound.update(found)
    report = doctor.diagnose()
    unknown = set(fault_probes.PROBES) - {repair.FAULT for repair in repairs.REPAIRS}
    assert len(report.attention) == len(unknown) > 3
    assert all(any(text.startswith(f"{fault} ") for text in report.attention) for fault in unknown)


@pytest.mark.parametrize(("version", "fine"), [("2.9.0", True), ("2.15.3+cu130", True), ("2.16.0.dev1", False)])
def test_a_torch_beyond_the_tested_range_needs_attention(
    monkeypatch: pytest.MonkeyPatch, sound: dict[str, Finding], version: str, fine: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    report = doctor.diagnose()
    assert report.supported is fine and bool(report.attention) is not fine
    assert f"({'supported' if fine else 'not tested'}: 2.9 to 2.15)" in str(report)


# The command line


def test_without_a_command_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "doctor" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "status"), [(["--version"], 0), (["surgeon"], 2), (["doctor", "--what"], 2)])
def test_argparse_ends_with_the_usual_status(arguments: list[str], status: int) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == status


def test_a_model_that_is_not_there_is_an_error(
    tmp_path: Path, known_findings: dict[str, Finding], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text('{"model_type": ')
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "config.json").write_text("[]")
    for name, word in (("missing", "no file"), ("empty", "neither"), ("torn", "JSON"), ("list", "JSON object")):
        assert main(["doctor", "--json", "--model", str(tmp_path / name)]) == 2
        said = capsys.readouterr()
        assert not said.out and word in said.err and name in said.err and "Traceback" not in said.err


def test_an_interrupt_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(model: str | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(vars(importlib.import_module("graphsafe.__main__")), "diagnose", interrupted)
    assert main(["doctor"]) == 130


def test_a_broken_pipe_ends_without_a_traceback() -> None:
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # else argparse hides that nobody reads
    process = subprocess.Popen(
        [sys.executable, "-m", "graphsafe", "--version"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered
    )
    assert process.stdout is not None
    process.stdout.close()  # before anything is written: torch is not even imported
    _, errors = process.communicate(timeout=TIME_LIMIT_S)
    assert process.returncode == 141 and b"Traceback" not in errors and b"BrokenPipe" not in errors, errors


# Models


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """No optional package is installed, transformers neither, but those that a test adds."""
    there: set[str] = set()
    monkeypatch.setattr(model_packages, "version_of", lambda name, pip_name: "9.9" if pip_name in there else None)
    monkeypatch.setattr(model_packages, "_folder", lambda name: None)
    return there


def test_a_model_with_linear_attention_lacks_its_kernels(
    tmp_path: Path, nothing_installed: set[str], sound: dict[str, Finding], capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_config(tmp_path, model_type="qwen3_next", layer_types=["linear_attention", "full_attention"])
    assert main(["doctor", "--model", model]) == 1
    text = capsys.readouterr().out
    assert "missing  flash-linear-attention" in text and "missing  causal-conv1d" in text and "slow" in text
    nothing_installed |= {"flash-linear-attention", "causal-conv1d"}
    assert main(["doctor", "--model", model]) == 0
    text = capsys.readouterr().out
    assert "have     flash-linear-attention 9.9" in text and "no optional package is missing" in text


def test_a_plain_model_lacks_nothing(
    tmp_path: Path, nothing_installed: set[str], sound: dict[str, Finding], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--json", "--model", write_config(tmp_path, model_type="llama")]) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert model["known"] and model["needs"] == [] and model["missing"] == []


@pytest.mark.parametrize(
    ("config", "packages"),
    [
        ({"model_type": "mamba2"}, {"mamba-ssm", "causal-conv1d"}),
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, {"causal-conv1d"}),
        ({"model_type": "granitemoehybrid", "layer_types": ["attention"] * 4}, set()),
        (
            {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}},
            {"flash-linear-attention>=0.2.2", "causal-conv1d"},
        ),
        ({"model_type": "llama", "_attn_implementation": "flash_attention_2"}, {"flash-attn"}),
        ({"model_type": "x", "text_config": {"_attn_implementation": "kernels-community/y"}}, {"kernels"}),
        ({"model_type": "llama", "quantization_config": {"load_in_4bit": True}}, {"bitsandbytes", "accelerate"}),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, {"optimum", "gptqmodel"}),
        (
            {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
            {"kernels", "triton", "accelerate"},
        ),
        ({"model_type": "llama", "quantization_config": {"quant_method": "awq"}}, {"gptqmodel", "accelerate"}),
        ({"model_type": "llama", "quantization_config": {"quant_method": "torchao"}}, {"torchao"}),
    ],
    ids=lambda value: "-".join(map(str, value.values()))[:40] if isinstance(value, dict) else "",
)
def test_a_model_names_the_packages_it_needs(
    tmp_path: Path, nothing_installed: set[str], config: dict[str, Any], packages: set[str]
) -> None:
    report = model_packages.inspect_model(write_config(tmp_path, **config))
    assert {need.package for need in report.missing} == packages
    assert all(need.cost and need.why for need in report.needs)


def test_any_one_of_several_packages_will_do(tmp_path: Path, nothing_installed: set[str]) -> None:
    model = write_config(tmp_path, model_type="llama", attn_implementation="flash_attention_2")
    nothing_installed.add("kernels")
    assert not model_packages.inspect_model(model).missing


def test_an_unknown_model_type_is_said_and_needs_no_attention(
    tmp_path: Path, nothing_installed: set[str], sound: dict[str, Finding], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--model", write_config(tmp_path, model_type="no_such_model")]) == 0
    assert "not known" in capsys.readouterr().out


def test_a_gguf_file_needs_gguf(tmp_path: Path, nothing_installed: set[str]) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF and more")
    assert [need.package for need in model_packages.inspect_model(str(tmp_path)).missing] == ["gguf"]


@pytest.mark.parametrize("content", [b"", b"GGU", b"\x80\x02}q\x00."])
def test_a_file_that_is_no_gguf_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ModelConfigError, match="is no GGUF file"):
        model_packages.inspect_model(str(tmp_path))


def test_a_quantisation_that_is_not_known_needs_attention(
    tmp_path: Path, sound: dict[str, Finding], nothing_installed: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_config(tmp_path, model_type="llama", quantization_config={"quant_method": "zzz"})
    assert main(["doctor", "--model", model]) == 1
    out = capsys.readouterr().out
    assert "quantisation 'zzz' is not known" in out and "no optional package is missing" not in out
    assert doctor.diagnose(model).as_json()["model"]["doubts"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a_config":' * 900 + "{}" + "}" * 900, None),
        ('{"model_type": "qwen3_next", "layer_types": 5}', None),
        ('{"model_type": "qwen3_next", "layers_block_type": {"a": 1}}', None),
        ('{"model_type": ["llama"], "num_experts": "8", "quantization_config": [1]}', None),
        (f'{{"model_type": "{"a" * 5000}"}}', None),
        ('{"model_type": "\\ud800"}', None),
        ('{"model_type": "llama\\u0000x"}', None),
        ('{"model_type": "../../.."}', None),
    ],
)
def test_an_odd_configuration_is_read_or_refused_and_never_a_traceback(
    tmp_path: Path,
    sound: dict[str, Finding],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    text: str,
    says: str | None,
) -> None:
    (tmp_path / "transformers" / "models" / "llama").mkdir(parents=True)
    monkeypatch.setattr(model_packages, "_folder", lambda name: tmp_path / name)
    (tmp_path / "config.json").write_text(text)
    status = main(["doctor", "--model", str(tmp_path)])
    captured = capfd.readouterr()
    assert status == (2 if says else status) and status in (0, 1, 2)
    assert says is None or says in captured.err
    assert says is not None or captured.out.startswith("graphsafe")


@pytest.mark.parametrize("model", ["a" * 5000, "~nosuchuser/x", "x\0y", f"{'a' * 300}/{'b' * 300}"])
def test_a_name_that_cannot_be_looked_for_is_an_error(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["doctor", "--model", model]) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m graphsafe doctor: error: ") and len(error) < 1000


@pytest.mark.parametrize("commit", [b"\xff\xfe\x00", b"x\0y", b"", b"../.."])
def test_a_cache_whose_commit_is_no_commit_is_searched_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: bytes
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "models--a--b"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_bytes(commit)
    with pytest.raises(ModelConfigError, match="HF_HUB_OFFLINE"):
        model_packages.inspect_model("a/b")
    (folder / "snapshots" / "one").mkdir(parents=True)
    write_config(folder / "snapshots" / "one", model_type="llama")
    assert model_packages.inspect_model("a/b").model_types == ("llama",)


def test_what_the_output_cannot_encode_is_escaped(
    tmp_path: Path, sound: dict[str, Finding], nothing_installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_config(tmp_path, model_type="llam\u00e4")
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["doctor", "--model", model]) == 0
    out.seek(0)
    assert "llam\\xe4" in out.read()


def test_a_closed_output_is_said_and_no_traceback(
    sound: dict[str, Finding], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["doctor"]) == 74
    assert "standard output is closed" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"], []])
def test_a_full_disk_is_said_and_no_traceback(
    sound: dict[str, Finding],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(arguments) == 74
    assert "cannot be written" in capsys.readouterr().err


def test_the_code_of_transformers_says_what_a_model_takes_kernels_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three generations of transformers, each with its way to look for a package."""
    codes = {
        "new_one": '@use_kernel_func_from_hub_with_fallback("chunk_kda", "fla")\ndef f(): ...',
        "middle_one": 'kernels = lazy_load_kernel("causal-conv1d")\nother = lazy_load_kernel("deep-gemm")',
        "old_one": "if is_mamba_2_ssm_available() and is_torch_available():\n    import mamba_ssm",
    }
    transformers = tmp_path / "transformers"
    for name, code in codes.items():
        (transformers / "models" / name).mkdir(parents=True)
        (transformers / "models" / name / f"modeling_{name}.py").write_text(code)
    (transformers / "models" / "new_one" / "configuration_new_one.py").write_text('    model_type = "new_one_text"\n')
    monkeypatch.setattr(model_packages, "_folder", lambda name: transformers)
    monkeypatch.setattr(model_packages, "version_of", lambda name, pip_name: None)
    for model_type, package in (
        ("new_one", "flash-linear-attention>=0.2.2"),
        ("new_one_text", "flash-linear-attention>=0.2.2"),
        ("middle_one", "causal-conv1d"),
        ("old_one", "mamba-ssm"),
    ):
        report = model_packages.inspect_model(write_config(tmp_path, model_type=model_type))
        assert report.known and [need.package for need in report.missing] == [package]


@pytest.mark.skipif(model_packages.version_of("transformers", "transformers") is None, reason="needs transformers")
@pytest.mark.parametrize(("model_type", "package"), [("qwen3_next", "flash-linear-attention"), ("mamba2", "mamba-ssm")])
def test_the_installed_transformers_agrees_with_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, package: str
) -> None:
    model = write_config(tmp_path, model_type=model_type)
    monkeypatch.setattr(model_packages, "_MODEL_TYPES", {})
    from_code = model_packages.inspect_model(model)
    monkeypatch.undo()
    monkeypatch.setattr(model_packages, "_modeling_files", lambda _: [])
    from_table = model_packages.inspect_model(model)
    names = {need.package for need in from_code.needs}
    assert names == {need.package for need in from_table.needs} and any(package in name for name in names)


def test_code_beside_the_model_is_searched_and_not_run(tmp_path: Path, nothing_installed: set[str]) -> None:
    (tmp_path / "modeling_own.py").write_text("from fla.ops import chunk_gated_delta_rule\nraise SystemExit\n")
    report = model_packages.inspect_model(write_config(tmp_path, model_type="own"))
    assert [need.package for need in report.missing] == ["flash-linear-attention>=0.2.2"]
    assert report.missing[0].why == "modeling_own.py"


def test_an_old_version_and_a_mere_folder_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_packages, "version_of", lambda name, pip_name: "0.1.9")
    need = model_packages.inspect_model(write_config(tmp_path, model_type="qwen3_next")).needs
    assert {one.package: one.found for one in need}["flash-linear-attention>=0.2.2"] is None
    monkeypatch.undo()
    (tmp_path / "no_such_package_at_all").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert model_packages.version_of("no_such_package_at_all", "no-such-package-at-all") is None
    assert torch.__version__.startswith(model_packages.version_of("torch", "torch") or "missing")
    assert "no_such_package_at_all" not in sys.modules


def test_a_name_is_found_in_the_hub_cache_and_not_fetched_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_installed: set[str]
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "models--some--model"
    for revision, model_type in (("0" * 40, "mamba2"), ("1" * 40, "llama")):
        (folder / "snapshots" / revision).mkdir(parents=True)
        write_config(folder / "snapshots" / revision, model_type=model_type)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("1" * 40)
    assert model_packages.inspect_model("some/model").model_types == ("llama",)
    with pytest.raises(ModelConfigError, match="HF_HUB_OFFLINE"):
        model_packages.inspect_model("some/other")


def test_a_name_that_is_not_cached_is_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_installed: set[str]
) -> None:
    def hf_hub_download(model: str, name: str) -> str:
        if model != "some/model":
            raise OSError("404: no such repository\nand more")
        return str(tmp_path / name)

    hub: Any = types.ModuleType("huggingface_hub")
    hub.hf_hub_download = hf_hub_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    write_config(tmp_path, model_type="mamba2")
    assert len(model_packages.inspect_model("some/model").missing) == 2
    with pytest.raises(ModelConfigError, match=r"404: no such repository$"):
        model_packages.inspect_model("some/other")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelConfigError, match="pip install huggingface_hub"):
        model_packages.inspect_model("some/model")


# Devices

TWO_GPUS = (
    "\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\t0-47\t0\t\tN/A\n"
    "GPU1\tNV18\t X \t0-47\t0\t\tN/A\n"
    "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
)
ONLY_PCIE = (
    "        GPU0  GPU1  GPU2  mlx5_0  CPU Affinity\n"
    "GPU0     X    PIX   SYS   PHB     0-15\n"
    "GPU1    PIX    X    SYS   NODE    0-15\n"
    "GPU2    SYS   SYS    X    SYS     16-31\n"
    "mlx5_0  PHB   NODE  SYS    X\n"
)
EIGHT_GPUS = "\n".join(
    [
        "\t" + "\t".join([*(f"GPU{i}" for i in range(8)), "NIC0", "NIC1", "CPU Affinity", "NUMA Affinity"]),
        *(
            f"GPU{i}\t" + "\t".join([*("X" if i == j else "NV12" for j in range(8)), "PXB", "SYS", "0-63", "0"])
            for i in range(8)
        ),
        "NIC0\t" + "\t".join(["PXB"] * 8 + ["X", "SYS"]),
        "NIC Legend:\n\n  NIC0: mlx5_0",
    ]
)


def test_topology_is_read() -> None:
    assert devices.parse_topology(TWO_GPUS) == {(0, 1): "NV18", (1, 0): "NV18"}
    pcie = devices.parse_topology(ONLY_PCIE)
    assert pcie[0, 1] == "PIX" and pcie[1, 2] == pcie[2, 0] == "SYS" and len(pcie) == 6
    eight = devices.parse_topology(EIGHT_GPUS)
    assert len(eight) == 56 and set(eight.values()) == {"NV12"}
    for nonsense in ("", "Failed to initialize NVML: Driver/library version mismatch\n", "GPU0 X\n"):
        assert devices.parse_topology(nonsense) == {}
    assert devices.kind_of_link("NV18") == "NVLink, 18 links" and devices.kind_of_link("PHB").startswith("PCIe")
    assert devices.kind_of_link(None) == devices.kind_of_link("XYZ") == "unknown"


def test_devices_are_matched_by_uuid_and_shown(
    monkeypatch: pytest.MonkeyPatch, known_findings: dict[str, Finding]
) -> None:
    """Torch sees GPUs 2 and 0 of three, in that order."""
    seen = ["u2", "u0"]

    def nvidia_smi(*arguments: str) -> str:
        return ONLY_PCIE if arguments[0] == "topo" else "".join(f"{i}, GPU-u{i}, 570.10.01\n" for i in range(3))

    def properties(index: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(name="NVIDIA Z1", major=9, minor=0, total_memory=80 * 2**30, uuid=seen[index])

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    monkeypatch.setattr(devices, "_nvidia_smi", nvidia_smi)
    for name, stand_in in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": properties,
        "mem_get_info": lambda index: (60 * 2**30, 80 * 2**30),
        "can_device_access_peer": lambda one, other: one < other,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    found = devices.look()
    (link,) = found.links
    assert (link.label, link.peer_access) == ("SYS", False) and link.kind.startswith("PCIe")
    assert [one.capability for one in found.devices] == ["9.0", "9.0"] and found.driver == "570.10.01"
    assert any("CUDA_VISIBLE_DEVICES='2,0'" in note for note in found.notes)
    report = doctor.diagnose()
    text = str(report)
    assert "60.0 of 80.0 GiB free" in text and "-SYS" in text
    assert report.as_json()["links"][0]["label"] == "SYS"
    json.dumps(report.as_json())


def test_gpus_that_torch_does_not_see_need_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "_nvidia_smi", lambda *_: "0, GPU-u0, 570.10.01\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (text,) = devices.look().attention
    assert "torch sees none" in text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = devices.look()
    assert not hidden.attention and hidden.notes


@pytest.mark.cuda
def test_devices_of_this_machine_are_seen() -> None:
    found = devices.look()
    assert len(found.devices) == torch.cuda.device_count() and not found.attention
    assert all(0 < (one.free_bytes or 0) <= one.total_bytes for one in found.devices)
    pairs = len(found.devices) * (len(found.devices) - 1) // 2
    assert len(found.links) == pairs
