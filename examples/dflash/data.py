"""Conversations in, documents out: JSONL, the chat template, and which tokens the drafter is trained on.

Guarantees:
- A line that cannot be used is named with its number and its reason, counted, and skipped; over
  ``MAX_SKIPPED_SHARE`` of the lines the run stops.
- A document is what the target reads at inference: the rendered prompt, then an answer up to its end-of-text token.
  Only answers, end-of-text included, are supervised; what the template puts after it (a newline) is not.
- Spans of answers are found by rendering prefixes of the conversation, because few templates mark them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .config import Config, InputError

MAX_SKIPPED_SHARE = 0.05
_ROLES = frozenset({"system", "user", "assistant", "tool"})
_NUM_SHOWN = 5

Say = Callable[[str], object]


@dataclass(frozen=True)
class Conversation:
    """One line of the data: its place among the usable ones from 0, its line's number from 1, and the messages."""

    id: int
    line: int
    messages: list[dict[str, str]]

    @property
    def prompt(self) -> list[dict[str, str]]:
        """The messages up to the last one of the user."""
        last = max(index for index, message in enumerate(self.messages) if message["role"] == "user")
        return self.messages[: last + 1]


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt. ``id`` is its place in the data, from 0."""

    id: int
    line: int
    tokens: list[int]


@dataclass(frozen=True)
class Document:
    """A training document.

    Attributes:
        id: its place in the data, from 0; anchors are drawn by it.
        tokens: prompt and answers.
        loss_mask: which of the tokens are supervised.
        prompt_length: how many tokens come before the first supervised one.
    """

    id: int
    tokens: list[int]
    loss_mask: list[bool]
    prompt_length: int


@dataclass
class SkippedLines:
    """The lines of one file that cannot be used."""

    path: Path
    reasons: list[tuple[int, str]] = field(default_factory=list)

    def add(self, line: int, reason: str) -> None:
        self.reasons.append((line, reason))

    def report(self, num_lines: int, say: Say) -> None:
        """Say what was skipped.

        Raises:
            InputError: more than the allowed share, or everything.
        """
        if not self.reasons:
            return
        shown = [f"  line {line}: {reason}" for line, reason in self.reasons[:_NUM_SHOWN]]
        if len(self.reasons) > _NUM_SHOWN:
            shown.append(f"  and {len(self.reasons) - _NUM_SHOWN} more")
        text = f"{self.path}: skipped {len(self.reasons)} of {num_lines} lines:\n" + "\n".join(shown)
        if len(self.reasons) > MAX_SKIPPED_SHARE * num_lines:
            raise InputError(
                f"{text}\nMore than {MAX_SKIPPED_SHARE:.0%} of the lines cannot be used, so the run stops. "
                f"Repair the file."
            )
        say(text)


def read_conversations(path: Path, *, say: Say = print) -> list[Conversation]:
    """The conversations of a JSONL file, in its order.

    Raises:
        InputError: there is no such file, it is empty, or too many of its lines cannot be used.
    """
    conversations: list[Conversation] = []
    skipped, num_lines = SkippedLines(path), 0
    for number, line in _lines(path):
        num_lines += 1
        try:
            conversations.append(Conversation(len(conversations), number, _messages(line)))
        except ValueError as exc:  # json's own included
            skipped.add(number, str(exc))
    if num_lines == 0:
        raise InputError(f"{path} is empty. It must hold one {{'messages': [...]}} a line.")
    skipped.report(num_lines, say)
    return conversations


def load_training_prompts(config: Config, *, say: Say = print) -> list[Conversation]:
    """The conversations of ``config.data`` but those held out.

    Raises:
        InputError: the data cannot be used.
    """
    return _split(read_conversations(config.data, say=say), config, held_out=False)


def load_held_out_prompts(config: Config, tokenizer: Any, *, say: Say = print) -> list[Prompt]:
    """The rendered prompts that are held out for evaluation.

    Raises:
        InputError: the data or one of its prompts cannot be used.
    """
    held_out = _split(read_conversations(config.data, say=say), config, held_out=True)
    return [render_prompt(conversation, config, tokenizer) for conversation in held_out]


def load_training_documents(config: Config, tokenizer: Any, mask_token_id: int, *, say: Say = print) -> list[Document]:
    """The documents to train on: the target's answers to the prompts, or with ``regenerate=False`` those in the data.

    Args:
        mask_token_id: conversations that contain it are skipped, since the drafter takes it for a blank.
    Raises:
        InputError: the data cannot be used, or answers are missing.
    """
    split = _split(read_conversations(config.data, say=say), config, held_out=False)
    answers = read_records(config.answers_path) if config.regenerate else {}
    documents: list[Document] = []
    skipped, num_missing, num_cut = SkippedLines(config.data), 0, 0
    for conversation in split:
        if config.regenerate:
            record = answers.get(answer_key(conversation.prompt, config))
            if record is None:
                num_missing += 1
                continue
            prompt = render_prompt(conversation, config, tokenizer).tokens
            segments = [(prompt, False), (record["answer_tokens"], True)]
        else:
            try:
                segments = _segments(conversation.messages, tokenizer)
            except InputError:
                raise
            except ValueError as exc:
                skipped.add(conversation.line, str(exc))
                continue
        tokens = [token for segment, _ in segments for token in segment]
        loss_mask = [supervised for segment, supervised in segments for _ in segment]
        prompt_length = loss_mask.index(True) if any(loss_mask) else len(tokens)
        _check_fits(prompt_length, conversation.line, config)
        if mask_token_id in tokens:
            skipped.add(conversation.line, f"its text contains the mask token, {mask_token_id}")
            continue
        num_cut += len(tokens) > config.token_budget
        documents.append(
            Document(conversation.id, tokens[: config.token_budget], loss_mask[: config.token_budget], prompt_length)
        )
    if num_missing:
        raise InputError(
            f"{config.answers_path} lacks the target's answers to {num_missing} of {len(split)} prompts. First run "
            f"regenerate with the same --target, --data, --out, --dtype, --max-new-tokens and --temperature, or train "
            f"on the answers in the data with --no-regenerate."
        )
    skipped.report(len(split), say)
    if num_cut:
        say(f"{config.data}: {num_cut} documents were cut to the token budget, {config.token_budget}.")
    return documents


def answer_key(prompt: Sequence[dict[str, str]], config: Config, sample: int = 0) -> str:
    """Names an answer by all that decides it, so that answers of another configuration are never taken.

    Args:
        sample: 0 is the first answer; k the k-th further one, drawn at ``sample_temperature``.
    """
    temperature = config.sample_temperature if sample else config.temperature
    decides = [config.target, config.dtype, config.max_new_tokens, temperature, list(prompt)]
    if temperature > 0:
        decides.append(config.seed)
    if sample:
        decides.append(sample)
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:32]


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """The records of a file that regenerate writes, by key; none if there is no file. A torn line is left out."""
    records: dict[str, dict[str, Any]] = {}
    for _, line in _lines(path) if path.is_file() else ():
        try:
            record = json.loads(line)
            record["answer_tokens"] = [int(token) for token in record["answer_tokens"]]
            records[record["key"]] = record
        except (ValueError, KeyError, TypeError):
            continue
    return records


def render(messages: Sequence[dict[str, str]], tokenizer: Any, *, add_generation_prompt: bool) -> str:
    """The chat template's text.

    Raises:
        InputError: the target has no chat template.
        ValueError: the template refuses these messages.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError("The target has no chat template, so its prompts cannot be rendered. Take an instruct model.")
    from jinja2 import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except TemplateError as exc:
        raise ValueError(f"the chat template refuses it: {exc}") from exc
    return text


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, numbered from 1. Bytes that are no UTF-8 make their own line unusable, not the file."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as exc:
        raise InputError(f"Cannot read {path}: {exc.strerror or exc}. Give the data with --data.") from exc


def _messages(line: str) -> list[dict[str, str]]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as exc:
        raise ValueError(f"not JSON: {exc}") from exc
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list):
        raise ValueError('no list "messages"')
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError("a message without text as its content")
        if not isinstance(message.get("role"), str) or message["role"] not in _ROLES:
            raise ValueError(f"a message of the role {message.get('role')!r}")
        if any(c == "\ufffd" or "\ud800" <= c <= "\udfff" for c in message["content"]):
            raise ValueError("not UTF-8")
    if not any(message["role"] == "user" for message in messages):
        raise ValueError("no message of the user")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _split(conversations: list[Conversation], config: Config, held_out: bool) -> list[Conversation]:
    """The conversations of one side: the last ``num_held_out`` are kept out of training."""
    num_training = len(conversations) - config.num_held_out
    if num_training < 1:
        raise InputError(
            f"{config.data} has {len(conversations)} conversations and --num-held-out is {config.num_held_out}: "
            f"nothing is left to train on. Give more data (--data) or hold out fewer."
        )
    return conversations[num_training:] if held_out else conversations[:num_training]


def render_prompt(conversation: Conversation, config: Config, tokenizer: Any) -> Prompt:
    """The conversation's prompt as the target reads it.

    Raises:
        InputError: the template refuses it, or it leaves no room for an answer.
    """
    try:
        text = render(conversation.prompt, tokenizer, add_generation_prompt=True)
    except InputError:
        raise
    except ValueError as exc:
        raise InputError(f"{config.data}, line {conversation.line}: {exc}.") from exc
    tokens = _encode(text, tokenizer)
    _check_fits(len(tokens), conversation.line, config)
    return Prompt(conversation.id, conversation.line, tokens)


def _check_fits(prompt_length: int, line: int, config: Config) -> None:
    if prompt_length + 2 > config.token_budget:  # an anchor and a label
        raise InputError(
            f"{config.data}, line {line}: the prompt has {prompt_length} tokens, which leaves no room for an answer in "
            f"the token budget, {config.token_budget}. Raise --token-budget, or take the line out."
        )


def _segments(messages: Sequence[dict[str, str]], tokenizer: Any) -> list[tuple[list[int], bool]]:
    """The conversation's tokens in runs, each supervised or not, up to the last answer's end-of-text."""
    segments: list[tuple[list[int], bool]] = []
    done = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:index], tokenizer, add_generation_prompt=True)
        after = render(messages[: index + 1], tokenizer, add_generation_prompt=False)
        if not before.startswith(done) or not after.startswith(before):
            raise ValueError("the chat template rewrites earlier turns, so the answers cannot be found in it")
        answer = after[len(before) :]
        end = answer.rfind(tokenizer.eos_token) if tokenizer.eos_token else -1
        if end >= 0:
            answer = answer[: end + len(tokenizer.eos_token)]
        segments.append((_encode(before[len(done) :], tokenizer), False))
        segments.append((_encode(answer, tokenizer), True))
        done = before + answer
    if not segments:
        raise ValueError("no answer of the assistant, which training without regenerate needs")
    return segments


def _encode(text: str, tokenizer: Any) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)
