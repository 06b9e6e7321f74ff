"""Which tokens of a rendered conversation are supervised, by the template's marks and by rendering prefixes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.dflash.chat import AnswerFinder, encode, render
from examples.dflash.config import InputError

from .chats import (
    CHATML,
    LLAMA3,
    PHI3,
    PLAIN,
    QWEN3,
    R1,
    WIDE_CHATML,
    bpe_tokenizer,
    spacing_tokenizer,
    supervised_texts,
    unmarked,
)
from .texts import CharTokenizer

SHAPES = {
    "chatml": (CHATML, "<|im_end|>", "<|im_end|>"),
    "chatml, wide marks": (WIDE_CHATML, "<|im_end|>", "<|im_end|>"),
    "llama 3": (LLAMA3, "<|eot_id|>", "<|eot_id|>"),
    "qwen 3": (QWEN3, "<|im_end|>", "<|im_end|>"),
    "phi 3": (PHI3, "<|endoftext|>", "<|end|>"),
    "no end token": (PLAIN, "<|endoftext|>", ""),
}
"""Template, the tokenizer's end of text, and the token that ends an answer."""
KEEPING = [name for name in SHAPES if name != "qwen 3"]
"""Templates that render a turn the same way whatever comes after it."""


def shape(name):
    template, eos_token, end = SHAPES[name]
    return bpe_tokenizer(template, eos_token), bpe_tokenizer(unmarked(template), eos_token), end


def turns(*contents, system=None):
    """User and assistant in turns."""
    head = [] if system is None else [{"role": "system", "content": system}]
    return head + [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def documents_of(messages, tokenizer, assistant_mask="auto"):
    return AnswerFinder(tokenizer, assistant_mask).documents(messages)


@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("marked", [True, False])
def test_every_answer_with_its_end_token_is_supervised_and_nothing_else(name, marked):
    with_marks, without, end = shape(name)
    tokenizer = with_marks if marked else without
    messages = turns("Say hi.", "Hi!\n\nYou?", "Again.", "Hi, again.")
    ((tokens, mask),) = documents_of(messages, tokenizer, "template" if marked else "prefixes")
    assert supervised_texts(tokenizer, tokens, mask) == [f"Hi!\n\nYou?{end}", f"Hi, again.{end}"]
    rendered = render(messages, tokenizer, add_generation_prompt=False)
    assert rendered.startswith(tokenizer.decode(tokens))
    assert mask[-1] is True


@pytest.mark.parametrize("name", SHAPES)
@given(
    contents=st.lists(st.text(alphabet="ab \n<>é", min_size=1).filter(str.strip), min_size=2, max_size=6),
    system=st.none() | st.text(alphabet="ab \n", min_size=1),
)
@settings(max_examples=20, deadline=None)
def test_marks_and_prefixes_supervise_the_same_tokens(name, contents, system):
    with_marks, without, _ = shape(name)
    messages = turns(*contents, system=system)
    by_marks = documents_of(messages, with_marks, "template")
    assert by_marks == documents_of(messages, with_marks, "prefixes")
    assert by_marks == documents_of(messages, with_marks, "auto")
    assert by_marks == documents_of(messages, without, "auto")


@pytest.mark.parametrize("name", SHAPES)
@given(contents=st.lists(st.text(alphabet="ab \n<>é", min_size=1).filter(str.strip), min_size=2, max_size=6))
@settings(max_examples=20, deadline=None)
def test_each_answer_stands_after_the_prompt_that_the_target_reads(name, contents):
    tokenizer, _, end = shape(name)
    messages = turns(*contents)
    documents = documents_of(messages, tokenizer)
    read = []
    for tokens, mask in documents:
        starts = [place for place, flag in enumerate(mask) if flag and not mask[place - 1]]
        read += [tokenizer.decode(tokens[:start]) for start in starts]
    assert read == [
        render(messages[:place], tokenizer, add_generation_prompt=True) for place in range(1, len(messages), 2)
    ]
    assert all(tokenizer.decode(tokens).endswith(end) for tokens, _ in documents)


def test_marks_supervise_what_transformers_own_mask_has():
    tokenizer, _, _ = shape("chatml")
    messages = turns("Say hi.", "Hi! You?", "Again.", "Hi, again.")
    theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ((tokens, mask),) = documents_of(messages, tokenizer)
    assert theirs["input_ids"] == tokens + encode("\n", tokenizer)
    assert theirs["assistant_masks"] == [*map(int, mask), 0]


def test_auto_takes_the_marks_where_there_are_some():
    says_less = CHATML.replace("{% generation %}", "{{ 'Well: ' }}{% generation %}")
    tokenizer = bpe_tokenizer(says_less)
    for choice, answer in (
        ("auto", "yes<|im_end|>"),
        ("template", "yes<|im_end|>"),
        ("prefixes", "Well: yes<|im_end|>"),
    ):
        ((tokens, mask),) = documents_of(turns("Is it?", "yes"), tokenizer, choice)
        assert supervised_texts(tokenizer, tokens, mask) == [answer]


@pytest.mark.parametrize("mark", ["{% generation %}", "{%- generation -%}", "{%generation%}"])
def test_marks_are_known_however_they_are_spaced(mark):
    template = CHATML.replace("{% generation %}", mark)
    documents = documents_of(turns("a", "b"), bpe_tokenizer(template), "template")
    assert documents == documents_of(turns("a", "b"), bpe_tokenizer(unmarked(CHATML)))


def test_template_without_marks_is_refused_when_marks_are_asked_for():
    with pytest.raises(
        InputError, match=r"--assistant-mask is template.*no \{% generation %\} marks.*prefixes, or auto"
    ):
        documents_of(turns("a", "b"), bpe_tokenizer(unmarked(CHATML)), "template")


def test_target_without_chat_template_is_refused():
    with pytest.raises(InputError, match="no chat template"):
        documents_of(turns("a", "b"), bpe_tokenizer(None))


def test_qwen3_conversation_becomes_a_document_for_each_turn_as_it_was_read():
    tokenizer, _, _ = shape("qwen 3")
    messages = turns("2 + 2?", "<think>\nEasy.\n</think>\n\n4", "And 3 + 3?", "<think>\nSame.\n</think>\n\n6")
    first, whole = documents_of(messages, tokenizer)
    assert supervised_texts(tokenizer, *first) == ["<think>\nEasy.\n</think>\n\n4<|im_end|>"]
    assert supervised_texts(tokenizer, *whole) == ["<think>\nSame.\n</think>\n\n6<|im_end|>"]
    assert "Easy" not in tokenizer.decode(whole[0])
    assert "<|im_start|>assistant\n4<|im_end|>" in tokenizer.decode(whole[0])


@pytest.mark.parametrize("marked", [True, False])
def test_tool_calls_and_the_answer_after_them_stay_in_one_document(marked):
    tokenizer = shape("qwen 3")[0 if marked else 1]
    call = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
    messages = [
        {"role": "user", "content": "What time is it?", "tools": [{"type": "function", "function": {"name": "clock"}}]},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "I look."},
        {"role": "tool", "content": "12:00"},
        {"role": "assistant", "content": "Noon.", "reasoning_content": "So noon."},
    ]
    ((tokens, mask),) = documents_of(messages, tokenizer)
    assert supervised_texts(tokenizer, tokens, mask) == [
        '<think>\nI look.\n</think>\n\n<tool_call>clock{"zone": "UTC"}</tool_call><|im_end|>',
        "<think>\nSo noon.\n</think>\n\nNoon.<|im_end|>",
    ]
    text = tokenizer.decode(tokens)
    assert text.startswith('<|im_start|>system\n<tools>[{"type": "function", "function": {"name": "clock"}}]</tools>')
    assert "<tool_response>12:00</tool_response>" in text


def test_template_that_drops_thinking_from_the_last_answer_is_refused_without_marks():
    tokenizer = bpe_tokenizer(unmarked(R1), "<|end|>")
    with pytest.raises(ValueError, match=r"otherwise than the target would write it.*regenerate"):
        documents_of(turns("a", "<think>b</think>c"), tokenizer)


def test_mark_away_from_the_generation_prompt_is_taken_at_its_word():
    tokenizer = bpe_tokenizer(R1, "<|end|>")
    ((tokens, mask),) = documents_of(turns("a", "<think>b</think>c", "d", "e"), tokenizer)
    assert supervised_texts(tokenizer, tokens, mask) == ["c<|end|>", "e<|end|>"]


def test_marks_of_earlier_turns_count_once_where_the_prompt_begins_otherwise():
    template = "{{ 'asked' if add_generation_prompt else 'told' }}" + WIDE_CHATML
    tokenizer = bpe_tokenizer(template)
    ((tokens, mask),) = documents_of(turns("a", "b", "c", "d"), tokenizer)
    assert tokenizer.decode(tokens).count("<|im_start|>assistant") == 2
    assert len(supervised_texts(tokenizer, tokens, mask)) == 2


def test_mark_of_the_header_alone_marks_no_answer():
    template = (
        "{{ messages[0].content }}{% if add_generation_prompt %}assistant: {% else %}"
        "{% generation %}assistant: {% endgeneration %}{{ messages[1].content }}{% endif %}"
    )
    with pytest.raises(ValueError, match="no answer of the assistant that the chat template marks"):
        documents_of(turns("a", "b"), bpe_tokenizer(template))


@pytest.mark.parametrize("marked", [True, False])
def test_answer_that_ends_otherwise_than_others_ends_with_its_own_token(marked):
    ends = "{{ ('<|end|>' if message.tool_calls else '<|im_end|>') + '\\n' }}"
    template = CHATML.replace("message.content + '<|im_end|>' }}", "message.content }}").replace("{{ '\\n' }}", ends)
    tokenizer = bpe_tokenizer(template if marked else unmarked(template))
    messages = turns("a", "b", "c", "d")
    messages[1]["tool_calls"] = [{"function": {"name": "clock", "arguments": {}}}]
    ((tokens, mask),) = documents_of(messages, tokenizer)
    assert supervised_texts(tokenizer, tokens, mask) == ["b<|end|>", "d<|im_end|>"]


def test_beginning_of_text_stands_once():
    tokenizer, _, _ = shape("llama 3")
    ((tokens, _),) = documents_of(turns("a", "b", "c", "d"), tokenizer)
    assert tokens.count(tokenizer.bos_token_id) == 1
    assert tokens[0] == tokenizer.bos_token_id


def test_no_token_reaches_over_the_start_of_an_answer():
    tokenizer, _, _ = shape("chatml")
    assert len(encode("\n\n", tokenizer)) == 1  # so that a newline of the prompt could merge with one of the answer
    prompt = encode(render(turns("a"), tokenizer, add_generation_prompt=True), tokenizer)
    ((tokens, mask),) = documents_of(turns("a", "\nb"), tokenizer)
    assert tokens[: mask.index(True)] == prompt
    assert supervised_texts(tokenizer, tokens, mask) == ["\nb<|im_end|>"]


def test_tokenizer_that_prepends_a_space_adds_none_within_a_conversation():
    template = (
        "{{ bos_token }}{% for message in messages %}{{ message.role + ':' + message.content }}"
        "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = spacing_tokenizer(template)
    messages = turns("say a", "a b", "why", "yes")
    whole = encode(render(messages, tokenizer, add_generation_prompt=False), tokenizer)
    ((tokens, mask),) = documents_of(messages, tokenizer)
    assert tokens == whole
    assert supervised_texts(tokenizer, tokens, mask) == ["a b</s>", "yes</s>"]
    assert encode("a", tokenizer) != whole[mask.index(True) : mask.index(True) + 1]  # alone it would get a space


@pytest.mark.parametrize("tokenizer", [bpe_tokenizer(CHATML), CharTokenizer()], ids=["marks", "prefixes"])
def test_empty_answer_and_answers_before_the_user_are_context(tokenizer):
    head = {"role": "assistant", "content": "welcome"}
    messages = [head, *turns("a", " ", "b", "c")]
    ((tokens, mask),) = documents_of(messages, tokenizer)
    assert supervised_texts(tokenizer, tokens, mask) == ["c" + tokenizer.eos_token]
    assert "welcome" in tokenizer.decode(tokens)


def test_messages_after_the_last_answer_are_left_out():
    tokenizer, _, _ = shape("chatml")
    assert documents_of(turns("a", "b", "c"), tokenizer) == documents_of(turns("a", "b"), tokenizer)


@pytest.mark.parametrize("messages", [turns("a"), turns("a", ""), turns("a", "  ", "b")])
def test_conversation_without_an_answer_is_named(messages):
    with pytest.raises(ValueError, match="no answer of the assistant"):
        documents_of(messages, shape("chatml")[0])


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('roles must alternate') }}", "{{ messages[0].content + 1 }}", "{{ messages[9].content.x }}"],
)
def test_conversation_that_the_template_cannot_render_is_a_value_error(template):
    with pytest.raises(ValueError, match="the chat template refuses it: ") as caught:
        documents_of(turns("a", "b"), bpe_tokenizer(template))
    assert not isinstance(caught.value, InputError)


def test_named_templates_give_the_one_for_tools_where_there_are_tools():
    tokenizer = bpe_tokenizer({"default": unmarked(CHATML), "tool_use": "tools {{ tools[0].name }}"})
    messages = [{"role": "user", "content": "a", "tools": [{"name": "clock"}]}]
    assert render(messages, tokenizer, add_generation_prompt=True) == "tools clock"
    tokenizer.chat_template = "{{ messages | tojson }}"
    assert render(messages, tokenizer, add_generation_prompt=True) == '[{"role": "user", "content": "a"}]'


def test_named_template_is_the_default_where_there_are_no_tools():
    tokenizer = bpe_tokenizer({"default": unmarked(CHATML), "tool_use": "tools"})
    assert "You help." in render(turns("a"), tokenizer, add_generation_prompt=True)
