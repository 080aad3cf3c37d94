"""A tree of drafts: several guesses for the same place, verified in one pass of the backbone.

Owns the value that a drafter may return instead of a list of tokens, and what it says about the rows of a pass
(SpecInfer, arXiv 2305.09781; Medusa, arXiv 2401.10774). It refuses a draft that stands before its parent. Its
surprising decision: once the backbone has chosen a branch, the rest of the tree is dropped, so that acceptance, counts
and roll-back see a path and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tree:
    """Drafts in the order of their rows: row 0 of a pass is the newest token, draft ``i`` is row ``i + 1``.

    Attributes:
        tokens: the drafts; siblings differ, the likelier first.
        parents: the row that each draft follows; a path has 0, 1, 2, ...

    Raises:
        ValueError: a draft without a parent in an earlier row.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check the parents."""
        early = all(0 <= parent <= row for row, parent in enumerate(self.parents))
        if not early or len(self.tokens) != len(self.parents):
            raise ValueError(f"{len(self.tokens)} drafts need a parent in an earlier row each, not {self.parents}")

    def __len__(self) -> int:
        """Number of drafts."""
        return len(self.tokens)

    def __iter__(self) -> Iterator[int]:
        """The drafts, in the order of their rows."""
        return iter(self.tokens)

    @property
    def is_path(self) -> bool:
        """Whether every draft follows the one before it."""
        return self.parents == tuple(range(len(self.parents)))

    def first(self, count: int) -> Tree:
        """The first ``count`` drafts, which are a tree too: a parent stands before its children."""
        return Tree(self.tokens[:count], self.parents[:count])

    def with_path(self, drafts: Sequence[int]) -> Tree:
        """This tree and, from its root on, the path ``drafts``, as far as it is not there yet."""
        tokens, parents, at = list(self.tokens), list(self.parents), 0
        for draft in drafts:
            known = [row for row, edge in enumerate(zip(tokens, parents, strict=True), start=1) if edge == (draft, at)]
            if not known:
                tokens.append(draft)
                parents.append(at)
            at = known[0] if known else len(tokens)
        return Tree(tuple(tokens), tuple(parents))

    def branch(self, best: Sequence[int]) -> list[int]:
        """Rows that are judged: the newest token, the drafts that ``best`` leads through, the first one it refuses.

        Args:
            best: the backbone's choice after each row.
        """
        rows = [0]
        while children := [row for row, parent in enumerate(self.parents, start=1) if parent == rows[-1]]:
            right = [row for row in children if self.tokens[row - 1] == best[rows[-1]]]
            rows.append((right or children)[0])
            if not right:
                break
        return rows


def lineages(parents: Sequence[int]) -> list[list[int]]:
    """For each row of a pass the rows that it follows, the newest token's first, its own last."""
    rows = [[0]]
    for row, parent in enumerate(parents, start=1):
        rows.append([*rows[parent], row])
    return rows
