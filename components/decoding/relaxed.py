"""Relaxed acceptance: drafts stand that are nearly, not exactly, what the backbone would write.

Owns the one decoding rule that changes the text. It refuses to be anybody's default: no bundle's policy can name it
and no stage imports it (a test holds that), so no gate ever judges a release by it. Its surprising decision: nearness
is measured in logits below the best one and not in probability, so one margin means the same odds in calm and in
doubtful places: a draft stands when it is at most exp(margin) times less likely than the best token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from components.decoding.loop import Settle


@dataclass(frozen=True)
class Relaxed:
    """Implements :class:`components.decoding.loop.Rule`.

    Attributes:
        margin: how far below the best logit a draft may lie.
    """

    margin: float

    def begin(self) -> Settle:
        """Nothing to remember."""
        return self._settle

    def _settle(self, drafts: Sequence[int], best: Sequence[int], logits: ArrayLike) -> list[int]:
        rows = np.asarray(logits)
        stands = 0
        while stands < len(drafts) and rows[stands, drafts[stands]] >= rows[stands, best[stands]] - self.margin:
            stands += 1
        return [*drafts[:stands], best[stands]]
