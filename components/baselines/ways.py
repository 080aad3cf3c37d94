"""Ways to draft that train nothing of their own: the head in five, Jacobi, prompt lookup.

Owns their names and how each is put together. It refuses to decide which is best. Its surprising decision: relaxed
acceptance is among them although it changes the text, because a table of exact ways cannot say what exactness costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from components.baselines.contest import Contender, InLoop
from components.core.config import Compare
from components.core.manifest import DraftPolicy, Policies
from components.decoding.branching import Shape, TreeDrafter
from components.decoding.drafting import PolicyDrafter
from components.decoding.jacobi import JacobiDrafter
from components.decoding.lookup import PromptLookup
from components.decoding.loop import GREEDY, Drafter, Rule
from components.decoding.relaxed import Relaxed
from components.modeling.calibration import HEAD, HYBRID
from components.modeling.head import MTPHead
from components.modeling.live import LiveEvaluator
from components.modeling.session import TorchHead

MTP, TREE, ADAPTIVE, MIXED, RELAXED = "mtp", "mtp_tree", "mtp_adaptive", "mtp_hybrid", "mtp_relaxed"
JACOBI, LOOKUP = "jacobi", "prompt_lookup"


class Ways:
    """Contenders that share one head and one session.

    Args:
        evaluator: decodes prompts; its session is what drafters look into.
        head: the project's own, already trained.
        compare: shape of the tree, Jacobi's runs, the relaxed margin.
        policies: what calibration chose.
        draft_length: K of fixed length.
    """

    def __init__(
        self, evaluator: LiveEvaluator, head: MTPHead, compare: Compare, policies: Policies, draft_length: int
    ) -> None:
        self.evaluator, self.compare, self.policies, self.draft_length = evaluator, compare, policies, draft_length
        self.head = TorchHead(head, evaluator.session)
        self.eos_ids: Sequence[int] = evaluator.session.backbone.card.eos_ids
        self.fixed = PolicyDrafter(
            self.head, DraftPolicy(longest=draft_length, stop_below=0.0, lookup_ngram=0), self.eos_ids
        )

    def with_head(self, known: dict[str, Any]) -> list[Contender]:
        """The head at fixed length first, then its other ways.

        Args:
            known: parameters, weights and copied rows, the same for all.
        """
        settings, fixed, length = self.compare, self.fixed, self.draft_length
        shape = Shape(**settings.tree.model_dump())
        tree = TreeDrafter(self.head, shape, self.eos_ids)
        margin = settings.relaxed_margin
        relaxed = f"the head; drafts stand up to {margin:g} logits below the best: changes the text"
        return [
            self._headed(MTP, "the head: reads the backbone's keys and values", fixed, length, **known, drafter=fixed),
            self._headed(TREE, "the head; a tree for each pass", tree, shape.longest, **known, drafter=tree),
            self._by_policy(ADAPTIVE, "the head; stops when unsure", HEAD, known),
            self._by_policy(MIXED, "the head; stops when unsure, copies what occurred before", HYBRID, known),
            self._headed(RELAXED, relaxed, fixed, length, Relaxed(margin), **known, exact=False),
        ]

    def without_head(self, ngram: int) -> list[Contender]:
        """What drafts for free.

        Args:
            ngram: of prompt lookup.
        """
        jacobi = JacobiDrafter(self.evaluator.session, self.compare.jacobi_ngram)
        about = "the backbone's own choices in earlier passes"
        return [
            self._free(JACOBI, about, jacobi, self.compare.jacobi_drafts),
            self._free(LOOKUP, "copies what followed the last words before", PromptLookup(ngram), self.draft_length),
        ]

    def _by_policy(self, name: str, about: str, mode: str, known: dict[str, Any]) -> Contender:
        policy = self.policies.modes[mode]
        return self._headed(name, about, PolicyDrafter(self.head, policy, self.eos_ids), policy.longest, **known)

    def _headed(
        self, name: str, about: str, drafts: Drafter, length: int, rule: Rule = GREEDY, **known: Any
    ) -> Contender:
        way = InLoop(self.evaluator, lambda _: drafts, rule, steps=lambda: self.head.steps)
        return Contender(name, about, way, length, **known)

    def _free(self, name: str, about: str, drafter: Drafter, length: int) -> Contender:
        way = InLoop(self.evaluator, lambda _: drafter, steps=lambda: 0)
        return Contender(name, about, way, length, drafter=drafter)
