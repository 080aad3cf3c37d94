"""Jacobi drafting: the backbone's own choices behind a wrong draft are the next guesses. Nothing is trained.

Owns the guesses (Jacobi decoding, Santilli et al. 2023, arXiv 2305.10427) and a pool of n-grams from the passes of an
answer (in the manner of lookahead decoding, Fu et al. 2024, arXiv 2402.02057; here one path, not a window of them). It
refuses to look at the prompt: what it drafts, a pass has chosen before. Its surprising decision: it asks the backbone
for the logits of its last pass, which lie there anyway, so neither the loop nor a runtime knows of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from components.decoding.loop import Backbone


class JacobiDrafter:
    """Implements :class:`components.decoding.loop.Drafter`.

    Args:
        backbone: the one that verifies.
        ngram: tokens of the longest run kept in the pool; what follows all but its last token is drafted.
    """

    def __init__(self, backbone: Backbone, ngram: int) -> None:
        self.backbone, self.ngram = backbone, ngram
        self._known: list[int] = []  # the context of the last proposal, and what was proposed
        self._drafts: list[int] = []
        self._pool: dict[tuple[int, ...], int] = {}

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """``limit`` drafts: what the pool knows, else the guess for that place, else the newest token again."""
        context, drafts = list(tokens), list[int]()
        guesses = self._learn(context)
        while len(drafts) < limit:
            guess = guesses[len(drafts)] if len(drafts) < len(guesses) else context[-1]
            drafts.append(self._follower([*context[-self.ngram :], *drafts], guess))
        self._known, self._drafts = context, drafts
        return drafts

    def _learn(self, context: list[int]) -> list[int]:
        """Put the last pass into the pool; its choices behind the new context. A new answer forgets everything."""
        best = [int(token) for token in np.asarray(self.backbone.last_logits).argmax(axis=-1)]
        added = len(context) - len(self._known)
        goes_on = 0 < added <= len(best) == len(self._drafts) + 1 and context[: len(self._known)] == self._known
        if not goes_on:
            self._pool = {}
            return []
        given = [*self._known[-self.ngram :], *self._drafts]
        for row, choice in enumerate(reversed(best)):
            upto = given[: len(given) - row]
            for size in range(1, self.ngram):
                self._pool[tuple(upto[-size:])] = choice
        return best[added:]

    def _follower(self, context: list[int], otherwise: int) -> int:
        found = (self._pool.get(tuple(context[-size:])) for size in range(self.ngram - 1, 0, -1))
        return next((token for token in found if token is not None), otherwise)
