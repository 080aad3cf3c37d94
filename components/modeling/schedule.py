"""When training goes fast, when it stops, and which epoch is kept: pure functions of steps and figures.

Its surprising decision: the learning rate follows the planned number of steps even when the run will stop early, so two
runs that differ in patience alone are the same run up to the earlier one's end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def learning_rate_factor(step: int, total: int, warmup: int) -> float:
    """Linear warm-up, then half a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    share = (step - warmup) / max(1, total - warmup)
    return 0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * min(1.0, share)))


def best_epoch(acceptance: Sequence[float]) -> int:
    """Number, from 1, of the epoch with the highest figure; of equal ones the later, which has seen more."""
    return max(range(1, len(acceptance) + 1), key=lambda epoch: (acceptance[epoch - 1], epoch))


def out_of_patience(acceptance: Sequence[float], patience: int) -> bool:
    """Whether none of the last ``patience`` epochs was better than the best one before them."""
    return len(acceptance) > patience and max(acceptance[-patience:]) <= max(acceptance[:-patience])
