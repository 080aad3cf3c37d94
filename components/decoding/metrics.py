"""Acceptance figures, counted from live rounds and nothing else.

Owns the arithmetic of tau (tokens emitted per backbone pass after prefill, bonus token included), of conditional
acceptance per depth, of the echo and loop rates, and of the first mismatch between two answers. Prefill and the token
it gives are never counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from components.decoding.loop import Round


@dataclass(frozen=True)
class Acceptance:
    """Counts over one or many answers.

    Attributes:
        passes: backbone passes after prefill.
        tokens: tokens emitted by those passes.
        reached: per depth, drafts whose every shallower draft was accepted and emitted.
        accepted: per depth, those of them that were accepted.
        drafted: drafts proposed, whatever became of them.
    """

    passes: int
    tokens: int
    reached: tuple[int, ...]
    accepted: tuple[int, ...]
    drafted: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tau; 0 when there was no pass."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def conditional(self) -> list[float]:
        """Accepted share at each depth, given all shallower ones were; 0 where no draft got so deep."""
        return [a / r if r else 0.0 for a, r in zip(self.accepted, self.reached, strict=True)]


def count_rounds(rounds: Sequence[Round], depths: int = 0) -> Acceptance:
    """Count the rounds of one answer; the first round (prefill) is left out.

    A draft that was right but fell behind the end of the answer was never needed: its depth counts as not reached.

    Args:
        rounds: as they happened.
        depths: report at least so many depths; the longest draft decides when it is longer.
    """
    depths = max([depths, *(len(round_.drafted) for round_ in rounds)])
    reached, accepted = [0] * depths, [0] * depths
    for round_ in rounds[1:]:
        # The answer ended on an accepted draft: what lay behind it was neither right nor wrong.
        ended_inside = round_.accepted == len(round_.emitted)
        tested = round_.accepted if ended_inside else min(round_.accepted + 1, len(round_.drafted))
        for depth in range(tested):
            reached[depth] += 1
            accepted[depth] += depth < round_.accepted
    return Acceptance(
        max(len(rounds) - 1, 0),
        sum(len(round_.emitted) for round_ in rounds[1:]),
        tuple(reached),
        tuple(accepted),
        sum(len(round_.drafted) + round_.aside for round_ in rounds[1:]),
    )


def add_up(parts: Sequence[Acceptance], depths: int = 0) -> Acceptance:
    """Sum of counts over answers; as many depths as the deepest part has, at least ``depths``."""
    nothing = (0,) * depths
    return Acceptance(
        sum(part.passes for part in parts),
        sum(part.tokens for part in parts),
        tuple(map(sum, zip_longest(nothing, *(part.reached for part in parts), fillvalue=0))),
        tuple(map(sum, zip_longest(nothing, *(part.accepted for part in parts), fillvalue=0))),
        sum(part.drafted for part in parts),
    )


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
