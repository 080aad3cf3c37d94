"""Proof that batching and left padding change nothing but near-ties.

Owns the comparison of batched answers with answers decoded singly. It refuses to call a difference a near-tie by
assertion: each comes with its position and the top-2 margin of the single pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from components.core.manifest import TaskPrompt
from components.core.progress import Progress
from components.decoding.loop import decode_greedy
from components.decoding.metrics import first_mismatch
from components.decoding.stopping import Answer, StopRule
from components.modeling.backbone import load_backbone
from components.modeling.session import TorchBackbone


@dataclass(frozen=True)
class Difference:
    """One answer that a batch decoded differently; ``top2_margin`` in logits, of the single pass."""

    prompt_id: str
    position: int
    single: int | None
    batched: int | None
    top2_margin: float


@dataclass(frozen=True)
class Equality:
    """Outcome of the comparison."""

    prompts: int
    tokens: int
    differences: tuple[Difference, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def line(self) -> str:
        """One line for people."""
        widest = max((difference.top2_margin for difference in self.differences), default=0.0)
        return (
            f"{len(self.differences)} of {self.prompts} answers differ when decoded singly"
            f" ({self.tokens} tokens; widest top-2 margin {widest:.2g})"
        )


def top2_margin(logits: Tensor) -> float:
    """Distance between the two highest logits, [vocab_size] float32."""
    high, low = logits.topk(2).values.tolist()
    return float(high - low)


def compare_with_single(
    answers: pd.DataFrame,
    backbone_folder: Path,
    tasks: Mapping[str, TaskPrompt],
    decode: Callable[[Sequence[int]], str],
    count: int,
) -> Equality:
    """Decode ``count`` answers again, one at a time, spread evenly over the table."""
    chosen = answers.iloc[:: max(1, len(answers) // count)].head(count)
    longest = max(len(row.prompt_ids) + tasks[row.task].max_new_tokens for row in chosen.itertuples())
    backbone = load_backbone(backbone_folder)
    session = TorchBackbone(backbone, longest + 1)
    progress = Progress("decode singly", len(chosen), "prompts")
    differences, tokens = [], 0
    for row in chosen.itertuples():
        task = tasks[row.task]
        rule = StopRule(frozenset(backbone.card.eos_ids), tuple(task.stop_texts), task.max_new_tokens)
        answer, margins = Answer(rule, decode), []
        for _ in decode_greedy(session, list(row.prompt_ids), answer):
            margins.append(top2_margin(session.logits[-1]))
        tokens += len(answer.tokens)
        batched = list(row.answer_ids)
        at = first_mismatch(answer.tokens, batched)
        if at is not None:
            single = answer.tokens[at] if at < len(answer.tokens) else None
            margin = margins[min(at, len(margins) - 1)]
            differences.append(
                Difference(row.prompt_id, at, single, batched[at] if at < len(batched) else None, margin)
            )
        progress.advance()
    return Equality(len(chosen), tokens, tuple(differences))
