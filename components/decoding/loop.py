"""The draft-verify loop, and the plain greedy loop it must equal.

Owns the decode contract: rounds, acceptance, roll-back; torch and onnxruntime only supply forward passes through
`Backbone`. Speculative decoding with greedy verification: Stern et al. 2018 (arXiv 1811.03115), Leviathan et al. 2023
(arXiv 2211.17192). Its surprising decision: a drafter is anything with `propose`, so prompt lookup and the head run in
the very same loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from components.decoding.stopping import Answer


class Backbone(Protocol):
    """Forward passes of a frozen model over one sequence with one KV cache.

    After a pass over ``q`` tokens the cache holds ``q`` tentative rows; ``keep(n)`` makes the first ``n`` of them
    valid and drops the rest. ``length`` counts valid rows.
    """

    @property
    def length(self) -> int:
        """Valid rows in the cache."""

    @property
    def max_length(self) -> int:
        """Rows that the cache can hold."""

    def prefill(self, tokens: Sequence[int]) -> int:
        """Forget everything, process a prompt, keep all its rows; return the argmax after its last token."""

    def verify(self, tokens: Sequence[int]) -> list[int]:
        """Process ``tokens`` after the valid rows; return the argmax after each of them."""

    def keep(self, rows: int) -> None:
        """Make the first ``rows`` rows of the last pass valid and forget the others."""


class Drafter(Protocol):
    """Something that guesses the next tokens."""

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Guess up to ``limit`` tokens that follow ``tokens`` (prompt and answer so far)."""


@dataclass(frozen=True)
class Round:
    """One backbone pass and what came of it.

    Attributes:
        emitted: tokens added to the answer by this pass; the first round (prefill) emits one.
        drafted: tokens proposed before the pass.
        accepted: drafts that were right *and* emitted.
    """

    emitted: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: int


def longest_match(drafts: Sequence[int], truth: Sequence[int]) -> int:
    """Length of the common prefix of the drafts and the backbone's own choices."""
    matched = 0
    while matched < len(drafts) and drafts[matched] == truth[matched]:
        matched += 1
    return matched


def decode_greedy(backbone: Backbone, prompt: Sequence[int], answer: Answer) -> Iterator[Round]:
    """Plain one-token-at-a-time greedy decoding: the reference every other mode must equal."""
    token = backbone.prefill(prompt)
    answer.append(token)
    yield Round((token,), (), 0)
    while not answer.done:
        (token,) = backbone.verify([token])
        backbone.keep(1)
        answer.append(token)
        yield Round((token,), (), 0)


def decode_with_drafts(
    backbone: Backbone, drafter: Drafter, prompt: Sequence[int], answer: Answer, draft_length: int
) -> Iterator[Round]:
    """Greedy decoding with drafts; emits the same tokens as :func:`decode_greedy`.

    Drafts are cut to the token budget (one place is the bonus token's) and to the rows left in the cache, so neither
    limit is ever passed inside a round.
    """
    context = list(prompt)
    token = backbone.prefill(prompt)
    answer.append(token)
    context.append(token)
    yield Round((token,), (), 0)
    while not answer.done:
        limit = min(draft_length, answer.remaining - 1, backbone.max_length - backbone.length - 1)
        drafts = drafter.propose(context, limit) if limit > 0 else []
        truth = backbone.verify([context[-1], *drafts])
        accepted = longest_match(drafts, truth)
        backbone.keep(1 + accepted)
        emitted = _append_until_done(answer, truth[: accepted + 1])
        context.extend(emitted)
        yield Round(tuple(emitted), tuple(drafts), min(accepted, len(emitted)))


def _append_until_done(answer: Answer, tokens: Sequence[int]) -> list[int]:
    emitted = []
    for token in tokens:
        emitted.append(token)
        if answer.append(token):
            break
    return emitted
