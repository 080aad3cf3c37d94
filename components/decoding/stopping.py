"""When an answer ends: end-of-sequence ids, stop texts and the token budget.

Owns the answer to "is this the last token?" for one token at a time, so that plain greedy decoding and every run of
accepted drafts ask the same question at the same place. Its surprising decision: the token that completes a stop text
belongs to the token sequence (it cost a step) but not to the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class StopRule:
    """What ends an answer.

    Args:
        eos_ids: any of these ids ends it.
        stop_texts: any of these in the decoded answer ends it.
        max_new_tokens: emitted tokens at most.
    """

    eos_ids: frozenset[int]
    stop_texts: tuple[str, ...]
    max_new_tokens: int


@dataclass
class Answer:
    """An answer being written, one token at a time.

    Args:
        rule: when to stop.
        decode: token ids to text; special tokens skipped.
    """

    rule: StopRule
    decode: Decode
    tokens: list[int] = field(default_factory=list)
    stop_reason: str = ""

    @property
    def done(self) -> bool:
        """Whether the last token has been appended."""
        return bool(self.stop_reason)

    @property
    def remaining(self) -> int:
        """Tokens left in the budget."""
        return self.rule.max_new_tokens - len(self.tokens)

    def append(self, token: int) -> bool:
        """Add a token; return whether the answer is finished by it.

        Raises:
            RuntimeError: the answer was finished before.
        """
        if self.done:
            raise RuntimeError(f"the answer has ended ({self.stop_reason}); nothing may follow")
        self.tokens.append(token)
        if token in self.rule.eos_ids:
            self.stop_reason = "eos"
        elif self.rule.stop_texts and self._first_stop(self.decode(self.tokens)) is not None:
            self.stop_reason = "stop_text"
        elif self.remaining <= 0:
            self.stop_reason = "length"
        return self.done

    def text(self) -> str:
        """The decoded answer, cut before the first stop text."""
        text = self.decode([token for token in self.tokens if token not in self.rule.eos_ids])
        cut = self._first_stop(text)
        return text if cut is None else text[:cut]

    def _first_stop(self, text: str) -> int | None:
        found = [text.find(stop) for stop in self.rule.stop_texts]
        return min((at for at in found if at >= 0), default=None)
