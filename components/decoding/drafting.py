"""How far to draft: the head step by step while it is sure enough, prompt lookup where the text repeats itself.

Owns the policy of a round. It refuses nothing: any policy gives the same text, only at another cost. Its surprising
decision: lookup is asked again after every draft of the head, so one rule (the last words occurred before) covers both
"copy at once" and "let the head start and the prompt finish".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from components.core.manifest import DraftPolicy
from components.decoding.lookup import PromptLookup, until_end


class StepDrafter(Protocol):
    """A head that drafts one token at a time from the backbone's state."""

    def drafts(self, token: int) -> Iterator[tuple[int, float]]:
        """A round behind ``token``, as long as it is iterated: each draft and its probability in the draft vocabulary.

        The backbone has processed everything before ``token``, and ``token`` not yet.
        """


class PolicyDrafter:
    """Implements :class:`components.decoding.loop.Drafter` with a head under a policy.

    Stopping a round early by the drafter's own confidence follows the dynamic draft lengths of EAGLE-2
    (arXiv 2406.16858); here the whole chain's probability decides.

    Args:
        head: drafts step by step.
        policy: when to stop, and when to copy.
        eos_ids: nothing is drafted behind any of these.
    """

    def __init__(self, head: StepDrafter, policy: DraftPolicy, eos_ids: Sequence[int]) -> None:
        self.head, self.policy, self.eos_ids = head, policy, frozenset(eos_ids)
        self.lookup = PromptLookup(policy.lookup_ngram, shortest_ngram=policy.lookup_ngram)

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """At most ``limit`` drafts after ``tokens``."""
        policy, context, joint = self.policy, list(tokens), 1.0
        started, steps = len(context), self.head.drafts(context[-1])
        while len(context) - started < limit and joint >= policy.stop_below:
            copied = self._copied(context, started + limit - len(context))
            if copied:
                return [*context[started:], *copied]
            token, probability = next(steps)
            context.append(token)
            joint *= probability
            if token in self.eos_ids:
                break
        return context[started:]

    def _copied(self, context: Sequence[int], limit: int) -> list[int]:
        copied = self.lookup.propose(context, limit) if self.policy.lookup_ngram else []
        return until_end(copied, self.eos_ids)
