"""Acceptance figures, counted from live rounds and nothing else.

Owns the arithmetic of tau (tokens emitted per backbone pass after prefill, bonus token included), of conditional
acceptance per depth, of the echo and loop rates, and of the first mismatch between two answers. Prefill and the token
it gives are never counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from components.decoding.loop import Round


@dataclass(frozen=True)
class Acceptance:
    """Counts over one or many answers.

    Attributes:
        passes: backbone passes after prefill.
        tokens: tokens emitted by those passes.
        reached: per depth, drafts whose every shallower draft was accepted and emitted.
        accepted: per depth, those of them that were accepted.
    """

    passes: int
    tokens: int
    reached: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """Tau; 0 when there was no pass."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def conditional(self) -> list[float]:
        """Accepted share at each depth, given all shallower ones were; 0 where no draft got so deep."""
        return [a / r if r else 0.0 for a, r in zip(self.accepted, self.reached, strict=True)]


def count_rounds(rounds: Iterable[Round], draft_length: int) -> Acceptance:
    """Count the rounds of one answer; the first round (prefill) is left out.

    A draft that was right but fell behind the end of the answer was never needed: its depth counts as not reached.
    """
    reached, accepted = [0] * draft_length, [0] * draft_length
    passes = tokens = 0
    for index, round_ in enumerate(rounds):
        if index == 0:
            continue
        passes += 1
        tokens += len(round_.emitted)
        # The answer ended on an accepted draft: what lay behind it was neither right nor wrong.
        ended_inside = round_.accepted == len(round_.emitted)
        tested = round_.accepted if ended_inside else min(round_.accepted + 1, len(round_.drafted))
        for depth in range(tested):
            reached[depth] += 1
            accepted[depth] += depth < round_.accepted
    return Acceptance(passes, tokens, tuple(reached), tuple(accepted))


def add_up(parts: Sequence[Acceptance], draft_length: int) -> Acceptance:
    """Sum of counts over answers."""
    return Acceptance(
        sum(part.passes for part in parts),
        sum(part.tokens for part in parts),
        tuple(sum(part.reached[depth] for part in parts) for depth in range(draft_length)),
        tuple(sum(part.accepted[depth] for part in parts) for depth in range(draft_length)),
    )


def bootstrap_interval(parts: Sequence[Acceptance], samples: int, seed: int) -> tuple[float, float]:
    """95 % percentile interval of tau, resampling whole prompts (Efron 1979)."""
    if not parts:
        return (0.0, 0.0)
    passes = np.array([part.passes for part in parts])
    tokens = np.array([part.tokens for part in parts])
    chosen = np.random.default_rng(seed).integers(0, len(parts), size=(samples, len(parts)))
    taus = tokens[chosen].sum(axis=1) / np.maximum(passes[chosen].sum(axis=1), 1)
    low, high = np.percentile(taus, [2.5, 97.5])
    return (float(low), float(high))


def first_mismatch(reference: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first differing token (or of the missing one), None when equal."""
    for index, (left, right) in enumerate(zip(reference, other, strict=False)):
        if left != right:
            return index
    return None if len(reference) == len(other) else min(len(reference), len(other))


def ngrams(tokens: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """All runs of ``size`` tokens."""
    return [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]


def echo_rate(prompt: Sequence[int], answer: Sequence[int], size: int = 4) -> float:
    """Share of the answer's ``size``-grams that occur in the prompt; 0 for an answer that is too short."""
    runs = ngrams(answer, size)
    known = set(ngrams(prompt, size))
    return sum(run in known for run in runs) / len(runs) if runs else 0.0


def is_looping(answer: Sequence[int], size: int = 4, repeats: int = 3) -> bool:
    """Whether some ``size``-gram occurs ``repeats`` times or more: greedy decoding has got stuck."""
    counts: dict[tuple[int, ...], int] = {}
    for run in ngrams(answer, size):
        counts[run] = counts.get(run, 0) + 1
    return max(counts.values(), default=0) >= repeats
