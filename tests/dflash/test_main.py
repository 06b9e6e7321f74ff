"""The command line: exit statuses, and messages in place of tracebacks for what the user got wrong."""

import pytest
import torch

from examples.dflash import __main__ as command_line
from examples.dflash.config import InputError


@pytest.fixture
def given(monkeypatch):
    """Commands that note their configuration instead of running."""
    configs = {}

    def note(name):
        def command(config):
            configs[name] = config
            return 0

        return command

    for name, (_, text) in list(command_line.COMMANDS.items()):
        monkeypatch.setitem(command_line.COMMANDS, name, (note(name), text))
    return configs


def raising(monkeypatch, error):
    def command(config):
        raise error

    monkeypatch.setitem(command_line.COMMANDS, "train", (command, "Raises."))


def test_options_change_the_presets_values(given):
    assert command_line.main(["train", "--preset", "demo", "--lr", "0.5", "--drafters", "cpu,cpu"]) == 0
    assert given["train"].lr == 0.5
    assert given["train"].drafters == ("cpu", "cpu")
    assert given["train"].num_layers == 2


def test_demo_takes_its_own_preset(given):
    command_line.main(["demo"])
    command_line.main(["train"])
    assert given["demo"].preset == "demo"
    assert given["train"].preset == "smollm2"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["train", "--nonsense", "3"], "--nonsense"),
        (["train", "--lr", "-1"], "--lr is -1.0"),
        (["train", "--step", "fast"], "--step"),
        (["train", "--preset", "nonsense"], "demo, smollm2"),
        (["trane"], "no command 'trane'"),
        ([], "usage"),
    ],
)
def test_what_cannot_be_parsed_exits_with_2_and_names_it(arguments, text, capsys, given):
    try:
        status = command_line.main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    said = capsys.readouterr()
    assert text in said.out + said.err
    assert "Traceback" not in said.err
    assert not given


def test_help_lists_every_command(capsys):
    assert command_line.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in command_line.COMMANDS)


@pytest.mark.parametrize(
    "error",
    [InputError("no such file"), ExceptionGroup("workers", [InputError("no such file"), InputError("no such file")])],
)
def test_input_errors_are_printed_without_a_traceback(error, monkeypatch, capsys):
    raising(monkeypatch, error)
    assert command_line.main(["train"]) == 2
    assert capsys.readouterr().err == "\nno such file\n"


def test_out_of_memory_says_what_to_lower(monkeypatch, capsys):
    raising(monkeypatch, ExceptionGroup("workers", [torch.OutOfMemoryError("2 GiB"), RuntimeError("ring closed")]))
    assert command_line.main(["train"]) == 2
    assert "--token-budget" in capsys.readouterr().err


def test_other_errors_keep_their_traceback(monkeypatch):
    raising(monkeypatch, ExceptionGroup("workers", [RuntimeError("a fault of ours"), InputError("and this")]))
    with pytest.raises(ExceptionGroup):
        command_line.main(["train"])


def test_interruption_exits_with_130(monkeypatch):
    raising(monkeypatch, KeyboardInterrupt())
    assert command_line.main(["train"]) == 130


def test_absent_device_is_named_with_what_to_take_instead(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    command_line.check_devices(["cuda:0", "cuda:1", "cpu"], "--targets")
    with pytest.raises(InputError, match=r"--targets names cuda:2, and torch sees 2.*--preset demo"):
        command_line.check_devices(["cuda:2"], "--targets")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="--drafters names cuda, and torch sees 0"):
        command_line.check_devices(["cuda"], "--drafters")


def test_demo_stops_at_the_first_stage_that_fails(monkeypatch, capsys):
    ran = []
    for name, status in (("fetch_target", 0), ("regenerate", 0), ("train", 3), ("evaluate", 0)):
        monkeypatch.setattr(
            command_line, f"_{name}", lambda config, name=name, status=status: ran.append(name) or status
        )
    assert command_line.main(["demo"]) == 3
    assert ran == ["fetch_target", "regenerate", "train"]
    assert capsys.readouterr().out.splitlines()[-1] == "DEMO FAILED in train, with exit status 3."


def test_place_that_cannot_be_written_is_named(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    try:
        (blocked / "run").mkdir(parents=True)
    except OSError as exc:
        assert "--out" in command_line.explain(ExceptionGroup("workers failed", [exc]))
    assert command_line.explain(OSError("no file is named")) is None


def test_commands_of_one_process_are_refused_under_torchrun(given, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert command_line.main(["evaluate"]) == 2
    assert "only train takes several" in capsys.readouterr().err
    assert "evaluate" not in given
    assert command_line.main(["train"]) == 0
