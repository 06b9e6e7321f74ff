"""evaluate: what the drafter is worth on held-out prompts, and proof that decoding with it loses nothing.

Three ways answer the same prompts greedily: the target alone, with the drafter, and with prompt lookup. Printed are
acceptance length (tokens committed a verifying pass, the target's own included: 1.0 for a useless drafter, block_size
at most), target calls saved and wall-clock, over all prompts and over those whose answer does not loop.

Lossless means token for token in float32; a divergence where the target's two best logits are closer than 1e-4 is a
tie, counted. In bfloat16 passes of different shapes round differently, so the first divergence of a prompt must be a
near-tie, closer than 4 units in the last place of the best logit.
"""

from __future__ import annotations

import copy
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import torch

import graphsafe as gs

from .config import Config, InputError, check_split
from .data import Prompt, load_held_out_prompts
from .decode import Decoded, decode, merge_decoded
from .drafter import Drafter
from .export import load_drafter
from .fetch import resolve_target
from .lookup import LookupDrafting
from .speculate import Accept, Drafting, ModelDrafting, Speculated, accept_longest_prefix, merge_speculated, speculate
from .target import Target, load_target

TIE_GAP = 1e-4
NEAR_TIE_ULPS = 4
LOOP_NGRAM = 8
LOOP_SHARE = 0.2
_BFLOAT16_FRACTION_BITS = 7

T = TypeVar("T")


@dataclass
class Score:
    """What one way of drafting is worth on one set of prompts."""

    num_prompts: int
    acceptance: float
    calls_saved: float
    num_target_calls: int


@dataclass
class Divergence:
    """Where an answer first leaves the target's own: the prompt's line, the token, the target's top-2 gap there."""

    line: int
    index: int
    gap: float
    is_tie: bool


@dataclass
class Way:
    """One way of drafting over all prompts."""

    name: str
    seconds: float = 0.0
    results: list[tuple[Prompt, list[int], int]] = field(default_factory=list)  # prompt, its answer, rounds
    accepted: list[int] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def failures(self) -> list[Divergence]:
        return [divergence for divergence in self.divergences if not divergence.is_tie]


@dataclass
class Evaluation:
    """The outcome; ``passed`` decides the exit status."""

    drafter: Way
    lookup: Way
    alone: dict[int, list[int]]  # the target's own answer to each prompt, by its line
    alone_seconds: float
    min_acceptance: float
    dtype: str

    def score(self, way: Way, *, looping: bool) -> Score:
        """Over all prompts, or with ``looping=False`` over those whose answer does not loop."""
        chosen = [result for result in way.results if looping or not loops(self.alone[result[0].line])]
        rounds = sum(num_rounds for _, _, num_rounds in chosen)
        # The prefill gives each answer's first token, whoever drafts.
        committed = sum(len(answer) - 1 for _, answer, _ in chosen)
        alone = sum(len(self.alone[prompt.line]) for prompt, _, _ in chosen)
        calls = rounds + len(chosen)
        return Score(
            num_prompts=len(chosen),
            acceptance=committed / rounds if rounds else 1.0,
            calls_saved=1 - calls / alone if alone else 0.0,
            num_target_calls=calls,
        )

    @property
    def lossless(self) -> bool:
        return not self.drafter.failures and not self.lookup.failures

    @property
    def acceptance(self) -> float:
        return self.score(self.drafter, looping=True).acceptance

    @property
    def passed(self) -> bool:
        return self.lossless and self.acceptance >= self.min_acceptance

    def report(self) -> str:
        """The table and the verdict."""
        lines = []
        for title, looping in (("all prompts", True), ("answers that do not loop", False)):
            count = self.score(self.drafter, looping=looping).num_prompts
            lines.append(f"{title} ({count})")
            lines.append(
                f"  {'':<14}{'acceptance length':>18}{'target calls saved':>20}" + f"{'wall-clock':>12}" * looping
            )
            if looping:
                lines.append(f"  {'target alone':<14}{1.0:>18.2f}{0.0:>20.1%}{self.alone_seconds:>11.1f}s")
            for way in (self.drafter, self.lookup):
                score = self.score(way, looping=looping)
                line = f"  {way.name:<14}{score.acceptance:>18.2f}{score.calls_saved:>20.1%}"
                lines.append(line + f"{way.seconds:>11.1f}s" * looping)
        for way in (self.drafter, self.lookup):
            lines.append(f"lossless with {way.name}: {self._lossless_text(way)}")
        return "\n".join(lines)

    def verdict(self) -> str:
        """One line."""
        reasons = []
        if self.acceptance < self.min_acceptance:
            reasons.append(
                f"acceptance length {self.acceptance:.2f} is below --min-acceptance {self.min_acceptance:.2f}"
            )
        if not self.lossless:
            reasons.append("decoding with drafts is not lossless")
        if reasons:
            return "FAILED: " + ", and ".join(reasons)
        return f"PASSED: acceptance length {self.acceptance:.2f} (at least {self.min_acceptance:.2f} asked), lossless"

    def _lossless_text(self, way: Way) -> str:
        num_ties = len(way.divergences) - len(way.failures)
        rule = f"a gap under {TIE_GAP:g}" if self.dtype == "float32" else f"a gap under {NEAR_TIE_ULPS} ulp"
        text = "yes" if not way.failures else f"NO, {len(way.failures)} of {len(way.results)} answers differ"
        text += f"; {num_ties} of {len(way.results)} answers leave the target's at a tie ({rule})"
        for failure in way.failures[:3]:
            text += (
                f"\n  line {failure.line}: token {failure.index} differs, the target's top-2 gap is {failure.gap:.2e}"
            )
        return text

    def as_dict(self) -> dict[str, object]:
        """Plain values, for a JSON file."""
        ways = {}
        for way in (self.drafter, self.lookup):
            ways[way.name] = {
                "all": asdict(self.score(way, looping=True)),
                "not_looping": asdict(self.score(way, looping=False)),
                "seconds": way.seconds,
                "rounds_by_committed_tokens": way.accepted,
                "divergences": [asdict(divergence) for divergence in way.divergences],
            }
        return {
            "passed": self.passed,
            "lossless": self.lossless,
            "acceptance": self.acceptance,
            "target_alone_seconds": self.alone_seconds,
            **ways,
        }


def main(config: Config) -> Evaluation:
    """Evaluate the run's drafter on the held-out prompts; print the report and write ``evaluation.json``.

    Raises:
        InputError: there is no drafter, it is another target's, or nothing is held out.
    """
    check_split(config)
    device = torch.device(config.targets[0])
    drafter = _load_drafter(config, device)
    target = load_target(resolve_target(config.target), device, getattr(torch, config.dtype))
    check_drafter(drafter, target, config)
    prompts = load_held_out_prompts(config, target.tokenizer)
    if not prompts:
        raise InputError("--num-held-out is 0, so there are no prompts to evaluate on.")
    evaluation = evaluate(target, lambda lane: ModelDrafting(drafter, lane), prompts, config, say=print)
    print(evaluation.report())
    print(evaluation.verdict())
    _write(config.out / "evaluation.json", evaluation.as_dict())
    return evaluation


def evaluate(
    target: Target,
    make_drafting: Callable[[Target], Drafting],
    prompts: Sequence[Prompt],
    config: Config,
    *,
    accept: Accept = accept_longest_prefix,
    say: Callable[[str], object] = lambda text: None,
) -> Evaluation:
    """Decode all three ways and compare.

    Args:
        target: in ``config.dtype``.
        make_drafting: the drafter for a target; called for each thread that decodes.
        prompts: of any number; ``config.decode_batch`` at a time.
        accept: the verifier's rule, see ``speculate``.
        say: told the progress.
    """
    drafter, lookup = Way("drafter"), Way("prompt lookup")
    alone: dict[int, list[int]] = {}
    alone_seconds = 0.0
    ordered = sorted(prompts, key=lambda prompt: len(prompt.tokens))
    count = config.max_new_tokens
    with _exact_float32(), _lanes(target, min(len(ordered), config.decode_batch)) as lanes:
        draftings = {id(lane): make_drafting(lane) for lane in lanes}
        block_size = draftings[id(target)].block_size

        def own(lane: Target, tokens: list[list[int]], stop: threading.Event) -> Decoded:
            return decode(lane, tokens, count, stop=stop)

        def drafted(lane: Target, tokens: list[list[int]], stop: threading.Event) -> Speculated:
            return speculate(lane, draftings[id(lane)], tokens, count, accept=accept, stop=stop)

        def looked_up(lane: Target, tokens: list[list[int]], stop: threading.Event) -> Speculated:
            return speculate(lane, LookupDrafting(block_size), tokens, count, accept=accept, stop=stop)

        if target.device.type == "cuda":  # kernels are loaded at their first use, which is nobody's cost
            decode(target, [prompt.tokens for prompt in ordered[:2]], 2)
        for first in range(0, len(ordered), config.decode_batch):
            batch = ordered[first : first + config.decode_batch]
            tokens = [prompt.tokens for prompt in batch]
            say(f"evaluate: prompts {first + 1} to {first + len(batch)} of {len(ordered)}, the target alone ...")
            parts, seconds = _timed(lanes, own, tokens)
            reference = merge_decoded(parts)
            alone.update((prompt.line, answer) for prompt, answer in zip(batch, reference.answers, strict=True))
            alone_seconds += seconds
            for way, call in ((drafter, drafted), (lookup, looked_up)):
                say(f"evaluate: the same with {way.name} ...")
                pieces, seconds = _timed(lanes, call, tokens)
                _record(way, batch, reference, merge_speculated(pieces), seconds, config.dtype)
    return Evaluation(drafter, lookup, alone, alone_seconds, config.min_acceptance, config.dtype)


def loops(answer: Sequence[int]) -> bool:
    """Whether at least ``LOOP_SHARE`` of the answer's 8-grams came up in it before."""
    grams = [tuple(answer[start : start + LOOP_NGRAM]) for start in range(len(answer) - LOOP_NGRAM + 1)]
    return bool(grams) and 1 - len(set(grams)) / len(grams) >= LOOP_SHARE


def first_difference(answer: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token in which they differ, a missing one included."""
    for index in range(max(len(answer), len(other))):
        if index >= len(answer) or index >= len(other) or answer[index] != other[index]:
            return index
    return None


def is_tie(gap: float, top: float, dtype: Literal["float32", "bfloat16"]) -> bool:
    """Whether rounding alone may decide between the two best tokens, whose logits are ``top`` and ``top - gap``."""
    if dtype == "float32":
        return gap < TIE_GAP
    exponent = math.floor(math.log2(abs(top))) if top else -126
    return gap < NEAR_TIE_ULPS * 2.0 ** (exponent - _BFLOAT16_FRACTION_BITS)


def check_drafter(drafter: Drafter, target: Target, config: Config) -> None:
    """Raise InputError where the drafter was trained for a target of another shape."""
    shape = drafter.config
    theirs = (shape.hidden_size, shape.vocab_size, shape.num_target_layers)
    ours = (target.hidden_size, target.vocab_size, target.num_layers)
    if theirs != ours:
        raise InputError(
            f"{config.drafter or config.drafter_path} was trained for a target of (hidden size, vocabulary, layers) "
            f"{theirs}, but --target {config.target} has {ours}."
        )


def _record(way: Way, batch: Sequence[Prompt], own: Decoded, done: Speculated, seconds: float, dtype: str) -> None:
    way.seconds += seconds
    way.accepted = [a + b for a, b in zip(way.accepted or [0] * len(done.accepted), done.accepted, strict=True)]
    for row, prompt in enumerate(batch):
        way.results.append((prompt, done.answers[row], done.num_rounds[row]))
        index = first_difference(own.answers[row], done.answers[row])
        if index is not None:
            gap, top = float(own.gaps[row, index]), float(own.tops[row, index])
            way.divergences.append(Divergence(prompt.line, index, gap, is_tie(gap, top, dtype)))  # type: ignore[arg-type]


def _load_drafter(config: Config, device: torch.device) -> Drafter:
    return load_drafter(config, device, getattr(torch, config.dtype))


def _timed(
    lanes: Sequence[Target], call: Callable[[Target, list[list[int]], threading.Event], T], tokens: list[list[int]]
) -> tuple[list[T], float]:
    """``call`` for each lane's share of the prompts, in their order, and the seconds that all took."""
    size = -(-len(tokens) // len(lanes))
    shares = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    began = time.perf_counter()
    with gs.WorkerGroup() as group:
        workers = [
            group.spawn(call, lane, share, group.stop, device=lane.device, name=f"decode-{index}")
            for index, (lane, share) in enumerate(zip(lanes, shares, strict=False))
        ]
    values = [worker.result() for worker in workers]
    if lanes[0].device.type == "cuda":
        torch.cuda.current_stream(lanes[0].device).synchronize()
    return values, time.perf_counter() - began


@contextmanager
def _lanes(target: Target, num_prompts: int) -> Iterator[list[Target]]:
    """The target for each thread that decodes: one on a GPU, one for each core on CPU, all with the same weights."""
    num_cores = torch.get_num_threads()
    num_lanes = min(num_cores, num_prompts) if target.device.type == "cpu" else 1
    weights = {id(tensor): tensor for tensor in (*target.model.parameters(), *target.model.buffers())}
    # Modules of their own: the hooks that read features are registered on them.
    twins = [Target(copy.deepcopy(target.model, dict(weights)), target.tokenizer) for _ in range(num_lanes - 1)]
    for twin in twins:
        twin.eos_token_ids = target.eos_token_ids
    torch.set_num_threads(max(1, num_cores // num_lanes))  # threads that start later take it over
    try:
        yield [target, *twins]
    finally:
        torch.set_num_threads(num_cores)


@contextmanager
def _exact_float32() -> Iterator[None]:
    """No TF32 in matrix products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _write(path: Path, record: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(record, indent=2) + "\n")
    temporary.replace(path)
