from __future__ import annotations

import itertools
import math

import pytest

from examples.dflash.config import Config, InputError
from examples.dflash.step import lr_share


def shares(num_steps=100, **kwargs):
    return [lr_share(step, num_steps, **{"warmup_ratio": 0.04, **kwargs}) for step in range(num_steps + 1)]


def test_cosine_rises_then_falls_to_zero():
    found = shares(schedule="cosine")
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[4] == 1.0
    assert found[52] == pytest.approx(0.5)
    assert found[100] == pytest.approx(0.0, abs=1e-12)
    assert found[4:] == sorted(found[4:], reverse=True)


def test_wsd_rises_stays_and_falls_as_one_minus_the_square_root():
    found = shares(schedule="wsd", cooldown_ratio=0.25)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[4:76] == [1.0] * 72
    for step in range(75, 101):
        assert found[step] == pytest.approx(1 - math.sqrt((step - 75) / 25))
    assert found[100] == 0.0
    assert found[99] > 0


@pytest.mark.parametrize(("num_steps", "warmup_ratio", "cooldown_ratio"), [(1, 0.0, 1.0), (1, 0.5, 0.5), (7, 0.3, 0.7)])
def test_wsd_ends_at_zero_and_never_jumps_over_the_peak_in_short_runs(num_steps, warmup_ratio, cooldown_ratio):
    found = shares(num_steps, warmup_ratio=warmup_ratio, schedule="wsd", cooldown_ratio=cooldown_ratio)
    assert all(0 <= share <= 1 for share in found)
    assert found[0] > 0
    peak = found.index(max(found))
    assert all(a <= b for a, b in itertools.pairwise(found[: peak + 1]))
    assert all(a >= b for a, b in itertools.pairwise(found[peak:]))


def test_wsd_that_leaves_the_cooldown_no_room_is_refused():
    with pytest.raises(InputError, match=r"--cooldown-ratio is 0\.7.*--warmup-ratio 0\.4"):
        Config(schedule="wsd", warmup_ratio=0.4, cooldown_ratio=0.7)
    Config(schedule="cosine", warmup_ratio=0.4, cooldown_ratio=0.7)


def test_a_window_of_no_layer_is_refused():
    with pytest.raises(InputError, match=r"--num-full-layers is 5.*no layer"):
        Config(num_layers=5, num_full_layers=5, sliding_window=64)
    Config(num_layers=5, num_full_layers=4, sliding_window=64)
