"""Conversations in, documents out: the data's prompts, the target's answers to them, and who is kept out of training.

Guarantees:
- A document is what the target reads at inference: the rendered prompt, then an answer up to its end-of-text token.
  Only answers, end-of-text included, are supervised; what the template puts after it (a newline) is not (chat.py).
- A conversation is on one side of each split: training, validation or held out. The last are of the data's order.
- Ids of documents are unique. One conversation may make several documents: of its first one the id is the
  conversation's, whatever other documents there are.
- The file is read line by line, twice; no text is kept once its tokens are there.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from .chat import AnswerFinder, Masked, encode, render
from .config import Config, InputError
from .lines import (
    Conversation,
    Message,
    Say,
    SkippedLines,
    TokenLine,
    count_lines,
    json_lines,
    read_lines,
)

_ONLY_TOKENS = "it is tokens already (input_ids), which the target cannot answer: train on them with --no-regenerate"
_SMALL_VALIDATION = 10  # the share of validation where there are few documents is one over this


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
        id: unique; anchors are drawn by it.
        tokens: prompt and answers.
        loss_mask: which of the tokens are supervised.
        prompt_length: how many tokens come before the first supervised one.
        conversation: the place in the data, from 0, of the line that it comes from; -1: its id. Documents of one
            conversation share their prompt.
    """

    id: int
    tokens: list[int]
    loss_mask: list[bool]
    prompt_length: int
    conversation: int = -1

    def __post_init__(self) -> None:
        if self.conversation < 0:
            object.__setattr__(self, "conversation", self.id)


def load_training_prompts(config: Config, *, say: Say = print) -> list[Conversation]:
    """The conversations of ``config.data`` but those held out. Lines of tokens are skipped: no target can answer them.

    Raises:
        InputError: the data cannot be used.
    """
    num_training = _num_training(count_lines(config.data, say=say), config)
    skipped = SkippedLines(config.data, num_training)
    conversations: list[Conversation] = []
    for line in _lines(config, 0, num_training):
        if isinstance(line, Conversation):
            conversations.append(line)
        else:
            skipped.add(line.line, _ONLY_TOKENS)
    _report(skipped, say)
    return conversations


def load_held_out_prompts(config: Config, tokenizer: Any, *, say: Say = print) -> list[Prompt]:
    """The prompts that are held out for evaluation: rendered, or of a line of tokens those before the supervised ones.

    Raises:
        InputError: the data or one of its prompts cannot be used.
    """
    num_lines = count_lines(config.data, say=say)
    in_data = _InData(config, tokenizer)
    prompts: list[Prompt] = []
    for line in _lines(config, _num_training(num_lines, config), num_lines):
        if isinstance(line, Conversation):
            prompts.append(render_prompt(line, config, tokenizer))
            continue
        try:
            in_data.check_vocabulary(line)
            if line.loss_mask[0]:
                raise ValueError("its first token is supervised, so it has no prompt to evaluate on")
        except ValueError as exc:
            raise InputError(f"{config.data}, line {line.line}: {exc}. Take the line out.") from exc
        prompt = line.tokens[: line.loss_mask.index(True)]
        _check_fits(len(prompt), line.line, config)
        prompts.append(Prompt(line.id, line.line, prompt))
    return prompts


def check_unseen(config: Config) -> None:
    """Raise InputError where prompts to be evaluated are among those that the run's drafter was trained on.

    (``config.check_split`` does it for the run's own data.) Nothing is known of prompts that came as tokens.
    """
    if not config.split_path.is_file():
        return
    noted = json.loads(config.split_path.read_text())
    former = replace(config, data=Path(noted["data"]), num_held_out=noted["num_held_out"])
    if former.data == config.data.resolve() or not former.data.is_file():
        return
    known = set(_prompts(former, held_out=False))
    held_out = list(_prompts(config, held_out=True))
    seen = sum(prompt in known for prompt in held_out)
    if seen:
        raise InputError(
            f"The drafter of {config.out} was trained on {seen} of the {len(held_out)} prompts that {config.data} "
            f"holds out: they are in {former.data}. Give evaluate prompts that it has not seen, with --data."
        )


def _prompts(config: Config, held_out: bool) -> Iterator[str]:
    num_lines = count_lines(config.data, say=lambda text: None)
    num_training = _num_training(num_lines, config)
    for line in _lines(config, num_training, num_lines) if held_out else _lines(config, 0, num_training):
        if isinstance(line, Conversation):
            yield json.dumps(line.prompt, sort_keys=True)


def load_training_documents(config: Config, tokenizer: Any, mask_token_id: int, *, say: Say = print) -> list[Document]:
    """The documents to train on: the target's answers to the prompts, or with ``regenerate=False`` those in the data.

    In the data's order come the first documents of all conversations, whose ids are the conversations'. Then come the
    further ones: other answers (``config.num_samples``), or earlier turns that the chat template rewrites later. The
    k-th further document of a conversation has the conversation's id plus k times the number of conversations.

    Args:
        mask_token_id: lines that contain it are skipped, since the drafter takes it for a blank.
    Raises:
        InputError: the data cannot be used, or answers are missing.
    """
    num_lines = count_lines(config.data, say=say)
    num_training = _num_training(num_lines, config)
    masked_of = _Regenerated(config, tokenizer) if config.regenerate else _InData(config, tokenizer)
    skipped = SkippedLines(config.data, num_training)
    documents: list[Document] = []
    num_missing = num_cut = num_left_out = 0
    shared: dict[int, int] = {}  # one object for each token id: 8 bytes a token instead of 36
    for line in _lines(config, 0, num_training):
        try:
            versions = masked_of(line)
            if any(mask_token_id in tokens for tokens, _ in versions):
                raise ValueError(f"its text contains the mask token, {mask_token_id}")
        except InputError:
            raise
        except _MissingAnswerError:
            num_missing += 1
            continue
        except ValueError as exc:
            skipped.add(line.line, str(exc))
            continue
        prompt_lengths = [mask.index(True) if any(mask) else len(mask) for _, mask in versions]
        _check_fits(min(prompt_lengths), line.line, config)
        for index, (tokens, mask) in enumerate(versions):
            if not _fits(prompt_lengths[index], config):  # only a later turn's: the shortest prompt fits
                num_left_out += 1
                continue
            num_cut += len(tokens) > config.token_budget
            tokens = [shared.setdefault(token, token) for token in tokens[: config.token_budget]]
            mask = mask[: config.token_budget]
            id = line.id + index * num_lines
            documents.append(Document(id, tokens, mask, prompt_lengths[index], line.id))
    if num_missing:
        raise InputError(
            f"{config.answers_path} lacks the target's answers to {num_missing} of {num_training} prompts. First run "
            f"regenerate with the same --target, --data, --out, --dtype, --max-new-tokens, --temperature, "
            f"--num-samples and --sample-temperature, or train on the answers in the data with --no-regenerate."
        )
    _report(skipped, say)
    if num_cut:
        say(f"{config.data}: {num_cut} documents were cut to the token budget, {config.token_budget}.")
    if num_left_out:
        say(f"{config.data}: {num_left_out} later turns are left out, which the token budget has no room for.")
    return sorted(documents, key=lambda document: document.id)


def split_validation(
    documents: Sequence[Document], config: Config, *, say: Say = print
) -> tuple[list[Document], list[Document]]:
    """Training and validation documents, each in the given order.

    Validation has whole conversations, the last of the data's, as many as there is room for: ``config.num_validation``
    documents, or a tenth of all (maybe none) where there are fewer than twice as many. A document always stays for
    training.
    """
    wanted = config.num_validation
    room = wanted if len(documents) >= 2 * wanted else len(documents) // _SMALL_VALIDATION
    sizes = Counter(document.conversation for document in documents)
    chosen: set[int] = set()
    for conversation in sorted(sizes, reverse=True):
        if sizes[conversation] > room:
            break
        room -= sizes[conversation]
        chosen.add(conversation)
    validation = [document for document in documents if document.conversation in chosen]
    if len(validation) < wanted:
        say(
            f"validation: {len(validation)} documents instead of --num-validation {wanted}, of {len(documents)} in "
            f"all. Few documents give a tenth at most, and no conversation is split between training and validation."
        )
    return [document for document in documents if document.conversation not in chosen], validation


def answer_key(prompt: Sequence[Message], config: Config, sample: int = 0) -> str:
    """Names an answer by all that decides it, so that answers of another configuration are never taken.

    Args:
        sample: 0 is the first answer, drawn at ``config.temperature``; from 1 on the further ones, drawn at
            ``config.sample_temperature``.
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
    return {record["key"]: record for record in _records(path)}


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
    tokens = encode(text, tokenizer)
    _check_fits(len(tokens), conversation.line, config)
    return Prompt(conversation.id, conversation.line, tokens)


class _MissingAnswerError(Exception):
    """The target has not answered this prompt yet, or not often enough."""


class _Regenerated:
    """The target's answers to a line's prompt."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._answers = {record["key"]: record["answer_tokens"] for record in _records(config.answers_path)}

    def __call__(self, line: Conversation | TokenLine) -> list[Masked]:
        if isinstance(line, TokenLine):
            raise ValueError(_ONLY_TOKENS)
        keys = [answer_key(line.prompt, self._config, sample) for sample in range(self._config.num_samples + 1)]
        if not all(key in self._answers for key in keys):
            raise _MissingAnswerError
        prompt = render_prompt(line, self._config, self._tokenizer).tokens
        answers = [self._answers[key] for key in keys]
        return [(prompt + answer, [False] * len(prompt) + [True] * len(answer)) for answer in answers]


class _InData:
    """A line as it is: the answers that the data holds, or its tokens."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self._finder = AnswerFinder(tokenizer, config.assistant_mask)
        self._tokenizer = tokenizer

    def __call__(self, line: Conversation | TokenLine) -> list[Masked]:
        if isinstance(line, TokenLine):
            self.check_vocabulary(line)
            return [(line.tokens, line.loss_mask)]
        return self._finder.documents(line.messages)[::-1]  # the whole conversation is its first document

    def check_vocabulary(self, line: TokenLine) -> None:
        """Raise ValueError where the target has no such token. (A target of random weights has no tokenizer.)"""
        if self._tokenizer is not None and max(line.tokens) >= self._vocabulary_size:
            raise ValueError(f"it has the token {max(line.tokens)}, and the target has {self._vocabulary_size} tokens")

    @cached_property
    def _vocabulary_size(self) -> int:
        return 1 + max(int(token) for token in self._tokenizer.get_vocab().values())


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for _, line in json_lines(path) if path.is_file() else ():
        try:
            record = json.loads(line)
            record["answer_tokens"] = [int(token) for token in record["answer_tokens"]]
            record["key"]
        except (ValueError, KeyError, TypeError):
            continue
        yield record


def _num_training(num_lines: int, config: Config) -> int:
    """How many lines are not held out: the last ``num_held_out`` are kept out of training."""
    if num_lines <= config.num_held_out:
        raise InputError(
            f"{config.data} has {num_lines} conversations and --num-held-out is {config.num_held_out}: "
            f"nothing is left to train on. Give more data (--data) or hold out fewer."
        )
    return num_lines - config.num_held_out


def _lines(config: Config, start: int, stop: int) -> Iterator[Conversation | TokenLine]:
    """The usable lines from the start-th up to the stop-th."""
    num_read = start
    for line in itertools.islice(read_lines(config.data, SkippedLines(config.data)), start, stop):
        num_read += 1
        yield line
    if num_read < stop:
        raise InputError(f"{config.data} changed while it was read, or is no file that can be read twice.")


def _report(skipped: SkippedLines, say: Say) -> None:
    if all(reason == _ONLY_TOKENS for _, reason in skipped.reasons) and len(skipped.reasons) == skipped.num_lines:
        raise InputError(
            f"{skipped.path} holds tokens (input_ids) alone, and the target can only answer messages. Train on them "
            f"as they are: --no-regenerate."
        )
    skipped.report(say)


def _fits(prompt_length: int, config: Config) -> bool:
    return prompt_length + 2 <= config.token_budget  # an anchor and a label


def _check_fits(prompt_length: int, line: int, config: Config) -> None:
    if not _fits(prompt_length, config):
        raise InputError(
            f"{config.data}, line {line}: the prompt has {prompt_length} tokens, which leaves no room for an answer in "
            f"the token budget, {config.token_budget}. Raise --token-budget, or take the line out."
        )
