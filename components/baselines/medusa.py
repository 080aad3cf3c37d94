"""A Medusa-style drafter: K residual towers on the backbone's last state, no attention, no cache (arXiv 2401.10774).

Owns the module and its drafter. It refuses to see anything but h_p: not the newest token, not the KV cache; that is the
comparison. Its surprising decision: logits use the backbone's output rows of the head's draft vocabulary instead of K
output matrices of its own, so that the parameters go into the towers, as many as the head has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from components.baselines.training import LossOf, depth_loss
from components.core.config import Train
from components.modeling.batches import DraftVocabulary, collate
from components.modeling.features import Sequence as Captured
from components.modeling.session import TorchBackbone


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), the identity at first."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.Module):
    """One tower per depth.

    Args:
        hidden_size: of the backbone.
        draft_length: K.
        blocks: residual blocks in each tower.
    """

    def __init__(self, hidden_size: int, draft_length: int, blocks: int) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(hidden_size) for _ in range(blocks))) for _ in range(draft_length)
        )

    def forward(self, hidden: Tensor) -> list[Tensor]:
        """h_p, [..., hidden_size] -> one state per depth; times the draft rows it gives the logits."""
        return [tower(hidden) for tower in self.towers]


def medusa_loss(heads: MedusaHeads, draft_rows: Tensor, vocabulary: DraftVocabulary, settings: Train) -> LossOf:
    """The head's loss, every depth from h_p alone."""

    def loss(sequences: list[Captured]) -> Tensor:
        batch = collate(sequences, settings.draft_length, vocabulary)
        return depth_loss(heads(batch.hidden), batch, draft_rows, settings)

    return loss


class MedusaDrafter:
    """Implements :class:`components.decoding.loop.Drafter`."""

    def __init__(self, heads: MedusaHeads, session: TorchBackbone, draft_rows: Tensor, draft_to_target: Tensor) -> None:
        self.heads, self.session = heads, session
        self.draft_rows, self.draft_to_target = draft_rows, draft_to_target

    @torch.inference_mode()
    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """At most K drafts, each the likeliest token at its depth."""
        hidden = self.session.last_hidden[0, 0]
        states = [tower(hidden) for tower in list(self.heads.towers)[:limit]]
        return [int(self.draft_to_target[(state @ self.draft_rows.T).argmax()]) for state in states]
