"""Tree drafting: the likeliest few continuations of the head, and what the text repeats, all for one pass.

Owns which drafts make up the tree. Nodes are chosen by the probability of their whole chain, as in EAGLE-2 (arXiv
2406.16858). It refuses nothing: any tree gives the same text. Its surprising decision: the head runs once per level
and not once per node. A child is never likelier than its parent, so a node that is not among the best so far never
will be, and expanding the others level by level ends in the very tree that best-first search would find.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from components.decoding.lookup import PromptLookup, until_end
from components.decoding.tree import Tree


class TreeHead(Protocol):
    """A head that drafts behind several nodes at once; a state is whatever it wants to be given back."""

    @property
    def first_state(self) -> Any:
        """The state that goes with the newest token, which the backbone has not processed yet."""

    def expand(
        self, tokens: Sequence[int], states: Sequence[Any], count: int
    ) -> list[tuple[Any, list[tuple[int, float]]]]:
        """For each node, from its token and its parent's state: its own state, and its likeliest drafts, best first."""


@dataclass(frozen=True)
class Shape:
    """Bounds of a tree.

    Attributes:
        nodes: drafts at most; a pass has one row more.
        depth: drafts in a chain at most, and runs of the head in a round.
        branches: drafts behind one node at most.
        least: chains that are less likely than this are left out; 0 always fills the tree.
        copied: drafts of prompt lookup that may come on top, as one more branch.
        lookup_ngram: last tokens that must have occurred before for that.
    """

    nodes: int
    depth: int
    branches: int
    least: float = 0.0
    copied: int = 0
    lookup_ngram: int = 2

    @property
    def longest(self) -> int:
        """Drafts in one chain at most."""
        return max(self.depth, self.copied)


@dataclass(frozen=True, eq=False)
class Node:
    """A draft, the probability of its chain, and the state to go on from."""

    token: int
    joint: float
    state: Any
    parent: Node | None = None


class TreeDrafter:
    """Implements :class:`components.decoding.loop.Drafter` with a head.

    Args:
        head: drafts behind nodes.
        shape: how large a tree may be.
        eos_ids: nothing is drafted behind any of these.
    """

    def __init__(self, head: TreeHead, shape: Shape, eos_ids: Sequence[int]) -> None:
        self.head, self.shape, self.eos_ids = head, shape, frozenset(eos_ids)
        self.lookup = PromptLookup(shape.lookup_ngram, shortest_ngram=shape.lookup_ngram)

    def propose(self, tokens: Sequence[int], limit: int) -> Tree:
        """A tree after ``tokens`` with at most ``limit`` drafts in a chain."""
        copied = self.lookup.propose(tokens, min(limit, self.shape.copied)) if self.shape.copied else []
        return self._grow(tokens, min(limit, self.shape.depth)).with_path(until_end(copied, self.eos_ids))

    def _grow(self, tokens: Sequence[int], depth: int) -> Tree:
        root, nodes = Node(tokens[-1], 1.0, self.head.first_state), list[Node]()
        level = [root]
        for _ in range(depth):
            grown = self._children(level)
            # A stable order: where a chain is certain, parent and child are equally likely, and the parent is first.
            nodes = sorted([*nodes, *grown], key=lambda node: node.joint, reverse=True)[: self.shape.nodes]
            level = [node for node in nodes if node in grown and node.token not in self.eos_ids]
            if not level:
                break
        rows = {node: row for row, node in enumerate([root, *nodes])}
        return Tree(tuple(node.token for node in nodes), tuple(rows[node.parent] for node in nodes if node.parent))

    def _children(self, level: Sequence[Node]) -> list[Node]:
        grown = self.head.expand([node.token for node in level], [node.state for node in level], self.shape.branches)
        return [
            Node(token, node.joint * probability, state, node)
            for node, (state, drafts) in zip(level, grown, strict=True)
            for token, probability in drafts
            if node.joint * probability >= self.shape.least
        ]
