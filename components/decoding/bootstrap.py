"""Intervals by bootstrap over prompts (Efron 1979).

Owns the resampling that every interval in the evidence comes from. It refuses an interval where there is nothing to
resample: None, never 0 to 0. Its surprising decision: it draws how often each prompt occurs and multiplies that with
the columns, so any figure made of sums over prompts needs one small function and a thousand samples take milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
PERCENTILES = (2.5, 97.5)


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are drawn; the same for every figure of a file.

    Attributes:
        samples: resampled sets of prompts.
        seed: makes intervals reproducible.
    """

    samples: int = 1000
    seed: int = 3

    def interval(self, statistic: Callable[..., Array], *columns: Sequence[float]) -> list[float] | None:
        """95 % percentile interval, low then high.

        Args:
            statistic: from resampled sums of each column, all samples at once, to the figure; NaN where there is none.
            columns: one number per prompt each.
        """
        table = np.array(columns, dtype=np.float64).T
        prompts = len(table)
        if not prompts:
            return None
        generator = np.random.default_rng(self.seed)
        draws = generator.multinomial(prompts, np.full(prompts, 1 / prompts), size=self.samples)
        values = statistic(*(draws @ table).T)
        values = values[np.isfinite(values)]
        return [float(bound) for bound in np.percentile(values, PERCENTILES)] if len(values) else None


def ratio(numerators: Array, denominators: Array) -> Array:
    """Quotients, NaN over zero."""
    quotients = np.full(np.shape(numerators), np.nan)
    np.divide(numerators, denominators, out=quotients, where=np.asarray(denominators) > 0)
    return quotients
