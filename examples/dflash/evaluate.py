"""evaluate: what the drafter is worth on held-out prompts, and proof that decoding with it loses nothing.

Three ways answer the same prompts greedily: the target alone, with the drafter, and with prompt lookup. Printed are
acceptance length (tokens committed a verifying pass, the target's own included: 1.0 for a useless drafter, block_size
at most), target calls saved and wall-clock, over all prompts and over those whose answer does not loop. On CUDA all
three run as graphs, captured before the clock starts, and a few prompts are timed one at a time as well, where fewer
target calls count most.

Lossless means token for token in float32; a divergence where the target's two best logits are closer than 1e-4 is a
tie, counted. In bfloat16 passes of different shapes round differently, so the first divergence of a prompt must be a
near-tie, closer than 4 units in the last place of the best logit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch

from .config import Config, InputError, check_split
from .data import Prompt, check_unseen, load_held_out_prompts
from .decode import BatchDecoder, Decoded, loops
from .drafter import Drafter
from .export import load_drafter
from .fetch import resolve_target
from .files import replace_file
from .lookup import LookupDrafting
from .speculate import Accept, Drafting, ModelDrafting, Speculated, SpeculativeDecoder, accept_longest_prefix
from .target import Target, load_target
from .timing import Clock, Clocks, lanes

TIE_GAP = 1e-4
NEAR_TIE_ULPS = 4
NUM_SINGLE = 8  # prompts that are timed one at a time on CUDA
_BFLOAT16_FRACTION_BITS = 7


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
    clock: Clock = field(default_factory=Clock)
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
    alone_clock: Clock
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
            line = f"  {'':<14}{'acceptance length':>18}{'target calls saved':>20}"
            lines.append(line + self._clock_heads() * looping)
            if looping:
                line = f"  {'target alone':<14}{1.0:>18.2f}{0.0:>20.1%}"
                lines.append(line + _clock_text(self.alone_clock))
            for way in (self.drafter, self.lookup):
                score = self.score(way, looping=looping)
                line = f"  {way.name:<14}{score.acceptance:>18.2f}{score.calls_saved:>20.1%}"
                lines.append(line + _clock_text(way.clock) * looping)
        lines.append(self._graphs_text())
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

    def _clock_heads(self) -> str:
        count = self.alone_clock.num_single
        single = f"{f'{count} one at a time':>18}" if count else ""
        return f"{'wall-clock':>12}{single}"

    def _graphs_text(self) -> str:
        clocks = {"target alone": self.alone_clock, **{way.name: way.clock for way in (self.drafter, self.lookup)}}
        graphed = [name for name, clock in clocks.items() if clock.graphed]
        eager = [name for name in clocks if name not in graphed]
        parts = (("as CUDA graphs, captured before the clock started", graphed), ("eagerly", eager))
        return "ran " + "; ".join(f"{how}: {', '.join(names)}" for how, names in parts if names)

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
                **asdict(way.clock),
                "rounds_by_committed_tokens": way.accepted,
                "divergences": [asdict(divergence) for divergence in way.divergences],
            }
        return {
            "passed": self.passed,
            "lossless": self.lossless,
            "acceptance": self.acceptance,
            "target_alone": asdict(self.alone_clock),
            **ways,
        }


def main(config: Config) -> Evaluation:
    """Evaluate the run's drafter on the held-out prompts; print the report and write ``evaluation.json``.

    Raises:
        InputError: there is no drafter, it is another target's, or nothing is held out.
    """
    device = torch.device(config.targets[0])
    drafter = _load_drafter(config, device)
    check_split(config)
    check_unseen(config)
    target = load_target(resolve_target(config.target), device, getattr(torch, config.dtype))
    check_drafter(drafter, target, config)
    prompts = load_held_out_prompts(config, target.tokenizer)
    if not prompts:
        raise InputError("--num-held-out is 0, so there are no prompts to evaluate on.")
    evaluation = evaluate(target, lambda lane: ModelDrafting(drafter, lane), prompts, config, say=print)
    print(evaluation.report())
    print(evaluation.verdict())
    own = config.drafter is None  # else the run's own result stays as it is
    path = config.out / ("evaluation.json" if own else f"evaluation-{config.drafter.stem}.json")
    found = {"drafter": str(config.drafter or config.drafter_path), "num_prompts": len(prompts)}
    _write(path, {**found, **evaluation.as_dict()})
    print(f"The numbers are in {path}.")
    return evaluation


def evaluate(
    target: Target,
    make_drafting: Callable[[Target], Drafting],
    prompts: Sequence[Prompt],
    config: Config,
    *,
    accept: Accept = accept_longest_prefix,
    graphed: bool | None = None,
    num_single: int | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> Evaluation:
    """Decode all three ways and compare.

    Args:
        target: in ``config.dtype``.
        make_drafting: the drafter for a target; called for each decoder.
        prompts: of any number; ``config.decode_batch`` at a time.
        accept: the verifier's rule, see ``speculate``.
        graphed: decode as graphs; None: on CUDA.
        num_single: so many prompts are timed one at a time as well; None: ``NUM_SINGLE`` on CUDA, else none.
        say: told the progress.
    """
    on_cuda = target.device.type == "cuda"
    graphed = on_cuda if graphed is None else graphed
    num_single = NUM_SINGLE * on_cuda if num_single is None else num_single
    ordered = sorted(prompts, key=lambda prompt: len(prompt.tokens))
    longest, block_size = len(ordered[-1].tokens), make_drafting(target).block_size

    def own(num_rows: int) -> BatchDecoder:
        return BatchDecoder(target, config.max_new_tokens, num_rows=num_rows, max_prompt=longest, graphed=graphed)

    def speculative(drafting: Drafting, num_rows: int) -> SpeculativeDecoder:
        return SpeculativeDecoder(
            target,
            drafting,
            config.max_new_tokens,
            num_rows=num_rows,
            max_prompt=longest,
            accept=accept,
            graphed=graphed,
        )

    drafter, lookup = Way("drafter"), Way("prompt lookup")
    with _exact_float32(), lanes(target, min(len(ordered), config.decode_batch)) as num_lanes:
        clocks = Clocks(target.device, ordered, config.decode_batch, num_lanes, num_single)
        say(f"evaluate: {len(ordered)} prompts, the target alone ...")
        references, alone_clock = clocks.time(own)
        for way, make in (
            (drafter, lambda num_rows: speculative(make_drafting(target), num_rows)),
            (lookup, lambda num_rows: speculative(LookupDrafting(block_size), num_rows)),
        ):
            say(f"evaluate: the same with {way.name} ...")
            found, way.clock = clocks.time(make)
            for (batch, reference), (_, done) in zip(references, found, strict=True):
                _record(way, batch, reference, done, config.dtype)
    alone = {
        prompt.line: answer
        for batch, reference in references
        for prompt, answer in zip(batch, reference.answers, strict=True)
    }
    return Evaluation(drafter, lookup, alone, alone_clock, config.min_acceptance, config.dtype)


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


def _clock_text(clock: Clock) -> str:
    single = f"{clock.single_seconds:>17.1f}s" if clock.num_single else ""
    return f"{clock.seconds:>11.1f}s{single}"


def _record(way: Way, batch: Sequence[Prompt], own: Decoded, done: Speculated, dtype: str) -> None:
    way.accepted = [a + b for a, b in zip(way.accepted or [0] * len(done.accepted), done.accepted, strict=True)]
    for row, prompt in enumerate(batch):
        way.results.append((prompt, done.answers[row], done.num_rounds[row]))
        index = first_difference(own.answers[row], done.answers[row])
        if index is not None:
            gap, top = float(own.gaps[row, index]), float(own.tops[row, index])
            way.divergences.append(Divergence(prompt.line, index, gap, is_tie(gap, top, dtype)))  # type: ignore[arg-type]


def _load_drafter(config: Config, device: torch.device) -> Drafter:
    return load_drafter(config, device, getattr(torch, config.dtype))


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
    text = json.dumps(record, indent=2) + "\n"
    replace_file(path, lambda temporary: temporary.write_text(text))
