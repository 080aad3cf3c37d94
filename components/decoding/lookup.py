"""Prompt lookup: the model-free drafter every head is measured against (Saxena 2023, prompt-lookup-decoding)."""

from __future__ import annotations

from collections.abc import Collection, Sequence


class PromptLookup:
    """Propose what followed the most recent earlier occurrence of the last words that has enough behind it.

    In a loop the most recent occurrence has only one period behind it; an earlier one fills the whole proposal.

    Args:
        longest_ngram: tokens of context matched at first; shorter runs are tried next.
        shortest_ngram: the shortest run tried.
    """

    def __init__(self, longest_ngram: int, shortest_ngram: int = 1) -> None:
        self.longest_ngram, self.shortest_ngram = longest_ngram, shortest_ngram

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Up to ``limit`` tokens, or none when the context never occurred before."""
        context = list(tokens)
        for size in range(min(self.longest_ngram, len(context) - 1), self.shortest_ngram - 1, -1):
            wanted = context[-size:]
            longest: list[int] = []
            for start in range(len(context) - size - 1, -1, -1):
                if context[start : start + size] == wanted:
                    found = context[start + size : start + size + limit]
                    longest = max(longest, found, key=len)
                    if len(found) == limit:
                        break
            if longest:
                return longest
        return []


def until_end(drafts: Sequence[int], eos_ids: Collection[int]) -> list[int]:
    """``drafts`` up to the first end of sequence, that one included."""
    ends = [at + 1 for at, token in enumerate(drafts) if token in eos_ids]
    return list(drafts[: ends[0]] if ends else drafts)
