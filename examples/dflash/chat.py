"""The target's chat template: messages to tokens, and which of them are the assistant's answers.

An answer is found in one of two ways: by the template's own marks (``{% generation %}`` blocks), or by rendering the
conversation up to the answer, with the prompt for it, and then with the answer: what is new is the answer.

Guarantees:
- Both ways supervise the same tokens. The generation prompt is never supervised, even where a mark takes it in; the
  token that ends the answer always is, even where a mark leaves it out; what follows it (a newline) never is.
- A supervised answer stands after what the target read when it wrote it. Where a template writes earlier turns
  differently in a longer conversation (Qwen3's drops their thinking), a conversation becomes several documents: each
  has the answers that stand in it as they were written, and the last one is the whole conversation. (A mark that
  does not follow the generation prompt is taken at its word.)
- Prompt and answer are encoded apart, as at inference: no token reaches over the start of an answer.
- The template alone decides about a beginning-of-text token; encoding adds none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

from .config import InputError
from .lines import ANSWER_KEYS, Message

_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_PROBE = "probe0answer"

Masked = tuple[list[int], list[bool]]
"""A document's tokens, and which of them are supervised."""


def render(messages: Sequence[Message], tokenizer: Any, *, add_generation_prompt: bool) -> str:
    """The chat template's text. ``tools`` of the first message are the template's ``tools``.

    Raises:
        InputError: the target has no chat template.
        ValueError: the template refuses these messages.
    """
    return _render(messages, tokenizer, add_generation_prompt, with_marks=False)[0]


def encode(text: str, tokenizer: Any) -> list[int]:
    """The text's tokens and no others."""
    return list(tokenizer(text, add_special_tokens=False).input_ids)


class AnswerFinder:
    """Finds the answers in what the chat template renders.

    Args:
        assistant_mask: ``template`` (by marks), ``prefixes``, or ``auto``: by marks where the template has them.
    """

    def __init__(self, tokenizer: Any, assistant_mask: Literal["auto", "template", "prefixes"] = "auto") -> None:
        self._tokenizer = tokenizer
        self._assistant_mask = assistant_mask

    def documents(self, messages: Sequence[Message]) -> list[Masked]:
        """The conversation's documents, in the order of their last answers; the last is the whole up to its last one.

        Every answer after the first message of the user is supervised in one of them. An empty answer is context, and
        messages after the last answer are left out.

        Raises:
            InputError: the target has no chat template, or ``template`` was asked for and it has no marks.
            ValueError: this conversation cannot be rendered, or has no answer.
        """
        documents: list[list[tuple[str, bool]]] = []
        runs: list[tuple[str, bool]] = []
        done, answerable = "", False
        for index, message in enumerate(messages):
            answerable = answerable or message["role"] == "user"
            if message["role"] != "assistant" or not answerable or _is_empty(message):
                continue
            text, spans = self._answer(messages[: index + 1])
            if not spans:
                continue
            if not text.startswith(done):
                documents.append(runs)
                runs, done = [], ""
            place = len(done)
            for start, end in spans:
                runs += [(text[place:start], False), (text[start:end], True)]
                place = end
            done = text[:place]
        if not runs:
            marked = " that the chat template marks" if self._by_marks else ""
            raise ValueError(f"no answer of the assistant{marked}, which training without regenerate needs")
        return [self._encode(runs) for runs in [*documents, runs]]

    def _answer(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The rendered conversation, and the spans in it of its last message: the answer up to its end."""
        before, earlier = _render(messages[:-1], self._tokenizer, True, with_marks=self._by_marks)
        text, marks = _render(messages, self._tokenizer, False, with_marks=self._by_marks)
        start = _common_length(before, text)
        if self._by_marks:
            marks = marks[len(earlier) :]
        elif start < len(before):
            raise ValueError(
                "the chat template shows an answer otherwise than the target would write it (some drop its thinking, "
                "even in the last turn): only regenerate gives such a target answers to learn from"
            )
        else:
            marks = [(start, len(text))]
        content_end, end = self._end(text, start)
        spans = [(max(first, start), min(last, end)) for first, last in marks if first < end and last > start]
        if spans and spans[-1][1] >= content_end:
            spans[-1] = (spans[-1][0], end)
        return text, spans

    def _end(self, text: str, start: int) -> tuple[int, int]:
        """Where the last answer's words end, and where it ends with the token that ends it."""
        tail, num_kept = self._tail
        if tail and text.endswith(tail) and len(text) - len(tail) >= start:
            return len(text) - len(tail), len(text) - len(tail) + num_kept
        # Turns that call tools may end otherwise than others: with their last special token.
        found = [(text.rfind(special, start), len(special)) for special in self._specials]
        place, size = max(found, default=(-1, 0))
        return (place, place + size) if place >= 0 else (len(text), len(text))

    @cached_property
    def _by_marks(self) -> bool:
        has_marks = _MARK.search(_template(self._tokenizer, None)) is not None
        if self._assistant_mask == "template" and not has_marks:
            raise InputError(
                "--assistant-mask is template, but the target's chat template has no {% generation %} marks. Take "
                "--assistant-mask prefixes, or auto."
            )
        return has_marks and self._assistant_mask != "prefixes"

    @cached_property
    def _tail(self) -> tuple[str, int]:
        """What the template puts after an answer, and how many characters of it the target writes itself."""
        probe: list[Message] = [{"role": role, "content": _PROBE} for role in ("user", "assistant")]
        try:
            _, found, tail = render(probe, self._tokenizer, add_generation_prompt=False).rpartition(_PROBE)
        except InputError:
            raise
        except ValueError:  # a template of other habits: answers end with their last special token
            return "", 0
        ends = [(place, -len(special)) for special in self._specials if (place := tail.find(special)) >= 0]
        place, size = min(ends, default=(0, 0))
        return (tail, place - size) if found else ("", 0)

    @cached_property
    def _specials(self) -> list[str]:
        """The texts of special tokens."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        named = [self._tokenizer.eos_token, *getattr(self._tokenizer, "all_special_tokens", ())]
        return [text for text in dict.fromkeys([*named, *(str(token) for token in added if token.special)]) if text]

    @cached_property
    def _num_lead(self) -> int:
        """Where encoding puts a space before whatever it is given, as SentencePiece models do: the tokens of a newline.

        A run that goes on after another is then encoded behind a newline, whose tokens are cut off again.
        """
        alone, after = encode("a", self._tokenizer), encode("\na", self._tokenizer)
        return 0 if after[-len(alone) :] == alone else len(encode("\n", self._tokenizer))

    def _encode(self, runs: Sequence[tuple[str, bool]]) -> Masked:
        tokens: list[int] = []
        mask: list[bool] = []
        for text, supervised in runs:
            if tokens and self._num_lead:
                run = encode("\n" + text, self._tokenizer)[self._num_lead :]
            else:
                run = encode(text, self._tokenizer)
            tokens += run
            mask += [supervised] * len(run)
        return tokens, mask


def _common_length(first: str, second: str) -> int:
    """How many characters both begin with."""
    if second.startswith(first):
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def _is_empty(message: Message) -> bool:
    """Whether an answer holds nothing that a target would have written."""
    return not message["content"].strip() and not any(message.get(key) for key in ANSWER_KEYS)


def _template(tokenizer: Any, tools: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if template is None:
        raise InputError("The target has no chat template, so its prompts cannot be rendered. Take an instruct model.")
    return str(tokenizer.get_chat_template(tools=tools)) if isinstance(template, dict) else str(template)


def _render(
    messages: Sequence[Message], tokenizer: Any, add_generation_prompt: bool, *, with_marks: bool
) -> tuple[str, list[tuple[int, int]]]:
    """The text, and the places in it of the template's generation blocks."""
    from jinja2 import TemplateError

    tools = messages[0].get("tools") if messages else None
    plain = [{key: value for key, value in message.items() if key != "tools"} for message in messages]
    given = {"tools": tools} if tools else {}
    template = _template(tokenizer, tools)
    try:
        if not with_marks:
            text = tokenizer.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=add_generation_prompt, **given
            )
            return str(text), []
        # What apply_chat_template does before it encodes; its mask of tokens would depend on how they merge.
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(  # annotated as a string, and is not one
            conversations=[plain],
            chat_template=template,
            return_assistant_tokens_mask=True,
            add_generation_prompt=add_generation_prompt,
            **given,
            **tokenizer.special_tokens_map,
        )
        (text,), (marks,) = rendered
        return str(text), [(int(start), int(end)) for start, end in marks]
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as exc:  # it computes with the data
        raise ValueError(f"the chat template refuses it: {exc or type(exc).__name__}") from exc
