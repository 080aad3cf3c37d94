"""Proof that packing many answers into one pass changes nothing but near-ties.

Owns the comparison of distilled answers with answers decoded singly, one token at a time in a cache of their own, by
transformers' own attention. It refuses to call a difference a near-tie by assertion: each comes with its position and
the top-2 margin of the single pass. Its surprising decision: single decoding runs in as many processes as distillation
did, so that the two speeds are measured under the same load and can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tokenizers import Tokenizer

from components.core.errors import UserError
from components.core.manifest import TaskPrompt
from components.core.parallel import map_processes
from components.core.progress import Progress
from components.decoding.comparison import Mismatch, find_mismatch
from components.decoding.loop import decode_greedy
from components.decoding.stopping import Answer, StopRule
from components.modeling.backbone import Backbone, load_backbone
from components.modeling.session import TorchBackbone, top2_margin

NEAR_TIE = 1e-2  # top-2 margin; rounding over 30 layers moves logits by about 1e-4


@dataclass(frozen=True)
class Equality:
    """Outcome of the comparison; in each mismatch the single answer is the reference.

    Attributes:
        prompts, tokens: decoded singly.
        busy_s: seconds that this took, summed over the processes; loading of the model left out.
        mismatches: answers that differ.
    """

    prompts: int
    tokens: int
    busy_s: float
    mismatches: tuple[Mismatch, ...]

    @property
    def tokens_per_s(self) -> float:
        """Answer tokens per second of one process."""
        return self.tokens / self.busy_s

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

    def check(self) -> None:
        """Stop when an answer differs where the backbone was sure: that is a leak between rows, not rounding.

        Raises:
            UserError: a mismatch is no near-tie.
        """
        worst = max(self.mismatches, key=lambda mismatch: mismatch.top2_margin, default=None)
        if worst is not None and worst.top2_margin > NEAR_TIE:
            raise UserError(
                "distillation changes the text",
                f"{worst.prompt_id} differs at token {worst.position}, where the margin is {worst.top2_margin:.3g}",
                "this is a fault of components/modeling/packed.py: report it; do not train on these answers",
            )


@dataclass(frozen=True)
class Question:
    """An answer to be decoded again."""

    prompt_id: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    task: TaskPrompt


@dataclass(frozen=True)
class SingleAnswer:
    """One prompt decoded singly."""

    prompt_id: str
    tokens: int
    busy_s: float
    mismatch: Mismatch | None


_worker: tuple[Backbone, Tokenizer] | None = None


def _start_worker(backbone_folder: Path) -> None:
    global _worker  # noqa: PLW0603 - a pool hands its workers no state of their own
    torch.set_num_threads(1)
    _worker = load_backbone(backbone_folder), Tokenizer.from_file(str(backbone_folder / "tokenizer.json"))


def _decode_singly(question: Question) -> SingleAnswer:
    if _worker is None:
        raise RuntimeError("the worker was not started")
    backbone, tokenizer = _worker
    task = question.task
    rule = StopRule(frozenset(backbone.card.eos_ids), tuple(task.stop_texts), task.max_new_tokens)
    session = TorchBackbone(backbone, len(question.prompt) + task.max_new_tokens + 1)
    answer, margins, started = Answer(rule, tokenizer.decode), [], time.monotonic()
    for _ in decode_greedy(session, list(question.prompt), answer):
        margins.append(top2_margin(session.last_logits[-1]))
    busy_s = time.monotonic() - started
    mismatch = find_mismatch(question.prompt_id, answer.tokens, list(question.answer), margins)
    return SingleAnswer(question.prompt_id, len(answer.tokens), busy_s, mismatch)


def compare_with_single(
    answers: pd.DataFrame, backbone_folder: Path, tasks: Mapping[str, TaskPrompt], count: int, processes: int
) -> Equality:
    """Decode ``count`` answers again, one at a time, spread evenly over the table."""
    spread = np.unique(np.linspace(0, len(answers) - 1, min(count, len(answers))).round().astype(int))
    chosen = answers.iloc[spread].to_dict("records")
    questions = [
        Question(row["prompt_id"], tuple(row["prompt_ids"]), tuple(row["answer_ids"]), tasks[row["task"]])
        for row in chosen
    ]
    progress = Progress("decode singly", len(questions), "prompts")
    singles: dict[str, SingleAnswer] = {}
    for single in map_processes(_decode_singly, questions, processes, _start_worker, (backbone_folder,)):
        singles[single.prompt_id] = single
        progress.advance()
    in_order: Sequence[SingleAnswer] = [singles[question.prompt_id] for question in questions]
    return Equality(
        prompts=len(in_order),
        tokens=sum(single.tokens for single in in_order),
        busy_s=sum(single.busy_s for single in in_order),
        mismatches=tuple(single.mismatch for single in in_order if single.mismatch is not None),
    )
