"""One answer being generated: rounds, streamed text, and what it cost.

Owns timing and the turning of rounds into printable pieces. It refuses to go on when another answer has been started on
the same buffers. Its surprising decision: text is held back while it could still become part of a stop text or of an
unfinished character, so nothing that was shown is ever taken back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from components.decoding.loop import Round
from components.decoding.stopping import Answer

UNFINISHED = "\ufffd"


@dataclass(frozen=True)
class Piece:
    """Text that may be shown.

    Attributes:
        text: what to print next.
        drafted: whether it came from an accepted draft; the bonus token of a round did not.
    """

    text: str
    drafted: bool


@dataclass(frozen=True)
class Statistics:
    """What an answer cost.

    Attributes:
        prompt_tokens: tokens of the prompt.
        tokens: tokens of the answer.
        passes: backbone passes after prefill.
        accepted: accepted drafts.
        departed: accepted drafts that were not the backbone's argmax; none under the greedy rule.
        first_token_s: seconds to the first token (prefill).
        decode_s: seconds for all others, drafting included.
    """

    prompt_tokens: int
    tokens: int
    passes: int
    accepted: int
    departed: int
    first_token_s: float
    decode_s: float

    @property
    def tokens_per_pass(self) -> float:
        """Tau: tokens after the first, per backbone pass after prefill; 0 without a pass."""
        return (self.tokens - 1) / self.passes if self.passes else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decode speed: tokens after the first, per second after the first; 0 without any."""
        return (self.tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def tokens_per_s_with_prompt(self) -> float:
        """All tokens over all seconds, prefill included."""
        return self.tokens / (self.first_token_s + self.decode_s)


@dataclass
class Generation:
    """An answer in the making; iterate :meth:`rounds` or :meth:`stream` once, or call :meth:`finish`.

    Args:
        prompt: token ids of the prompt.
        answer: where tokens go.
        source: the draft-verify loop, not yet started.
        is_current: whether the buffers still belong to this answer.
    """

    prompt: list[int]
    answer: Answer
    source: Iterator[Round]
    is_current: Callable[[], bool] = lambda: True
    history: list[Round] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def rounds(self) -> Iterator[Round]:
        """Every round as it happens; the first is the prefill.

        Raises:
            RuntimeError: another generation has been started on the same bundle.
        """
        while True:
            if not self.is_current():
                raise RuntimeError(
                    "another generation has started on this bundle; its buffers are no longer this one's"
                )
            started = time.perf_counter()
            round_ = next(self.source, None)
            if round_ is None:
                return
            self.seconds.append(time.perf_counter() - started)
            self.history.append(round_)
            yield round_

    def finish(self) -> Generation:
        """Run to the end; returns itself."""
        for _ in self.rounds():
            pass
        return self

    @property
    def text(self) -> str:
        """The answer so far, cut before a stop text."""
        return self.answer.text()

    @property
    def statistics(self) -> Statistics:
        """Cost so far."""
        return Statistics(
            prompt_tokens=len(self.prompt),
            tokens=len(self.answer.tokens),
            passes=max(len(self.history) - 1, 0),
            accepted=sum(round_.accepted for round_ in self.history),
            departed=sum(round_.departed for round_ in self.history),
            first_token_s=sum(self.seconds[:1]),
            decode_s=sum(self.seconds[1:]),
        )

    def stream(self) -> Iterator[Piece]:
        """Pieces of text as they become certain; joined they are :attr:`text`."""
        shown = count = 0
        for round_ in self.rounds():
            for index in range(len(round_.emitted)):
                count += 1
                text = self._printable(count)
                if len(text) > shown:
                    yield Piece(text[shown:], drafted=index < round_.accepted)
                    shown = len(text)
        if len(self.text) > shown:
            yield Piece(self.text[shown:], drafted=False)

    def _printable(self, count: int) -> str:
        """Text of the first ``count`` tokens, without what may still change."""
        rule = self.answer.rule
        partial = Answer(rule, self.answer.decode, self.answer.tokens[:count])
        text = partial.text()
        held = max((_overlap(text, stop) for stop in rule.stop_texts), default=0)
        text = text[: len(text) - held]
        return text.rstrip(UNFINISHED)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    return next((size for size in range(len(stop) - 1, 0, -1) if text.endswith(stop[:size])), 0)
