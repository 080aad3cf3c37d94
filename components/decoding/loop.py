"""The draft-verify loop: one for every way to decode, with drafts and without.

Owns the decode contract: rounds, acceptance, roll-back; torch and onnxruntime only supply forward passes through
`Backbone`. Speculative decoding with greedy verification: Stern et al. 2018 (arXiv 1811.03115), Leviathan et al. 2023
(arXiv 2211.17192). It refuses to know how tokens are chosen: that is a `Rule`, greedy unless another is given. Its
surprising decision: a drafter is anything with `propose`, so prompt lookup, the head and no drafter at all run in the
very same loop; a tree of drafts is narrowed to one of its paths before anything is accepted, so trees do too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from numpy.typing import ArrayLike

from components.core.errors import UserError
from components.decoding.stopping import Answer
from components.decoding.tree import Tree


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

    @property
    def last_logits(self) -> ArrayLike:
        """Logits of the last pass, [q, vocab_size]; one row after prefill. The next pass may overwrite them."""

    def prefill(self, tokens: Sequence[int]) -> int:
        """Forget everything, process a prompt, keep all its rows; return the argmax after its last token."""

    def rewind(self, tokens: Sequence[int]) -> int:
        """As ``prefill`` of the very prompt that was prefilled last: its rows are still there, nothing is computed."""

    def verify(self, tokens: Sequence[int]) -> list[int]:
        """Process ``tokens`` after the valid rows; return the argmax after each of them."""

    def keep(self, rows: int) -> None:
        """Make the first ``rows`` rows of the last pass valid and forget the others."""


@runtime_checkable
class TreeBackbone(Backbone, Protocol):
    """A backbone that can also verify trees; not every runtime has the mask for it."""

    def verify_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """As ``verify``, but ``tokens[i + 1]`` follows the row ``parents[i]`` of the pass and sees its lineage only."""

    def narrow(self, rows: Sequence[int]) -> None:
        """Leave only these rows of the last pass, in this order, as if no other had been given."""


class Drafter(Protocol):
    """Something that guesses the next tokens."""

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int] | Tree:
        """Guess what follows ``tokens`` (prompt and answer so far): a path or a tree; a chain has ``limit`` at most."""


@dataclass(frozen=True)
class Round:
    """One backbone pass and what came of it.

    Attributes:
        emitted: tokens added to the answer by this pass; the first round (prefill) emits one.
        drafted: tokens proposed before the pass; of a tree the branch that was judged.
        accepted: drafts that the rule let stand *and* that were emitted.
        departed: those of them that were not the backbone's argmax; none under the greedy rule.
        aside: drafts on the other branches of a tree, which cost a row each.
    """

    emitted: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: int
    departed: int = 0
    aside: int = 0


# From the drafts of a pass, the argmax after each of its tokens and the logits they come from, to the tokens that the
# pass adds: the drafts that stand, then exactly one of the rule's own.
Settle = Callable[[Sequence[int], Sequence[int], ArrayLike], list[int]]


class Rule(Protocol):
    """How tokens are chosen; describes, and holds no state of an answer."""

    def begin(self) -> Settle:
        """Start an answer."""


def longest_match(drafts: Sequence[int], truth: Sequence[int]) -> int:
    """Length of the common prefix of the drafts and the backbone's own choices."""
    matched = 0
    while matched < len(drafts) and drafts[matched] == truth[matched]:
        matched += 1
    return matched


def settle_greedily(drafts: Sequence[int], best: Sequence[int], logits: ArrayLike) -> list[int]:
    """Drafts stand as far as they equal the argmax."""
    return list(best[: longest_match(drafts, best) + 1])


class Greedy:
    """Always the argmax; the one rule for trees."""

    def begin(self) -> Settle:
        """Nothing to remember."""
        return settle_greedily


GREEDY = Greedy()


def decode_greedy(backbone: Backbone, prompt: Sequence[int], answer: Answer) -> Iterator[Round]:
    """Plain one-token-at-a-time greedy decoding: the reference every other exact mode must equal."""
    return decode_with_drafts(backbone, None, prompt, answer, 0)


def decode_with_drafts(
    backbone: Backbone,
    drafter: Drafter | None,
    prompt: Sequence[int],
    answer: Answer,
    draft_length: int,
    rule: Rule = GREEDY,
    rewind: bool = False,
) -> Iterator[Round]:
    """Decode with drafts; under the greedy rule it emits the same tokens as :func:`decode_greedy`.

    Chains of drafts are cut to the token budget (one place is the bonus token's), all drafts to the rows left in the
    cache, so neither limit is ever passed inside a round. Without a drafter a pass adds one token. ``rewind`` goes
    back to the end of the prompt that the backbone processed last, which must be this one, instead of processing it
    again.

    Raises:
        UserError: a tree of drafts, which this backbone cannot verify.
        ValueError: a tree of drafts under another rule than the greedy one.
    """
    context, settle = list(prompt), rule.begin()
    best = [backbone.rewind(prompt) if rewind else backbone.prefill(prompt)]
    (token,) = settle([], best, backbone.last_logits)
    answer.append(token)
    context.append(token)
    yield Round((token,), (), 0)
    while not answer.done:
        room = backbone.max_length - backbone.length - 1
        limit = min(draft_length, answer.remaining - 1, room)
        drafts = drafter.propose(context, limit) if drafter is not None and limit > 0 else []
        drafts = drafts.first(room) if isinstance(drafts, Tree) else drafts
        judged, best = _verify(backbone, context[-1], drafts, settle)
        run = settle(judged, best, backbone.last_logits)
        backbone.keep(len(run))
        emitted = _append_until_done(answer, run)
        context.extend(emitted)
        accepted = min(len(run) - 1, len(emitted))
        departed = sum(token != choice for token, choice in zip(emitted[:accepted], best, strict=False))
        yield Round(tuple(emitted), tuple(judged), accepted, departed, len(drafts) - len(judged))


def _verify(
    backbone: Backbone, newest: int, drafts: Sequence[int] | Tree, settle: Settle
) -> tuple[list[int], list[int]]:
    """One pass: the drafts that can be judged, and the argmax after the newest token and after each of them."""
    if not isinstance(drafts, Tree) or drafts.is_path:
        return list(drafts), backbone.verify([newest, *drafts])
    if settle is not settle_greedily:
        raise ValueError("only greedy decoding takes a tree of drafts: sampling and relaxed acceptance need a path")
    if not isinstance(backbone, TreeBackbone):
        raise UserError(
            f"{type(backbone).__name__} cannot verify a tree of drafts", f"{len(drafts)} drafts", "draft a path"
        )
    best = backbone.verify_tree([newest, *drafts], drafts.parents)
    rows = drafts.branch(best)
    backbone.narrow(rows)
    return [drafts.tokens[row - 1] for row in rows[1:]], [best[row] for row in rows]


def _append_until_done(answer: Answer, tokens: Sequence[int]) -> list[int]:
    emitted = []
    for token in tokens:
        emitted.append(token)
        if answer.append(token):
            break
    return emitted
