"""Evaluation on held-out prompts: live acceptance and token-exact comparison in torch.

Owns the pairing of greedy answer and drafted run, one prompt at a time, one thread per process; rows are made of the
outcomes elsewhere, alike for torch and bundle. Its figures hold for torch float32 on one thread and are never reported
for another numeric mode. Its surprising decision: it has one mode more than the bundle, trees, which the bundle's graph
cannot verify yet: what a head is worth where a wide pass is cheap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from components.core.manifest import Policies
from components.core.parallel import map_processes
from components.data.table import Prompt, read_templates
from components.decoding.branching import Shape, TreeDrafter
from components.decoding.loop import Drafter
from components.decoding.outcomes import Outcome, judge
from components.modeling.backbone import load_backbone
from components.modeling.head import MTPHead
from components.modeling.live import LiveEvaluator
from components.modeling.session import TorchHead

TREE = "tree"

Drafters = Mapping[str, tuple[Drafter, int]]
_worker: tuple[LiveEvaluator, Drafters] | None = None


def all_modes(evaluator: LiveEvaluator, head: MTPHead, policies: Policies, shape: Shape) -> Drafters:
    """By mode, with its longest chain: drafters of the bundle's modes, and of trees of this shape."""
    paths = {mode: (evaluator.drafter(head, policy), policy.longest) for mode, policy in policies.modes.items()}
    eos_ids = evaluator.session.backbone.card.eos_ids
    return paths | {TREE: (TreeDrafter(TorchHead(head, evaluator.session), shape, eos_ids), shape.longest)}


def _start_worker(
    backbone: Path, head: Path, templates: Path, max_length: int, policies: Policies, shape: Shape
) -> None:
    global _worker  # noqa: PLW0603 - a pool hands its workers no state of their own
    torch.set_num_threads(1)
    decode = Tokenizer.from_file(str(backbone / "tokenizer.json")).decode
    evaluator = LiveEvaluator(load_backbone(backbone), [], read_templates(templates), decode, max_length)
    _worker = (evaluator, all_modes(evaluator, MTPHead.from_pretrained(head), policies, shape))


def _compare(prompt: Prompt) -> dict[str, Outcome]:
    if _worker is None:
        raise RuntimeError("the worker was not started")
    return compare(prompt, *_worker)


def compare(prompt: Prompt, evaluator: LiveEvaluator, drafters: Drafters) -> dict[str, Outcome]:
    """Decode one prompt plainly and with drafts in every mode, token by token."""
    reference, margins = evaluator.plain(prompt)
    judged = {}
    for mode, (drafter, longest) in drafters.items():
        _, rounds = evaluator.drafted(prompt, drafter, longest, rewind=True)
        judged[mode] = judge(prompt.prompt_id, prompt.task, prompt.prompt_ids, reference.tokens, margins, rounds)
    return judged


def compare_prompts(
    prompts: Sequence[Prompt],
    backbone: Path,
    head: Path,
    templates: Path,
    max_length: int,
    policies: Policies,
    shape: Shape,
    processes: int,
) -> Iterator[dict[str, Outcome]]:
    """Decode every prompt plainly and in every mode, in ``processes`` single-threaded processes."""
    arguments = (backbone, head, templates, max_length, policies, shape)
    yield from map_processes(_compare, prompts, processes, _start_worker, arguments)
