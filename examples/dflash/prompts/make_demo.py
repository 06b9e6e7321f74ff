"""Writes demo.jsonl beside it: 200 different word problems of one kind. ``python -m examples.dflash.prompts.make_demo``

One kind, so that a target of 135M parameters answers in a regular style, and a drafter can learn it within minutes.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

MAKERS = {
    "baker": "cakes",
    "tailor": "shirts",
    "potter": "bowls",
    "florist": "bouquets",
    "painter": "signs",
    "carpenter": "chairs",
    "weaver": "baskets",
    "printer": "posters",
    "blacksmith": "nails",
    "glazier": "windows",
    "toymaker": "dolls",
    "candle maker": "candles",
    "shoemaker": "boots",
    "jeweler": "rings",
    "confectioner": "truffles",
    "bookbinder": "notebooks",
}
PERIODS = ("hour", "day", "week", "month")


def prompts(count: int = 200, seed: int = 0) -> list[str]:
    """``count`` different questions, in an order drawn from ``seed``."""
    rng = random.Random(seed)
    questions: dict[str, None] = {}
    while len(questions) < count:
        maker, goods = rng.choice(list(MAKERS.items()))
        period, rate, length = rng.choice(PERIODS), rng.randint(5, 60), rng.randint(2, 9)
        given = f"A {maker} makes {rate} {goods} each {period}."
        questions[f"{given} How many {goods} does the {maker} make in {length} {period}s?"] = None
    return list(questions)


def main() -> None:
    lines = (json.dumps({"messages": [{"role": "user", "content": prompt}]}) for prompt in prompts())
    (Path(__file__).parent / "demo.jsonl").write_text("".join(line + "\n" for line in lines))


if __name__ == "__main__":
    main()
