"""What the head is trained to do: at each depth, draft what the backbone chose, and as the backbone would have chosen.

Owns the loss over a batch (weighted cross-entropy per depth, FastMTP arXiv 2509.18362) and the curves that it gives. It
refuses to average over anything but supervised positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from components.modeling.batches import UNSUPERVISED, TrainingBatch
from components.modeling.head import MTPHead, rotary_angles
from components.modeling.parallel_training import World


@dataclass(frozen=True)
class StepResult:
    """One forward pass over a batch, or over one process's part of it: those of all processes add up to the batch's.

    Attributes:
        loss: weighted sum over depths of the mean cross-entropy, scalar.
        losses: mean cross-entropy at each depth, [K].
        teacher_forced_accuracy: share of supervised positions drafted right at each depth, given true inputs, [K].
    """

    loss: Tensor
    losses: Tensor
    teacher_forced_accuracy: Tensor

    @classmethod
    def of_nothing(cls, depths: int) -> StepResult:
        """What a process without a sequence adds."""
        return cls(torch.zeros(()), torch.zeros(depths), torch.zeros(depths))

    def of_all(self, world: World) -> StepResult:
        """The whole batch's figures, without a graph."""
        depths = len(self.losses)
        parts = torch.cat((self.loss.detach()[None], self.losses, self.teacher_forced_accuracy))
        loss, losses, accuracy = world.add_up(parts).split([1, depths, depths])
        return StepResult(loss[0], losses, accuracy)


def mixed_targets(targets: Tensor, teacher: Tensor, soft_target_weight: float) -> Tensor:
    """What the head is to draft: the backbone's choice, mixed with its distribution; [positions, draft], rows sum to 1.

    Knowledge distillation (Hinton et al. 2015, arXiv 1503.02531), with the teacher cut to the draft vocabulary.

    Args:
        targets: draft ids, [positions] int64.
        teacher: the backbone's distribution at the same positions, [positions, draft].
        soft_target_weight: share of the distribution, 0..1.
    """
    mixed = teacher * soft_target_weight
    return mixed.scatter_add_(1, targets[:, None], torch.full_like(mixed[:, :1], 1.0 - soft_target_weight))


def draft_step_losses(
    head: MTPHead,
    batch: TrainingBatch,
    embed: Callable[[Tensor], Tensor],
    draft_rows: Tensor,
    step_weights: Sequence[float],
    soft_target_weight: float,
    counts: Sequence[int],
) -> StepResult:
    """Unroll the head over a batch, or over a part of it.

    Args:
        head: the drafter.
        batch: see :class:`TrainingBatch`.
        embed: token ids -> embeddings as the backbone feeds them.
        draft_rows: output rows of the draft vocabulary, [draft, hidden_size].
        step_weights: one weight per depth.
        soft_target_weight: see :func:`mixed_targets`.
        counts: supervised positions of the whole batch at each depth: what its sums are divided by.
    """
    cos, sin = rotary_angles(batch.positions, head.config.head_dim, head.config.rope_theta)
    anchors, state, losses, right = batch.positions.shape[1], batch.hidden, [], []
    with torch.no_grad():  # one state teaches up to K anchors: its distribution is computed once
        teacher = (batch.states @ draft_rows.T).softmax(dim=-1)
    for step, supervised in enumerate(counts):
        # Step by step even the longest answer's last anchors run out of tokens to draft: they are not computed.
        kept = slice(0, max(1, anchors - step))
        cos, sin, mask = cos[..., kept, :], sin[..., kept, :], batch.mask[..., kept, :]
        state = head(embed(batch.inputs[:, kept, step]), state[:, kept], batch.keys_values, mask, cos, sin)
        targets = batch.targets[:, kept, step]
        chosen = targets != UNSUPERVISED
        logits = state[chosen] @ draft_rows.T
        count = max(supervised, 1)
        wanted = mixed_targets(targets[chosen], teacher[:, step + 1 :][:, kept][chosen], soft_target_weight)
        losses.append(F.cross_entropy(logits, wanted, reduction="sum") / count)
        right.append((logits.detach().argmax(dim=-1) == targets[chosen]).sum() / count)
    per_depth = torch.stack(losses)
    return StepResult((per_depth * torch.tensor(step_weights)).sum(), per_depth.detach(), torch.stack(right))


def step_figures(result: StepResult, learning_rate: float) -> dict[str, float]:
    """Curves per depth, under names that say what they are; ``result`` is the whole batch's."""
    figures = {"train/loss": float(result.loss), "train/learning_rate": learning_rate}
    for depth, (loss, accuracy) in enumerate(
        zip(result.losses.tolist(), result.teacher_forced_accuracy.tolist(), strict=True), start=1
    ):
        figures[f"train/loss_depth_{depth}"] = loss
        figures[f"train/teacher_forced_accuracy_depth_{depth}"] = accuracy
    return figures
