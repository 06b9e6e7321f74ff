"""regenerate: the target answers the prompts, and its answers are what the drafter learns.

A target thread on each device of ``--targets`` takes batches of prompts of similar length from one queue; this thread
writes what comes back. On CPU there are as many threads as cores, and each computes alone: batches need no barrier
between cores, which operators that are split over cores pay at every layer.

Guarantees:
- ``answers.jsonl`` appears whole, in the data's order, a prompt's further samples behind its first answer. Finished
  batches are kept beside it (``.partial``), so an interrupted run goes on where it stopped.
- An answer carries a key of all that decides it. Answers of the same configuration are never made twice, those of
  another never taken. What is drawn for an answer is drawn from its key: no batch, thread or order changes it.
- Token ids are stored as the target gave them: decoding and encoding again could change them.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import graphsafe as gs

from .config import Config, InputError
from .data import Conversation, Prompt, answer_key, load_training_prompts, read_records, render_prompt
from .decode import BatchDecoder, loops
from .devices import cores_shared_out
from .fetch import resolve_target
from .files import replace_file
from .target import Target, load_target

_POLL_S = 0.2

Say = Callable[[str], object]
Record = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """An answer to make: the ``sample``-th to a conversation, 0 being the first."""

    key: str
    conversation: Conversation
    sample: int

    @property
    def seed(self) -> int:
        """Of its draws."""
        return int(self.key[:15], 16)

    def temperature(self, config: Config) -> float:
        return config.sample_temperature if self.sample else config.temperature


Job = tuple[Wanted, Prompt]


def main(config: Config, *, say: Say = print) -> Path:
    """Write the target's answers to all prompts but those held out; done at once where they are there.

    Returns:
        ``config.answers_path``.
    Raises:
        InputError: the data or the target cannot be used.
    """
    wanted: dict[str, Wanted] = {}
    for conversation in load_training_prompts(config, say=say):
        for sample in range(1 + config.num_samples):
            key = answer_key(conversation.prompt, config, sample)
            wanted.setdefault(key, Wanted(key, conversation, sample))
    path, partial = config.answers_path, config.answers_path.with_suffix(".partial")
    there = {**read_records(path), **read_records(partial)}
    missing = [one for key, one in wanted.items() if key not in there]
    if missing:
        say(f"regenerate: {len(missing)} of {len(wanted)} answers of this configuration are not there yet.")
        directory = resolve_target(config.target, say=say)
        dtype = getattr(torch, config.dtype)
        targets = [load_target(directory, device, dtype) for device in dict.fromkeys(config.targets)]
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = partial.is_file() and not partial.read_bytes().endswith(b"\n")  # the run before was killed while writing
        with partial.open("a", encoding="utf-8") as file:
            file.write("\n" if torn else "")
            there.update(answer(targets, missing, config, file, say=say))
        say(_summary([there[key]["answer_tokens"] for key in wanted], targets[0], config))
    else:
        say(f"regenerate: {path} holds the answers of this configuration already.")
    if missing or partial.is_file():
        write_records(path, [there[key] for key in wanted])
        partial.unlink(missing_ok=True)
    return path


def answer(
    targets: Sequence[Target], wanted: Sequence[Wanted], config: Config, file: Any, *, say: Say = print
) -> dict[str, Record]:
    """The targets' answers by key; each batch is appended to ``file`` as it comes.

    Raises:
        InputError: a prompt is too long, or answers are to be drawn from logits that the target changes.
    """
    if not targets[0].has_plain_logits and any(one.temperature(config) > 0 for one in wanted):
        raise InputError(
            f"--target {config.target} scales or caps its logits, so that answers drawn from them as they are would be "
            "those of another temperature. Leave --temperature and --num-samples at 0."
        )
    tokenizer = targets[0].tokenizer
    prompts: dict[int, Prompt] = {}
    for one in wanted:
        if one.conversation.id not in prompts:
            prompts[one.conversation.id] = render_prompt(one.conversation, config, tokenizer)
    _check_length(list(prompts.values()), targets[0], config)
    batches = _batches([(one, prompts[one.conversation.id]) for one in wanted], config)
    waiting: queue.SimpleQueue[list[Job]] = queue.SimpleQueue()
    for batch in batches:
        waiting.put(batch)
    answered: queue.SimpleQueue[tuple[list[Job], list[list[int]]]] = queue.SimpleQueue()
    largest, longest = max(map(len, batches)), max(len(prompt.tokens) for prompt in prompts.values())
    records: dict[str, Record] = {}
    began, num_tokens = time.perf_counter(), 0

    def keep(batch: list[Job], answers: list[list[int]]) -> None:
        nonlocal num_tokens
        for (one, _), tokens in zip(batch, answers, strict=True):
            records[one.key] = _record(one, tokens, tokenizer)
            file.write(json.dumps(records[one.key], ensure_ascii=False) + "\n")
            num_tokens += len(tokens)
        file.flush()
        os.fsync(file.fileno())
        advance(len(records), num_tokens / (time.perf_counter() - began))

    num_left = len(batches)
    with _progress(len(wanted), say) as advance:
        try:
            with _threads(targets, num_left) as threads, gs.WorkerGroup() as group:
                for index, target in enumerate(threads):
                    decoder = BatchDecoder(target, config.max_new_tokens, num_rows=largest, max_prompt=longest)
                    arguments = (decoder, waiting, answered, config, group.stop)
                    group.spawn(_work, *arguments, device=target.device, name=f"target-{index}")
                while num_left and not group.stop.is_set():
                    try:
                        batch, answers = answered.get(timeout=_POLL_S)
                    except queue.Empty:
                        continue
                    keep(batch, answers)
                    num_left -= 1
        finally:
            while not answered.empty():  # what was finished before an error or Ctrl-C
                keep(*answered.get())
    seconds = time.perf_counter() - began
    rate = num_tokens / seconds
    say(f"regenerate: {len(records)} answers of {num_tokens:,} tokens in {seconds:.1f} s, {rate:,.0f} tokens/s")
    return records


def _batches(jobs: Sequence[Job], config: Config) -> list[list[Job]]:
    """Batches of one temperature and of similar length; longest first: what runs out of memory does so at once."""
    by_temperature: dict[float, list[Job]] = {}
    for job in jobs:
        by_temperature.setdefault(job[0].temperature(config), []).append(job)
    batches: list[list[Job]] = []
    for some in by_temperature.values():
        some.sort(key=lambda job: -len(job[1].tokens))
        batches += [some[start : start + config.decode_batch] for start in range(0, len(some), config.decode_batch)]
    return sorted(batches, key=lambda batch: -len(batch[0][1].tokens))


def _summary(answers: Sequence[Sequence[int]], target: Target, config: Config) -> str:
    """How many of the answers are of doubtful use to a drafter, in words."""
    count, longest = len(answers), config.max_new_tokens
    num_cut = sum(len(answer) >= longest and answer[-1] not in target.eos_token_ids for answer in answers)
    looping, cut = sum(map(loops, answers)) / count, num_cut / count
    return f"regenerate: of {count} answers {looping:.1%} loop, and {cut:.1%} were cut at --max-new-tokens {longest}"


@contextmanager
def _progress(total: int, say: Say) -> Iterator[Callable[[int, float], object]]:
    """A function that shows the answers done and the tokens/s: as a bar on a terminal, elsewhere in lines."""
    if say is not print or not sys.stdout.isatty():
        yield lambda done, rate: say(f"regenerate: {done} of {total} answers, {rate:,.0f} tokens/s")
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(bar_width=14), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[text]}"))
    with Progress(*columns) as progress:
        task = progress.add_task("answers", total=total, text="warming up")
        yield lambda done, rate: progress.update(task, completed=done, text=f"{rate:,.0f} tokens/s")


@contextmanager
def _threads(targets: Sequence[Target], num_batches: int) -> Iterator[list[Target]]:
    """The target of each thread. On CPU the cores are shared out among the threads meanwhile."""
    if targets[0].device.type != "cpu":
        yield list(targets)
        return
    num_threads = min(max(torch.get_num_threads(), len(targets)), num_batches)
    with cores_shared_out(num_threads):
        yield [targets[index % len(targets)] for index in range(num_threads)]


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Write JSON lines, all of them or none."""

    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")

    replace_file(path, write)


def _work(
    batched: BatchDecoder,
    waiting: queue.SimpleQueue[list[Job]],
    answered: queue.SimpleQueue[tuple[list[Job], list[list[int]]]],
    config: Config,
    stop: threading.Event,
) -> None:
    """One target thread: batches in, answers out, until there are no more or ``stop`` is set."""
    with batched as decoder:
        while not stop.is_set():
            try:
                batch = waiting.get_nowait()
            except queue.Empty:
                return
            decoded = decoder.decode(
                [prompt.tokens for _, prompt in batch],
                stop=stop,
                temperature=batch[0][0].temperature(config),
                seeds=[one.seed for one, _ in batch],
            )
            if not stop.is_set():  # else the answers are cut short
                answered.put((batch, decoded.answers))


def _record(one: Wanted, tokens: list[int], tokenizer: Any) -> Record:
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return {
        "key": one.key,
        "sample": one.sample,
        "messages": [*one.conversation.prompt, {"role": "assistant", "content": text}],
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
