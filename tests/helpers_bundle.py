"""A tiny but whole bundle for the tests of export, runtime and benchmark, and drafters that know the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch

from components.core.manifest import DraftPolicy, Manifest, Policies, TaskPrompt
from components.decoding.drafting import StepDrafter
from components.modeling.backbone import Backbone
from components.modeling.head import HeadConfig, MTPHead
from components.onnx.bundle import BundleSettings, build_bundle

MAX_LENGTH = 96
DRAFT_LENGTH = 3
MODES = {"head": 0, "hybrid": 1}  # mode -> tokens that must have occurred before to be copied
TASK = TaskPrompt(
    rendered="<|im_start|>user\nCorrect: {text}<|im_end|>\n<|im_start|>assistant\n", stop_texts=(), max_new_tokens=12
)


def fixed_policy(longest: int) -> Policies:
    """Always ``longest`` drafts: the head alone by default, and with lookup."""
    modes = {mode: DraftPolicy(longest=longest, stop_below=0.0, lookup_ngram=n) for mode, n in MODES.items()}
    return Policies(modes=modes, default="head")


def first_drafts(head: StepDrafter, token: int, count: int) -> tuple[list[int], list[float]]:
    """The first ``count`` drafts behind ``token``, and their probabilities."""
    steps = list(islice(head.drafts(token), count))
    return [draft for draft, _ in steps], [probability for _, probability in steps]


SETTINGS = BundleSettings(
    name="tiny",
    max_length=MAX_LENGTH,
    policies=fixed_policy(DRAFT_LENGTH),
    oldest_onnxruntime="1.20.0",
    tasks={"proofread": TASK},
)
SLOTS = {"text": "i has went to the store"}


def random_head(backbone: Backbone, embedding_scale: float = 1.0, seed: int = 3) -> MTPHead:
    """A head with large random weights that reads layers 1 and 2; every second token can be drafted."""
    card = backbone.card
    torch.manual_seed(seed)
    head = MTPHead(
        HeadConfig(
            hidden_size=card.hidden_size,
            intermediate_size=96,
            query_heads=card.query_heads,
            kv_heads=card.kv_heads,
            head_dim=card.head_dim,
            kv_layers=(1, 2),
            rope_theta=backbone.rope_theta,
            rms_norm_eps=backbone.rms_norm_eps,
            embedding_scale=embedding_scale,
            draft_to_target=tuple(range(1, card.vocab_size, 2)),
        )
    )
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.25)
    return head.eval()


def tiny_bundle(folder: Path, source: Path, backbone: Backbone, head: MTPHead) -> Manifest:
    """Export into ``folder``."""
    return build_bundle(folder, source, backbone.card, head, SETTINGS)


@dataclass
class Oracle:
    """Knows the greedy continuation of a prompt; gets every ``wrong_every``-th token that it proposes wrong."""

    prompt: Sequence[int]
    answer: Sequence[int]
    vocab_size: int
    wrong_every: int = 10**9
    proposed: int = field(default=0)

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """What follows ``tokens``, with mistakes."""
        done = len(tokens) - len(self.prompt)
        drafts = []
        for token in self.answer[done : done + limit]:
            self.proposed += 1
            drafts.append((token + 1) % self.vocab_size if self.proposed % self.wrong_every == 0 else token)
        return drafts


@dataclass(frozen=True)
class Row:
    """A row of a prompt table."""

    prompt_id: str
    task: str
    split: str
    slots: dict[str, str]
    prompt_ids: tuple[int, ...]
