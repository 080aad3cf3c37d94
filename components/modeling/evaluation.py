"""Evaluation on held-out prompts: live acceptance and token-exact comparison in torch.

Owns the pairing of greedy answer and drafted run, one prompt at a time, one thread per process; rows are made of the
outcomes elsewhere, alike for torch and bundle. Its figures hold for torch float32 on one thread and are never reported
for another numeric mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from components.core.parallel import map_processes
from components.data.table import Prompt, read_templates
from components.decoding.loop import Drafter, decode_greedy
from components.decoding.outcomes import Outcome, judge
from components.modeling.backbone import load_backbone
from components.modeling.equality import top2_margin
from components.modeling.head import MTPHead
from components.modeling.live import LiveEvaluator
from components.modeling.session import TorchHead

_worker: tuple[LiveEvaluator, TorchHead, int] | None = None


def _start_worker(backbone: Path, head: Path, templates: Path, max_length: int, draft_length: int) -> None:
    global _worker  # noqa: PLW0603 - a pool hands its workers no state of their own
    torch.set_num_threads(1)
    decode = Tokenizer.from_file(str(backbone / "tokenizer.json")).decode
    evaluator = LiveEvaluator(load_backbone(backbone), [], read_templates(templates), decode, max_length)
    _worker = (evaluator, TorchHead(MTPHead.from_pretrained(head), evaluator.session), draft_length)


def _compare(prompt: Prompt) -> Outcome:
    if _worker is None:
        raise RuntimeError("the worker was not started")
    return compare(prompt, *_worker)


def compare(prompt: Prompt, evaluator: LiveEvaluator, drafter: Drafter, draft_length: int) -> Outcome:
    """Decode one prompt plainly and with drafts, token by token."""
    reference, margins = evaluator.new_answer(prompt), []
    for _ in decode_greedy(evaluator.session, prompt.prompt_ids, reference):
        margins.append(top2_margin(evaluator.session.logits[-1]))
    _, rounds = evaluator.drafted(prompt, drafter, draft_length)
    return judge(prompt.prompt_id, prompt.task, prompt.prompt_ids, reference.tokens, margins, rounds)


def compare_prompts(
    prompts: Sequence[Prompt],
    backbone: Path,
    head: Path,
    templates: Path,
    max_length: int,
    draft_length: int,
    processes: int,
) -> Iterator[Outcome]:
    """Decode every prompt plainly and with drafts, in ``processes`` single-threaded processes."""
    arguments = (backbone, head, templates, max_length, draft_length)
    yield from map_processes(_compare, prompts, processes, _start_worker, arguments)
