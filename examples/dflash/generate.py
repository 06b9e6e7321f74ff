"""regenerate: the target answers the prompts, and its answers are what the drafter learns.

A target thread on each device of ``--targets`` takes batches of prompts of similar length from one queue; this thread
writes what comes back. On CPU there are as many threads as cores, and each computes alone: batches need no barrier
between cores, which operators that are split over cores pay at every layer.

Guarantees:
- ``answers.jsonl`` appears whole, in the data's order. Finished batches are kept beside it (``.partial``), so an
  interrupted run goes on where it stopped.
- An answer carries a key of all that decides it. Answers of the same configuration are never made twice, those of
  another never taken.
- Token ids are stored as the target gave them: decoding and encoding again could change them.
"""

from __future__ import annotations

import json
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import graphsafe as gs

from .config import Config, InputError
from .data import Conversation, Prompt, answer_key, load_training_prompts, read_records, render_prompt
from .decode import decode
from .fetch import resolve_target
from .target import Target, load_target

_POLL_S = 0.2

Say = Callable[[str], object]
Record = dict[str, Any]


def main(config: Config, *, say: Say = print) -> Path:
    """Write the target's answers to all prompts but those held out; done at once where they are there.

    Returns:
        ``config.answers_path``.
    Raises:
        InputError: the data or the target cannot be used.
    """
    conversations = load_training_prompts(config, say=say)
    keys = [answer_key(conversation.prompt, config) for conversation in conversations]
    path, partial = config.answers_path, config.answers_path.with_suffix(".partial")
    there = {**read_records(path), **read_records(partial)}
    missing = [conversation for key, conversation in zip(keys, conversations, strict=True) if key not in there]
    if missing:
        say(f"regenerate: {len(missing)} of {len(keys)} prompts have no answer of this configuration yet.")
        directory = resolve_target(config.target, say=say)
        dtype = getattr(torch, config.dtype)
        targets = [load_target(directory, device, dtype) for device in dict.fromkeys(config.targets)]
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = partial.is_file() and not partial.read_bytes().endswith(b"\n")  # the run before was killed while writing
        with partial.open("a", encoding="utf-8") as file:
            file.write("\n" if torn else "")
            there.update(answer(targets, missing, config, file, say=say))
    else:
        say(f"regenerate: {path} holds the answers of this configuration already.")
    if missing or partial.is_file():
        write_records(path, [there[key] for key in dict.fromkeys(keys)])
        partial.unlink(missing_ok=True)
    return path


def answer(
    targets: Sequence[Target], conversations: Sequence[Conversation], config: Config, file: Any, *, say: Say = print
) -> dict[str, Record]:
    """The targets' answers by key; each batch is appended to ``file`` as it comes."""
    tokenizer = targets[0].tokenizer
    by_line = {conversation.line: conversation for conversation in conversations}
    prompts = [render_prompt(conversation, config, tokenizer) for conversation in conversations]
    _check_length(prompts, targets[0], config)
    prompts.sort(key=lambda prompt: len(prompt.tokens))
    size = config.decode_batch
    batches: queue.SimpleQueue[list[Prompt]] = queue.SimpleQueue()
    starts = range(0, len(prompts), size)
    for start in reversed(starts):  # longest first: what runs out of memory does so at once
        batches.put(prompts[start : start + size])
    answered: queue.SimpleQueue[tuple[list[Prompt], list[list[int]]]] = queue.SimpleQueue()
    records: dict[str, Record] = {}
    began, num_tokens = time.perf_counter(), 0

    def keep(batch: list[Prompt], answers: list[list[int]]) -> None:
        nonlocal num_tokens
        for prompt, tokens in zip(batch, answers, strict=True):
            record = _record(by_line[prompt.line], tokens, config, tokenizer)
            records[record["key"]] = record
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            num_tokens += len(tokens)
        file.flush()
        os.fsync(file.fileno())
        rate = num_tokens / (time.perf_counter() - began)
        say(f"regenerate: {len(records)} of {len(prompts)} prompts answered, {rate:,.0f} tokens/s")

    num_left = len(starts)
    try:
        with _threads(targets, num_left) as threads, gs.WorkerGroup() as group:
            for index, target in enumerate(threads):
                name = f"target-{index}"
                group.spawn(_work, target, batches, answered, config, group.stop, device=target.device, name=name)
            while num_left and not group.stop.is_set():
                try:
                    batch = answered.get(timeout=_POLL_S)
                except queue.Empty:
                    continue
                keep(*batch)
                num_left -= 1
    finally:
        while not answered.empty():  # what was finished before an error or Ctrl-C
            keep(*answered.get())
    return records


@contextmanager
def _threads(targets: Sequence[Target], num_batches: int) -> Iterator[list[Target]]:
    """The target of each thread. On CPU the cores are shared out among the threads meanwhile."""
    if targets[0].device.type != "cpu":
        yield list(targets)
        return
    num_cores = torch.get_num_threads()
    num_threads = min(max(num_cores, len(targets)), num_batches)
    torch.set_num_threads(max(1, num_cores // num_threads))  # threads that start later take it over
    try:
        yield [targets[index % len(targets)] for index in range(num_threads)]
    finally:
        torch.set_num_threads(num_cores)


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Write JSON lines beside ``path``, flush them to the disk, and rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _work(
    target: Target,
    batches: queue.SimpleQueue[list[Prompt]],
    answered: queue.SimpleQueue[tuple[list[Prompt], list[list[int]]]],
    config: Config,
    stop: threading.Event,
) -> None:
    """One target thread: batches in, answers out, until there are no more or ``stop`` is set."""
    while not stop.is_set():
        try:
            batch = batches.get_nowait()
        except queue.Empty:
            return
        generator = torch.Generator(target.device)
        # by the batch's first prompt, so that threads that race for batches draw the same
        generator.manual_seed(random.Random(f"answers {config.seed} {batch[0].id}").getrandbits(63))
        decoded = decode(
            target,
            [prompt.tokens for prompt in batch],
            config.max_new_tokens,
            temperature=config.temperature,
            generator=generator,
            stop=stop,
        )
        if not stop.is_set():  # else the answers are cut short
            answered.put((batch, decoded.answers))


def _record(conversation: Conversation, tokens: list[int], config: Config, tokenizer: Any) -> Record:
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return {
        "key": answer_key(conversation.prompt, config),
        "messages": [*conversation.prompt, {"role": "assistant", "content": text}],
        "answer_tokens": tokens,
    }


def _check_length(prompts: Sequence[Prompt], target: Target, config: Config) -> None:
    longest = max(prompts, key=lambda prompt: len(prompt.tokens))
    limit = getattr(target.config, "max_position_embeddings", None)
    needed = len(longest.tokens) + config.max_new_tokens
    if limit is not None and needed > limit:
        raise InputError(
            f"{config.data}, line {longest.line}: prompt and answer may need {needed} positions, and the target has "
            f"{limit}. Lower --max-new-tokens, or take the line out."
        )
