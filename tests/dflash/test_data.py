"""Documents and prompts: which tokens are supervised, which answers are taken, and who is kept out of training."""

import dataclasses
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.dflash.config import PRESETS, InputError, note_split
from examples.dflash.data import (
    Document,
    answer_key,
    check_unseen,
    load_held_out_prompts,
    load_training_documents,
    load_training_prompts,
    split_validation,
)
from examples.dflash.lines import SkippedLines, read_lines

from .chats import CHATML, LLAMA3, QWEN3, bpe_tokenizer, supervised_texts, unmarked
from .texts import EOS, CharTokenizer, conversation, tiny_run, write_lines

MASK = 1


def good(count):
    return [conversation(f"question {number}", f"answer {number}") for number in range(count)]


def documents_of(config, tokenizer=None, say=lambda text: None):
    mask = MASK if tokenizer is None or isinstance(tokenizer, CharTokenizer) else tokenizer.vocab["<|mask|>"]
    return load_training_documents(config, tokenizer or CharTokenizer(), mask, say=say)


def lines_of(path):
    return list(read_lines(path, SkippedLines(path)))


def test_target_without_chat_template_is_refused(tmp_path):
    config = tiny_run(tmp_path, good(3), regenerate=False)
    with pytest.raises(InputError, match=r"^The target has no chat template"):
        documents_of(config, CharTokenizer(chat_template=None))


@pytest.mark.parametrize("regenerate", [True, False])
def test_prompt_longer_than_the_budget_names_line_and_option(tmp_path, regenerate):
    lines = [conversation("short", "yes"), conversation("long " * 20, "no"), conversation("short")]
    config = tiny_run(tmp_path, lines, regenerate=regenerate)
    answers = [{"key": answer_key(c.prompt, config), "answer_tokens": [5, EOS]} for c in lines_of(config.data)]
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


def test_tools_decide_the_answer(tmp_path):
    lines = [conversation("x"), {**conversation("x"), "tools": [{"name": "clock"}]}, conversation("z")]
    config = tiny_run(tmp_path, lines)
    plain, with_tools = load_training_prompts(config)
    assert answer_key(plain.prompt, config) != answer_key(with_tools.prompt, config)


@pytest.mark.parametrize("template", [CHATML, unmarked(CHATML), LLAMA3, QWEN3])
def test_tokens_as_they_are_make_the_document_that_the_rendered_conversation_makes(tmp_path, template):
    tokenizer = bpe_tokenizer(template)
    chat = conversation("one", "two", *(() if template is QWEN3 else ("three", "four")))
    options = {"regenerate": False, "token_budget": 256}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (rendered,) = documents_of(tiny_run(tmp_path / "a", [chat, chat], **options), tokenizer)
    line = {"input_ids": rendered.tokens, "loss_mask": [int(flag) for flag in rendered.loss_mask]}
    (as_they_are,) = documents_of(tiny_run(tmp_path / "b", [line, chat], **options), tokenizer)
    assert as_they_are == rendered
    assert len(supervised_texts(tokenizer, rendered.tokens, rendered.loss_mask)) == (1 if template is QWEN3 else 2)


def test_tokens_need_no_chat_template(tmp_path):
    line = {"input_ids": [3, 4, 5], "loss_mask": [False, True, True]}
    config = tiny_run(tmp_path, [line, line], regenerate=False)
    assert documents_of(config, CharTokenizer(chat_template=None)) == [Document(0, [3, 4, 5], [False, True, True], 1)]


def test_tokens_beyond_the_vocabulary_are_skipped_or_refused(tmp_path):
    lines = [*good(29), {"input_ids": [3, 44], "loss_mask": [0, 1]}]
    config = tiny_run(tmp_path, [*lines, conversation("z")], regenerate=False)
    said = []
    assert len(documents_of(config, say=said.append)) == 29
    assert "line 30: it has the token 44, and the target has 44 tokens" in said[-1]
    config = tiny_run(tmp_path, lines, regenerate=False)
    with pytest.raises(InputError, match="line 30: it has the token 44"):
        load_held_out_prompts(config, CharTokenizer())


def test_tokens_are_skipped_where_the_target_should_answer(tmp_path):
    tokens = {"input_ids": [3, 4, 5], "loss_mask": [0, 1, 1]}
    config = tiny_run(tmp_path, [*good(25), tokens, conversation("z")])
    said = []
    prompts = load_training_prompts(config, say=said.append)
    assert [prompt.line for prompt in prompts] == list(range(1, 26))
    assert "line 26: it is tokens already" in said[-1]
    assert "--no-regenerate" in said[-1]
    config.out.mkdir()
    write_lines(
        config.answers_path, [{"key": answer_key(c.prompt, config), "answer_tokens": [5, EOS]} for c in prompts]
    )
    said.clear()
    assert [document.id for document in documents_of(config, say=said.append)] == list(range(25))
    assert "line 26: it is tokens already" in said[-1]


@pytest.mark.parametrize("load", [load_training_prompts, documents_of])
def test_data_of_tokens_alone_names_the_option_that_trains_on_them(tmp_path, load):
    config = tiny_run(tmp_path, [{"input_ids": [3, 4, 5], "loss_mask": [0, 1, 1]}] * 3)
    with pytest.raises(InputError, match=r"holds tokens \(input_ids\) alone.*: --no-regenerate"):
        load(config)


def test_held_out_tokens_are_a_prompt_up_to_the_first_supervised_one(tmp_path):
    lines = [conversation("x", "y"), {"input_ids": [3, 4, 5, 6, 7], "loss_mask": [0, 0, 1, 0, 1]}, conversation("z")]
    config = tiny_run(tmp_path, lines, num_held_out=2)
    first, second = load_held_out_prompts(config, CharTokenizer())
    assert (first.id, first.line, first.tokens) == (1, 2, [3, 4])
    assert CharTokenizer().decode(second.tokens) == "u:z\na:"


def test_held_out_tokens_without_a_prompt_are_refused(tmp_path):
    config = tiny_run(tmp_path, [*good(2), {"input_ids": [3, 4], "loss_mask": [1, 1]}])
    with pytest.raises(InputError, match=r"line 3: its first token is supervised"):
        load_held_out_prompts(config, CharTokenizer())


def test_last_turn_of_the_user_is_dropped_where_the_data_has_the_answers(tmp_path):
    config = tiny_run(tmp_path, [conversation("one", "two", "three"), conversation("x")], regenerate=False)
    (document,) = documents_of(config)
    assert CharTokenizer().decode(document.tokens) == "u:one\na:two<e>"


def test_conversation_is_cut_at_the_budget_whatever_turn_it_is_in(tmp_path):
    chat = conversation("one", "two", "three " * 20, "four")
    config = tiny_run(tmp_path, [chat, conversation("x")], regenerate=False)
    said = []
    (document,) = documents_of(config, say=said.append)
    assert len(document.tokens) == config.token_budget
    assert sum(document.loss_mask) == len("two") + 1
    assert "1 documents were cut" in said[-1]


def test_rewritten_turns_are_further_documents_of_their_conversation(tmp_path):
    tokenizer = bpe_tokenizer(QWEN3)
    chats = [
        conversation("a", "b"),
        conversation("c", "d", "e", "f", "g", "h"),
        conversation("i", "j"),
        conversation("z"),
    ]
    config = tiny_run(tmp_path, chats, regenerate=False, token_budget=256)
    documents = documents_of(config, tokenizer)
    assert [(document.id, document.conversation) for document in documents] == [(0, 0), (1, 1), (2, 2), (5, 1), (9, 1)]
    answers = [supervised_texts(tokenizer, document.tokens, document.loss_mask) for document in documents]
    assert [[text.split("</think>\n\n")[1] for text in texts] for texts in answers] == [
        [f"{answer}<|im_end|>"] for answer in "bhjfd"
    ]


def test_rewritten_turn_beyond_the_budget_costs_itself_alone(tmp_path):
    tokenizer = bpe_tokenizer(QWEN3)
    chat = conversation("a", "b", "c" * 100, "d")
    config = tiny_run(tmp_path, [chat, conversation("z")], regenerate=False)
    said = []
    (document,) = documents_of(config, tokenizer, say=said.append)
    assert (document.id, document.conversation) == (2, 0)
    assert "b<|im_end|>" in tokenizer.decode(document.tokens)
    assert "1 later turns are left out" in said[-1]


def answered(tmp_path, count, **options):
    """A run whose prompts have ``num_samples`` further answers, and their records."""
    config = tiny_run(tmp_path, good(count), **options)
    config.out.mkdir(exist_ok=True)
    records = [
        {"key": answer_key(c.prompt, config, sample=sample), "answer_tokens": [3 + 10 * sample + c.id, EOS]}
        for c in load_training_prompts(config)
        for sample in range(config.num_samples + 1)
    ]
    write_lines(config.answers_path, records)
    return config, records


def test_further_answers_are_appended_and_change_no_id(tmp_path):
    config, _ = answered(tmp_path, 4, num_samples=2)
    documents = documents_of(config)
    alone = documents_of(dataclasses.replace(config, num_samples=0))
    assert documents[:3] == alone
    assert [(d.id, d.conversation, d.tokens[-2]) for d in documents] == [
        *((0, 0, 3), (1, 1, 4), (2, 2, 5)),
        *((4, 0, 13), (5, 1, 14), (6, 2, 15)),
        *((8, 0, 23), (9, 1, 24), (10, 2, 25)),
    ]
    assert {d.prompt_length for d in documents} == {len("u:question 0\na:")}


def test_missing_further_answer_is_an_error(tmp_path):
    config, records = answered(tmp_path, 4, num_samples=2)
    write_lines(config.answers_path, records[:-1])
    with pytest.raises(InputError, match=r"lacks the target's answers to 1 of 3 prompts.*--num-samples"):
        documents_of(config)


@pytest.mark.parametrize(
    ("change", "first", "further"),
    [({"sample_temperature": 0.9}, True, False), ({"seed": 1}, True, False), ({"temperature": 0.5}, False, True)],
)
def test_key_of_an_answer_has_what_decides_it(tmp_path, change, first, further):
    config = tiny_run(tmp_path, good(3))
    changed = dataclasses.replace(config, **change)
    prompt = [{"role": "user", "content": "x"}]
    keys = [answer_key(prompt, config, sample=sample) for sample in range(4)]
    assert keys[0] == answer_key(prompt, config)
    assert len(set(keys)) == 4
    assert (answer_key(prompt, changed) == keys[0]) is first
    assert [answer_key(prompt, changed, sample=sample) == keys[sample] for sample in (1, 2)] == [further] * 2


def test_key_of_a_first_answer_stays_what_it_was():
    """Answers that were made before further ones existed are still found."""
    from examples.dflash.config import Config

    prompt = [{"role": "user", "content": "x"}]
    assert answer_key(prompt, Config()) == "c608a44cbd1c6387e148e531ea144dae"
    assert answer_key(prompt, Config(temperature=0.5)) == "91f414ead273e68be8b980fd6f1a66fd"


def made(*conversations):
    """Documents of these conversations, ids as load_training_documents gives them."""
    seen = {}
    documents = []
    for number in conversations:
        seen[number] = seen.get(number, -1) + 1
        documents.append(Document(number + 1000 * seen[number], [3, 4, 5], [False, True, True], 1, number))
    return sorted(documents, key=lambda document: document.id)


def split(documents, num_validation, tmp_path, say=lambda text: None):
    return split_validation(documents, tiny_run(tmp_path, good(2), num_validation=num_validation), say=say)


def test_document_is_its_own_conversation_unless_told():
    assert Document(7, [1], [True], 0).conversation == 7
    assert Document(7, [1], [True], 0, 3).conversation == 3


def test_last_documents_are_for_validation(tmp_path):
    said = []
    training, validation = split(made(*range(10)), 3, tmp_path, said.append)
    assert [document.id for document in training] == list(range(7))
    assert [document.id for document in validation] == [7, 8, 9]
    assert said == []


def test_few_documents_give_a_tenth_to_validation_and_say_so(tmp_path):
    said = []
    training, validation = split(made(*range(25)), 13, tmp_path, said.append)
    assert [document.id for document in validation] == [23, 24]
    assert len(training) == 23
    assert "validation: 2 documents instead of --num-validation 13, of 25 in all" in said[0]
    assert split(made(*range(9)), 13, tmp_path, said.append) == (made(*range(9)), [])
    assert "validation: 0 documents" in said[1]


def test_no_validation_is_asked_for_and_nothing_said(tmp_path):
    said = []
    assert split(made(0, 1, 2), 0, tmp_path, said.append) == (made(0, 1, 2), [])
    assert said == []


def test_documents_of_one_conversation_stay_on_one_side(tmp_path):
    training, validation = split(made(*range(10), *range(10), 9), 6, tmp_path)
    assert sorted(document.conversation for document in validation) == [8, 8, 9, 9, 9]
    assert {document.conversation for document in training} == set(range(8))


@given(conversations=st.lists(st.integers(0, 12), min_size=1, max_size=40), num_validation=st.integers(0, 30))
@settings(max_examples=100, deadline=None)
def test_split_is_of_whole_conversations_and_leaves_something_to_train_on(
    tmp_path_factory, conversations, num_validation
):
    documents = made(*conversations)
    training, validation = split(documents, num_validation, tmp_path_factory.mktemp("split"))
    assert sorted(training + validation, key=lambda d: d.id) == documents
    assert training
    assert len(validation) <= num_validation
    if len(documents) < 2 * num_validation:
        assert len(validation) <= len(documents) / 10
    if validation:
        assert max(d.conversation for d in training) < min(d.conversation for d in validation)


def test_file_that_changes_while_it_is_read_is_named(tmp_path, monkeypatch):
    from examples.dflash import data

    config = tiny_run(tmp_path, good(5), regenerate=False)
    monkeypatch.setattr(data, "count_lines", lambda path, say: 7)
    with pytest.raises(InputError, match="changed while it was read"):
        documents_of(config)


def test_text_of_one_line_at_a_time_is_held(tmp_path):
    big = {"role": "user", "content": "x", "name": "y" * 100_000}
    lines = [{"messages": [big, {"role": "assistant", "content": "yes"}]}] * 40
    config = tiny_run(tmp_path, lines, regenerate=False)
    tracemalloc.start()
    try:
        assert len(documents_of(config)) == 39
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * 100_000


def test_documents_share_one_object_for_each_token_id(tmp_path):
    line = {"input_ids": [300, 301], "loss_mask": [0, 1]}
    config = tiny_run(tmp_path, [line, line, line], regenerate=False)
    first, second = documents_of(config, bpe_tokenizer(None))
    assert first.tokens == [300, 301]
    assert [a is b for a, b in zip(first.tokens, second.tokens, strict=True)] == [True, True]


def test_prompts_that_the_run_was_trained_on_are_refused_whatever_file_they_come_from(tmp_path):
    lines = [conversation(f"question {number}", "answer") for number in range(20)]
    trained = dataclasses.replace(
        PRESETS["demo"], data=write_lines(tmp_path / "a.jsonl", lines), num_held_out=5, out=tmp_path / "run"
    )
    check_unseen(trained)  # of a run that noted nothing, nothing is known
    note_split(trained)
    check_unseen(trained)
    fresh = write_lines(tmp_path / "b.jsonl", [*lines[:10], *lines[15:]])
    check_unseen(dataclasses.replace(trained, data=fresh))
    seen = write_lines(tmp_path / "c.jsonl", [*lines[15:], *lines[:10]])
    with pytest.raises(InputError, match="was trained on 5 of the 5 prompts"):
        check_unseen(dataclasses.replace(trained, data=seen))
