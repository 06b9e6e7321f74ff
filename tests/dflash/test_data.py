"""Reading conversations: what is skipped, what stops the run, and which tokens are supervised."""

import dataclasses
import json

import pytest

from examples.dflash.config import InputError
from examples.dflash.data import (
    answer_key,
    load_held_out_prompts,
    load_training_documents,
    load_training_prompts,
    read_conversations,
)

from .texts import EOS, CharTokenizer, conversation, tiny_run, write_lines

MASK = 1


def good(count):
    return [conversation(f"question {number}", f"answer {number}") for number in range(count)]


def documents_of(config, tokenizer=None, say=lambda text: None):
    return load_training_documents(config, tokenizer or CharTokenizer(), MASK, say=say)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "not JSON"),
        ('{"text": "no messages"}', 'no list "messages"'),
        ("[1, 2]", 'no list "messages"'),
        ('{"messages": [{"role": "user"}]}', "without text"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "role 'robot'"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "no message of the user"),
        ('{"messages": [{"role": ["user"], "content": "x"}]}', "role ['user']"),
        ('{"messages": [{"role": "user", "content": "\\ud800 x"}]}', "not UTF-8"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_malformed_line_is_skipped_and_named_with_its_number(tmp_path, line, reason):
    path = write_lines(tmp_path / "data.jsonl", [*good(15), line, *good(15)])
    said = []
    assert len(read_conversations(path, say=said.append)) == 30
    assert "skipped 1 of 31 lines" in said[0]
    assert "line 16: " in said[0]
    assert reason in said[0]


def test_byte_order_mark_costs_no_line(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(conversation("hello")).encode() + b"\n")
    assert len(read_conversations(path, say=print)) == 1


def test_line_that_is_not_utf8_costs_itself_alone(tmp_path):
    path = tmp_path / "data.jsonl"
    line = json.dumps(conversation("hello")).encode()
    path.write_bytes((line + b"\n") * 30 + line.replace(b"hello", b"\xff") + b"\n")
    said = []
    assert len(read_conversations(path, say=said.append)) == 30
    assert "line 31: not UTF-8" in said[0]


def test_run_stops_when_over_five_percent_of_the_lines_are_malformed(tmp_path):
    path = write_lines(tmp_path / "data.jsonl", [*good(18), "{", "{"])
    with pytest.raises(InputError, match=r"(?s)skipped 2 of 20.*line 19.*More than 5%"):
        read_conversations(path)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_empty_file_is_named(tmp_path, text):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=r"data\.jsonl is empty"):
        read_conversations(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"Cannot read .*nothing\.jsonl.*--data"):
        read_conversations(tmp_path / "nothing.jsonl")


def test_target_without_chat_template_is_refused(tmp_path):
    config = tiny_run(tmp_path, good(3), regenerate=False)
    with pytest.raises(InputError, match=r"^The target has no chat template"):
        documents_of(config, CharTokenizer(chat_template=None))


@pytest.mark.parametrize("regenerate", [True, False])
def test_prompt_longer_than_the_budget_names_line_and_option(tmp_path, regenerate):
    lines = [conversation("short", "yes"), conversation("long " * 20, "no"), conversation("short")]
    config = tiny_run(tmp_path, lines, regenerate=regenerate)
    answers = [
        {"key": answer_key(c.prompt, config), "answer_tokens": [5, EOS]} for c in read_conversations(config.data)
    ]
    config.out.mkdir()
    write_lines(config.answers_path, answers)
    with pytest.raises(InputError, match=r"line 2: the prompt has 1\d\d tokens.*--token-budget"):
        documents_of(config)


def test_last_conversations_are_held_out(tmp_path):
    config = tiny_run(tmp_path, good(5), num_held_out=2)
    assert [conversation.line for conversation in load_training_prompts(config)] == [1, 2, 3]
    held_out = load_held_out_prompts(config, CharTokenizer())
    assert [prompt.line for prompt in held_out] == [4, 5]
    assert [prompt.id for prompt in held_out] == [3, 4]


def test_holding_out_everything_is_refused(tmp_path):
    with pytest.raises(InputError, match="--num-held-out"):
        load_training_prompts(tiny_run(tmp_path, good(3), num_held_out=3))


def test_document_supervises_answers_and_their_end_but_no_newline_after_it(tmp_path):
    config = tiny_run(tmp_path, [conversation("one", "two", "three", "four"), conversation("x")], regenerate=False)
    tokenizer = CharTokenizer()
    (document,) = documents_of(config)
    assert tokenizer.decode(document.tokens) == "u:one\na:two<e>\nu:three\na:four<e>"
    supervised = [token for token, flag in zip(document.tokens, document.loss_mask, strict=True) if flag]
    assert tokenizer.decode(supervised) == "two<e>four<e>"
    assert tokenizer.decode(document.tokens[: document.prompt_length]) == "u:one\na:"


def test_regenerated_document_holds_the_targets_own_tokens(tmp_path):
    config = tiny_run(tmp_path, good(3), num_held_out=1)
    prompts = load_training_prompts(config)
    config.out.mkdir()
    records = [{"key": answer_key(c.prompt, config), "answer_tokens": [7 + c.line, EOS]} for c in prompts]
    write_lines(config.answers_path, [*records, '{"key": "torn'])
    first, second = documents_of(config)
    tokenizer = CharTokenizer()
    assert first.tokens == [*tokenizer("u:question 0\na:", add_special_tokens=False).input_ids, 8, EOS]
    assert first.loss_mask == [False] * (len(first.tokens) - 2) + [True, True]
    assert (second.id, second.tokens[-2:]) == (1, [9, EOS])


@pytest.mark.parametrize("change", [{"max_new_tokens": 13}, {"target": "other"}, {"temperature": 0.5}])
def test_answers_of_another_configuration_are_not_taken(tmp_path, change):
    config = tiny_run(tmp_path, good(3))
    config.out.mkdir()
    records = [{"key": answer_key(c.prompt, config), "answer_tokens": [7, EOS]} for c in load_training_prompts(config)]
    write_lines(config.answers_path, records)
    with pytest.raises(InputError, match=r"lacks the target's answers to 2 of 2 prompts.*regenerate"):
        documents_of(dataclasses.replace(config, **change))


def test_conversation_with_the_mask_token_is_skipped(tmp_path):
    config = tiny_run(tmp_path, [*good(29), conversation("why", "x"), conversation("z")], regenerate=False)
    (mask,) = CharTokenizer()("h", add_special_tokens=False).input_ids
    said = []
    assert len(load_training_documents(config, CharTokenizer(), mask, say=said.append)) == 29
    assert "line 30: its text contains the mask token" in said[-1]


def test_long_answer_is_cut_to_the_budget(tmp_path):
    config = tiny_run(tmp_path, [conversation("x", "y" * 100), conversation("z")], regenerate=False)
    said = []
    (document,) = documents_of(config, say=said.append)
    assert len(document.tokens) == len(document.loss_mask) == config.token_budget
    assert "1 documents were cut" in said[-1]
