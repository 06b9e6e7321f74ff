"""The order of a run's rounds: training steps, and in between measurements on the validation documents.

A round is one batch for each drafter of all processes. Reader and drafters both walk through the same schedule, so what
a batch is for need not travel with it.

Guarantees:
- The schedule is decided by the configuration and the data alone; a resumed run goes on with the same training rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Round:
    """One batch for each drafter.

    Attributes:
        validation: it is measured and not trained on.
        number: of the training step, or place within the validation; both from 0.
        last: of a validation.
    """

    validation: bool
    number: int
    last: bool = False


@dataclass(frozen=True)
class Schedule:
    """All rounds of a run.

    Attributes:
        num_steps: training steps of the whole run.
        first_step: how many of them are done already.
        num_validation_rounds: of each measurement; 0: nothing is measured.
        save_every: steps between two checkpoints, each with a measurement; None: at the end only.
    """

    num_steps: int
    first_step: int = 0
    num_validation_rounds: int = 0
    save_every: int | None = None

    def is_due(self, num_steps: int) -> bool:
        """Whether a checkpoint is written after so many steps."""
        return num_steps == self.num_steps or (self.save_every is not None and num_steps % self.save_every == 0)

    def measures_after(self, num_steps: int) -> bool:
        """Whether a measurement belongs to the checkpoint after so many steps."""
        return self.num_validation_rounds > 0 and self.is_due(num_steps)

    def rounds(self) -> Iterator[Round]:
        """The rounds that are left, in order. The first are a measurement, so that a curve begins at the start."""
        yield from self._validation()
        for number in range(self.first_step, self.num_steps):
            yield Round(validation=False, number=number)
            if self.is_due(number + 1):
                yield from self._validation()

    def _validation(self) -> Iterator[Round]:
        count = self.num_validation_rounds
        return (Round(validation=True, number=number, last=number == count - 1) for number in range(count))
