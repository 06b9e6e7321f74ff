"""The lines of the data: JSONL of conversations and of documents that are tokens already.

Three kinds, freely mixed: ``{"messages": [{"role", "content"}]}`` as OpenAI has it, ``{"conversations": [{"from",
"value"}]}`` as ShareGPT has it, and ``{"input_ids", "loss_mask"}``.

Guarantees:
- A line that cannot be used is named with its number and its reason, counted, and skipped; over
  ``MAX_SKIPPED_SHARE`` of the lines the run stops.
- Lines are read one at a time: what the caller does not keep is not kept.
- Messages come out in one form: ``role`` (system, user, assistant or tool), ``content`` as one text, and whatever else
  the line has in them, for the chat template to read. A record's ``tools`` ride on its first message, so that the
  messages alone decide what is rendered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .config import InputError

MAX_SKIPPED_SHARE = 0.05
ANSWER_KEYS = ("tool_calls", "reasoning_content", "reasoning", "thinking")  # what an answer may hold beside its content
_NUM_SHOWN = 5
_ROLES = {
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation"), "tool"),
}
_RENAMED = ("role", "from", "content", "value")
_NOT_UTF8 = re.compile("[\ufffd\ud800-\udfff]")  # what stands for broken bytes, and halves of pairs that JSON escaped

Say = Callable[[str], object]
Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """A line of messages: its place among the usable lines from 0, its number in the file from 1, the messages."""

    id: int
    line: int
    messages: list[Message]

    @property
    def prompt(self) -> list[Message]:
        """The messages up to the last one of the user."""
        last = max(index for index, message in enumerate(self.messages) if message["role"] == "user")
        return self.messages[: last + 1]


@dataclass(frozen=True)
class TokenLine:
    """A line of tokens, with which of them are supervised: at least one. ``id`` and ``line`` as a conversation's."""

    id: int
    line: int
    tokens: list[int]
    loss_mask: list[bool]


@dataclass
class SkippedLines:
    """The lines of one file that cannot be used, of ``num_lines`` that were looked at."""

    path: Path
    num_lines: int = 0
    reasons: list[tuple[int, str]] = field(default_factory=list)

    def add(self, line: int, reason: str) -> None:
        self.reasons.append((line, reason))

    def report(self, say: Say) -> None:
        """Say what was skipped.

        Raises:
            InputError: more than the allowed share, or everything.
        """
        if not self.reasons:
            return
        shown = [f"  line {line}: {reason}" for line, reason in self.reasons[:_NUM_SHOWN]]
        if len(self.reasons) > _NUM_SHOWN:
            shown.append(f"  and {len(self.reasons) - _NUM_SHOWN} more")
        text = f"{self.path}: skipped {len(self.reasons)} of {self.num_lines} lines:\n" + "\n".join(shown)
        if len(self.reasons) > MAX_SKIPPED_SHARE * self.num_lines:
            raise InputError(
                f"{text}\nMore than {MAX_SKIPPED_SHARE:.0%} of the lines cannot be used, so the run stops. "
                f"Repair the file."
            )
        say(text)


def read_lines(path: Path, skipped: SkippedLines) -> Iterator[Conversation | TokenLine]:
    """The usable lines of a file in its order, one at a time; ``skipped`` takes up the others.

    Raises:
        InputError: there is no such file.
    """
    num_usable = 0
    for number, text in json_lines(path):
        skipped.num_lines += 1
        try:
            line = _parse(text, num_usable, number)
        except ValueError as exc:  # json's own included
            skipped.add(number, str(exc))
            continue
        num_usable += 1
        yield line


def count_lines(path: Path, *, say: Say = print) -> int:
    """How many lines of the file are usable.

    Raises:
        InputError: there is no such file, it is empty, or too many of its lines cannot be used.
    """
    skipped = SkippedLines(path)
    num_usable = sum(1 for _ in read_lines(path, skipped))
    if skipped.num_lines == 0:
        raise InputError(f"{path} is empty. It must hold one {{'messages': [...]}} a line.")
    skipped.report(say)
    return num_usable


def json_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, numbered from 1. Bytes that are no UTF-8 make their own line unusable, not the file."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as exc:
        raise InputError(f"Cannot read {path}: {exc.strerror or exc}. Give the data with --data.") from exc


def _parse(text: str, place: int, number: int) -> Conversation | TokenLine:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as exc:
        raise ValueError(f"not JSON: {exc}") from exc
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    if isinstance(record, dict):
        for key in ("messages", "conversations"):
            if isinstance(record.get(key), list):
                return Conversation(place, number, _messages(record[key], record))
        if "input_ids" in record:
            return TokenLine(place, number, *_tokens(record))
    raise ValueError('no list "messages" or "conversations", and no "input_ids"')


def _tokens(record: dict[str, Any]) -> tuple[list[int], list[bool]]:
    tokens, mask = record["input_ids"], record.get("loss_mask")
    if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
        raise ValueError('"input_ids" must be a list of token ids')
    if not isinstance(mask, list) or not all(type(flag) in (int, bool) and flag in (0, 1) for flag in mask):
        raise ValueError('"input_ids" needs a "loss_mask" of 0 and 1: which tokens are supervised')
    if len(tokens) != len(mask):
        raise ValueError(f"{len(tokens)} input_ids, but a loss_mask of {len(mask)}")
    if not any(mask):
        raise ValueError("its loss_mask supervises no token")
    return tokens, [bool(flag) for flag in mask]


def _messages(raw: list[Any], record: dict[str, Any]) -> list[Message]:
    messages = [_message(message) for message in raw]
    system, tools = record.get("system"), record.get("tools")
    if isinstance(system, str) and system and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": system})
    if not any(message["role"] == "user" for message in messages):
        raise ValueError("no message of the user")
    if tools:
        messages[0] = {"tools": tools, **messages[0]}
    if "tools" in messages[0]:
        messages[0]["tools"] = _objects(messages[0]["tools"], "tools")
    if any(_NOT_UTF8.search(text) for text in _strings(messages)):
        raise ValueError("not UTF-8")
    return messages


def _message(raw: Any) -> Message:
    """One message in the form that templates read. Keys that hold null are as if they were not there."""
    if not isinstance(raw, dict):
        raise ValueError("a message without text as its content")
    role = raw.get("role") or raw.get("from")
    if not isinstance(role, str) or role not in _ROLES:
        raise ValueError(f"a message of the role {role!r}")
    others = {key: value for key, value in raw.items() if key not in _RENAMED and value is not None}
    if "tool_calls" in others:
        others["tool_calls"] = [_tool_call(call) for call in _objects(others["tool_calls"], "tool_calls")]
        if not others["tool_calls"]:
            del others["tool_calls"]
    content = raw.get("content") if raw.get("content") is not None else raw.get("value")
    if content is None and _ROLES[role] == "assistant" and any(others.get(key) for key in ANSWER_KEYS):
        content = ""
    return {"role": _ROLES[role], "content": _text(content), **others}


def _text(content: Any) -> str:
    """The content as one text. Parts of a list are joined by line breaks, as vLLM does for templates that take text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("a message without text as its content")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"a message with a part of the type {kind!r}: only text can be rendered")
        texts.append(text)
    return "\n".join(texts)


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    """A list of objects, which some data holds as JSON inside a string."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f'"{name}" that is no list of objects')
    return value


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """The call with its arguments as an object, as servers hand it to templates, which turn it into JSON themselves."""
    function = call.get("function", call)
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise ValueError("a tool call whose arguments are no JSON object")
    parsed = {**function, "arguments": arguments}
    return {**call, "function": parsed} if "function" in call else parsed


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
