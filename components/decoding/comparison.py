"""The two questions asked of every drafted run: are these the same tokens, and is the head at work at all?

Owns the verdict on one pair of answers and the wiring alarm; torch and onnxruntime ask through here alike. It refuses
to let near-zero acceptance pass: that has always been a wiring fault, never a bad head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from components.core.errors import UserError
from components.decoding.metrics import Acceptance, first_mismatch

ALARM_BELOW = 1.02  # tau; a wired head is far above, a broken one at 1.00
ALARM_AFTER_PASSES = 50


@dataclass(frozen=True)
class Mismatch:
    """Where an answer with drafts left the greedy one.

    Attributes:
        position: index in the answer.
        reference, got: token ids; None where an answer had ended.
        top2_margin: greedy logit of the best token minus that of the second, at that position.
    """

    prompt_id: str
    position: int
    reference: int | None
    got: int | None
    top2_margin: float


def find_mismatch(
    prompt_id: str, reference: Sequence[int], got: Sequence[int], margins: Sequence[float]
) -> Mismatch | None:
    """First difference between two answers, None when equal; ``margins`` one per token of ``reference``."""
    at = first_mismatch(reference, got)
    if at is None:
        return None
    wanted, seen = (tokens[at] if at < len(tokens) else None for tokens in (reference, got))
    return Mismatch(prompt_id, at, wanted, seen, margins[min(at, len(margins) - 1)])


def check_wiring(counts: Acceptance, drafted: int, where: str) -> None:
    """Stop when the head cannot be at work.

    Args:
        counts: acceptance over all answers.
        drafted: drafts proposed in all rounds.
        where: what was run, for the message.

    Raises:
        UserError: no draft was proposed, or hardly one was accepted.
    """
    remedy = "check hidden state, token pairing, embedding scale, concatenation and kv_layers, then train again"
    if counts.passes and drafted == 0:
        raise UserError(f"wiring alarm in {where}: no drafts at all", f"{counts.passes} passes, 0 drafts", remedy)
    if counts.passes >= ALARM_AFTER_PASSES and counts.acceptance_length < ALARM_BELOW:
        seen = f"{counts.acceptance_length:.3f} tokens per pass over {counts.passes} passes"
        raise UserError(f"wiring alarm in {where}: hardly any draft is accepted", seen, remedy)
