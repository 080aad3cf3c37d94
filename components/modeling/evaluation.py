"""Evaluation on held-out prompts: live acceptance and token-exact comparison, with intervals.

Owns the rows of evaluation.json and the workers that fill them, one prompt at a time, one thread per process. Its
figures hold for torch float32 on one thread and are never reported for another numeric mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from components.core.manifest import DraftPolicy
from components.core.parallel import map_processes
from components.data.table import Prompt, read_templates
from components.decoding.drafting import PolicyDrafter
from components.decoding.metrics import add_up, bootstrap_interval, echo_rate, is_looping
from components.modeling.backbone import load_backbone
from components.modeling.head import MTPHead
from components.modeling.live import Comparison, LiveEvaluator

_worker: tuple[LiveEvaluator, PolicyDrafter] | None = None


def _start_worker(backbone: Path, head: Path, templates: Path, max_length: int, policy: DraftPolicy) -> None:
    global _worker  # noqa: PLW0603 - a pool hands its workers no state of their own
    torch.set_num_threads(1)
    decode = Tokenizer.from_file(str(backbone / "tokenizer.json")).decode
    evaluator = LiveEvaluator(load_backbone(backbone), [], read_templates(templates), decode, max_length)
    _worker = (evaluator, evaluator.drafter(MTPHead.from_pretrained(head), policy))


def _compare(prompt: Prompt) -> Comparison:
    if _worker is None:
        raise RuntimeError("the worker was not started")
    evaluator, drafter = _worker
    return evaluator.compare(prompt, drafter, drafter.policy.longest)


def compare_prompts(
    prompts: Sequence[Prompt],
    backbone: Path,
    head: Path,
    templates: Path,
    max_length: int,
    policy: DraftPolicy,
    processes: int,
) -> Iterator[Comparison]:
    """Decode every prompt plainly and with drafts, in ``processes`` single-threaded processes."""
    arguments = (backbone, head, templates, max_length, policy)
    yield from map_processes(_compare, prompts, processes, _start_worker, arguments)


def evaluation_row(
    task: str, results: Sequence[Comparison], draft_length: int, samples: int, seed: int
) -> dict[str, Any]:
    """One row of evaluation.json; ``results`` in a fixed order, so that intervals are reproducible."""
    counts = [result.counts for result in results]
    total = add_up(counts, draft_length)
    mismatches = [asdict(result.mismatch) for result in results if result.mismatch is not None]
    tau = total.acceptance_length
    calm = add_up([result.counts for result in results if not is_looping(result.answer)], draft_length)
    low, high = bootstrap_interval(counts, samples, seed)
    return {
        "task": task,
        "prompts": len(results),
        "tokens": sum(len(result.answer) for result in results),
        "exact_match": 1.0 - len(mismatches) / len(results),
        "mismatches": mismatches,
        "acceptance_length": tau,
        "acceptance_length_interval": [low, high],
        "extra_tokens_per_pass": max(tau - 1.0, 0.0),
        "conditional_acceptance": total.conditional,
        "drafts_reached": list(total.reached),
        "loop_share": sum(is_looping(result.answer) for result in results) / len(results),
        "extra_tokens_per_pass_without_loops": max(calm.acceptance_length - 1.0, 0.0),
        "echo_rate": sum(echo_rate(r.prompt.prompt_ids, r.answer) for r in results) / len(results),
    }
