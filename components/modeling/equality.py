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

from components.core.manifest import TaskPrompt
from components.core.progress import Progress
from components.decoding.comparison import Mismatch, find_mismatch
from components.decoding.loop import decode_greedy
from components.decoding.stopping import Answer, StopRule
from components.modeling.backbone import load_backbone
from components.modeling.session import TorchBackbone, top2_margin


@dataclass(frozen=True)
class Equality:
    """Outcome of the comparison; in each mismatch the single answer is the reference."""

    prompts: int
    tokens: int
    mismatches: tuple[Mismatch, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def line(self) -> str:
        """One line for people."""
        widest = max((mismatch.top2_margin for mismatch in self.mismatches), default=0.0)
        return (
            f"{len(self.mismatches)} of {self.prompts} answers differ when decoded singly"
            f" ({self.tokens} tokens; widest top-2 margin {widest:.2g})"
        )


def compare_with_single(
    answers: pd.DataFrame,
    backbone_folder: Path,
    tasks: Mapping[str, TaskPrompt],
    decode: Callable[[Sequence[int]], str],
    count: int,
) -> Equality:
    """Decode ``count`` answers again, one at a time, spread evenly over the table."""
    chosen = answers.iloc[:: max(1, len(answers) // count)].head(count).to_dict("records")
    longest = max(len(row["prompt_ids"]) + tasks[row["task"]].max_new_tokens for row in chosen)
    backbone = load_backbone(backbone_folder)
    session = TorchBackbone(backbone, longest + 1)
    progress = Progress("decode singly", len(chosen), "prompts")
    found: list[Mismatch | None] = []
    tokens = 0
    for row in chosen:
        task = tasks[row["task"]]
        rule = StopRule(frozenset(backbone.card.eos_ids), tuple(task.stop_texts), task.max_new_tokens)
        answer, margins = Answer(rule, decode), []
        for _ in decode_greedy(session, list(row["prompt_ids"]), answer):
            margins.append(top2_margin(session.logits[-1]))
        tokens += len(answer.tokens)
        found.append(find_mismatch(row["prompt_id"], answer.tokens, list(row["answer_ids"]), margins))
        progress.advance()
    return Equality(len(chosen), tokens, tuple(mismatch for mismatch in found if mismatch is not None))
