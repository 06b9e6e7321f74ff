"""Lines of the data: what is skipped, what stops the run, and the one form that all styles of messages come out in."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.dflash.config import InputError
from examples.dflash.lines import SkippedLines, count_lines, read_lines

from .texts import conversation, write_lines


def good(count):
    return [conversation(f"question {number}", f"answer {number}") for number in range(count)]


def lines_of(path):
    return list(read_lines(path, SkippedLines(path)))


def messages_of(tmp_path, *lines):
    return [line.messages for line in lines_of(write_lines(tmp_path / "data.jsonl", lines))]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "not JSON"),
        ('{"text": "no messages"}', 'no list "messages"'),
        ('{"messages": "none"}', 'no list "messages"'),
        ("[1, 2]", 'no list "messages"'),
        ('{"messages": [{"role": "user"}]}', "without text"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "role 'robot'"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "no message of the user"),
        ('{"messages": [{"role": ["user"], "content": "x"}]}', "role ['user']"),
        ('{"messages": [{"role": "user", "content": "\\ud800 x"}]}', "not UTF-8"),
        ("[" * 100_000, "nested too deeply"),
        ('{"messages": []}', "no message of the user"),
        ('{"messages": ["hello"]}', "without text"),
        ('{"messages": [{"role": "user", "content": null}]}', "without text"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "part of the type 'image_url'"),
        ('{"messages": [{"role": "user", "content": ["x", 1]}]}', "part of the type 1"),
        ('{"messages": [{"role": "user", "content": "x", "name": "\\ud800"}]}', "not UTF-8"),
        ('{"messages": [{"role": "user", "content": "x", "tool_calls": "{"}]}', '"tool_calls" that is no list'),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": [1]}', '"tools" that is no list of objects'),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[1]"}}]}]}',
            "arguments are no JSON object",
        ),
        ('{"conversations": [{"from": "human"}]}', "without text"),
        ('{"conversations": [{"from": "narrator", "value": "x"}]}', "role 'narrator'"),
        ('{"conversations": [{"value": "x"}]}', "role None"),
        ('{"input_ids": [1, 2]}', 'needs a "loss_mask"'),
        ('{"input_ids": [1, 2], "loss_mask": [0, 2]}', 'needs a "loss_mask" of 0 and 1'),
        ('{"input_ids": [1, 2], "loss_mask": [0.0, 1.0]}', 'needs a "loss_mask" of 0 and 1'),
        ('{"input_ids": [1, 2, 3], "loss_mask": [0, 1]}', "3 input_ids, but a loss_mask of 2"),
        ('{"input_ids": [1, -1], "loss_mask": [0, 1]}', "list of token ids"),
        ('{"input_ids": [1, true], "loss_mask": [0, 1]}', "list of token ids"),
        ('{"input_ids": "12", "loss_mask": [0, 1]}', "list of token ids"),
        ('{"input_ids": [1, 2], "loss_mask": [0, 0]}', "supervises no token"),
        ('{"input_ids": [], "loss_mask": []}', "supervises no token"),
    ],
)
def test_malformed_line_is_skipped_and_named_with_its_number(tmp_path, line, reason):
    path = write_lines(tmp_path / "data.jsonl", [*good(15), line, *good(15)])
    said = []
    assert count_lines(path, say=said.append) == 30
    assert "skipped 1 of 31 lines" in said[0]
    assert "line 16: " in said[0]
    assert reason in said[0]


def test_byte_order_mark_costs_no_line(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(conversation("hello")).encode() + b"\n")
    assert count_lines(path) == 1


def test_line_that_is_not_utf8_costs_itself_alone(tmp_path):
    path = tmp_path / "data.jsonl"
    line = json.dumps(conversation("hello")).encode()
    path.write_bytes((line + b"\n") * 30 + line.replace(b"hello", b"\xff") + b"\n")
    said = []
    assert count_lines(path, say=said.append) == 30
    assert "line 31: not UTF-8" in said[0]


def test_run_stops_when_over_five_percent_of_the_lines_are_malformed(tmp_path):
    path = write_lines(tmp_path / "data.jsonl", [*good(18), "{", "{"])
    with pytest.raises(InputError, match=r"(?s)skipped 2 of 20.*line 19.*More than 5%"):
        count_lines(path)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_empty_file_is_named(tmp_path, text):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=r"data\.jsonl is empty"):
        count_lines(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"Cannot read .*nothing\.jsonl.*--data"):
        count_lines(tmp_path / "nothing.jsonl")


def test_two_styles_of_conversations_are_the_same_messages(tmp_path):
    openai = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "tool", "content": "three"},
    ]
    pairs = [("system", "be brief"), ("human", "one"), ("gpt", "two"), ("observation", "three")]
    sharegpt = [{"from": name, "value": text} for name, text in pairs]
    lines = [{"messages": openai}, {"conversations": sharegpt}, {"conversations": openai}, {"messages": sharegpt}]
    lines.append({"conversations": sharegpt[1:], "system": "be brief", "id": "x7"})
    assert messages_of(tmp_path, *lines) == [openai] * 5


def test_messages_keep_what_templates_read_in_the_form_they_read_it(tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    tools = [{"type": "function", "function": {"name": "f"}}]
    raw = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, "two"], "name": "ann", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "1", "tool_call_id": "1"},
        {"role": "assistant", "content": "done", "tool_calls": []},
    ]
    expected = [
        {"role": "user", "content": "one\ntwo", "name": "ann", "tools": tools},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "f", "arguments": {"x": 1}}}],
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "1", "tool_call_id": "1"},
        {"role": "assistant", "content": "done"},
    ]
    lines = [{"messages": raw, "tools": tools}, {"messages": raw, "tools": json.dumps(tools)}]
    assert messages_of(tmp_path, *lines) == [expected] * 2


def test_call_without_arguments_has_an_empty_object(tmp_path):
    call = {"name": "f", "arguments": ""}
    user = {"role": "user", "content": "x"}
    (messages,) = messages_of(tmp_path, {"messages": [user, {"role": "assistant", "tool_calls": [call]}]})
    assert messages[1]["tool_calls"] == [{"name": "f", "arguments": {}}]


KEYS = ["messages", "conversations", "input_ids", "loss_mask", "role", "from", "content", "value"]
KEYS += ["tool_calls", "function", "arguments", "tools", "system", "type", "text"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS), inner | st.sampled_from(["user", "human", "assistant", "gpt", "text"]), max_size=4
        )
    ),
    max_leaves=20,
)


@given(record=st.dictionaries(st.sampled_from(["messages", "conversations", "input_ids", "tools"]), json_values))
@settings(max_examples=150, deadline=None)
def test_any_json_is_a_usable_line_or_a_reason(tmp_path_factory, record):
    path = write_lines(tmp_path_factory.mktemp("any") / "data.jsonl", [record])
    skipped = SkippedLines(path)
    lines = list(read_lines(path, skipped))
    assert len(lines) + len(skipped.reasons) == skipped.num_lines == 1
    assert all(reason for _, reason in skipped.reasons)
