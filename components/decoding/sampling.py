"""Sampling by temperature and top-p, with drafts and without, from exactly the same distribution.

Owns the processed distribution of a row of logits and what becomes of drafts under it: speculative sampling (Leviathan
et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318). It promises the same *distribution* as sampling
without drafts, not the same text: the two use up the random numbers differently. Its surprising decision: every
drafter here proposes one token and no distribution, so a draft d stands with probability p(d), and the token drawn in
place of a rejected one comes from p without d. That is exact for any drafter that cannot see the random numbers; to
draw from the whole of p again would give the draft a second chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from components.decoding.loop import GREEDY, Settle

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Sampling:
    """Implements :class:`components.decoding.loop.Rule`; each answer begins with a fresh generator.

    Attributes:
        temperature: logits are divided by it; 0 is greedy decoding.
        top_p: then only the smallest set of likeliest tokens that holds this probability is kept; 1 keeps all.
        seed: with the same bundle, mode and prompt, the same text again.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def begin(self) -> Settle:
        """One random generator for one answer."""
        if self.temperature == 0:
            return GREEDY.begin()
        generator = np.random.default_rng(self.seed)

        def settle(drafts: Sequence[int], best: Sequence[int], logits: ArrayLike) -> list[int]:
            return self._draw_run(drafts, np.asarray(logits), generator)

        return settle

    def distribution(self, logits: NDArray[Any]) -> Array:
        """Probabilities from one row of logits, [vocab_size]: temperature, then top-p."""
        scaled = (logits.astype(np.float64) - logits.max()) / self.temperature
        probabilities = np.exp(scaled)
        return nucleus(probabilities / probabilities.sum(), self.top_p)

    def _draw_run(self, drafts: Sequence[int], logits: NDArray[Any], generator: np.random.Generator) -> list[int]:
        """The drafts that stand, then one drawn token."""
        run: list[int] = []
        for draft, row in zip(drafts, logits, strict=False):
            probabilities = self.distribution(row)
            if generator.random() >= probabilities[draft]:
                return [*run, draw(without(probabilities, draft), generator)]
            run.append(draft)
        return [*run, draw(self.distribution(logits[len(drafts)]), generator)]


def nucleus(probabilities: Array, top_p: float) -> Array:
    """The smallest set of likeliest tokens that holds ``top_p``, the rest zero, normalised; lower ids win ties."""
    if top_p >= 1:  # the sum of them all may round to less than 1
        return probabilities
    # Tokens this unlikely hold less than 1 - top_p together, so none is in the set: nearly nothing is left to sort.
    (ids,) = np.nonzero(probabilities >= (1 - top_p) / len(probabilities))
    ids = ids[np.argsort(-probabilities[ids], kind="stable")]
    kept = ids[: np.searchsorted(np.cumsum(probabilities[ids]), top_p) + 1]
    cut = np.zeros_like(probabilities)
    cut[kept] = probabilities[kept] / probabilities[kept].sum()
    return cut


def without(probabilities: Array, token: int) -> Array:
    """What is left of a distribution when ``token`` is ruled out; ``token`` must not be certain."""
    left = probabilities.copy()
    left[token] = 0.0
    left /= left.sum()
    return left


def draw(probabilities: Array, generator: np.random.Generator) -> int:
    """One token."""
    return int(generator.choice(len(probabilities), p=probabilities))
