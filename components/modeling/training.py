"""Training of the MTP head: K unrolled steps with shared weights on distilled answers; the backbone never changes.

Owns the loss (weighted cross-entropy per depth, FastMTP arXiv 2509.18362), the schedule and the loop with its
checkpoints. It refuses to run without a supervised position, skips and counts batches that have none or whose loss is
not finite, and saves no NaN. Its surprising decision: the head starts from random weights. Starting its layers as
copies of the backbone layers they read, or its norm as the backbone's, learned more slowly (docs/recipe-log.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from components.core.config import Head, Train
from components.core.errors import UserError
from components.core.progress import Progress
from components.modeling.backbone import Backbone
from components.modeling.batches import (
    UNSUPERVISED,
    DraftVocabulary,
    TrainingBatch,
    batch_order,
    choose_draft_vocabulary,
    collate,
    make_vocabulary,
)
from components.modeling.checkpoint import load_checkpoint, save_checkpoint
from components.modeling.features import Sequence as CapturedSequence
from components.modeling.head import HeadConfig, MTPHead, rotary_angles

CHECKPOINT_EVERY_STEPS = 50
LOG_EVERY_STEPS = 10

Log = Callable[[int, dict[str, float]], None]
Validate = Callable[[MTPHead], dict[str, float]]


@dataclass(frozen=True)
class StepResult:
    """One forward pass over a batch.

    Attributes:
        loss: weighted sum over depths of the mean cross-entropy, scalar.
        losses: mean cross-entropy at each depth, [K].
        teacher_forced_accuracy: share of supervised positions drafted right at each depth, given true inputs, [K].
    """

    loss: Tensor
    losses: Tensor
    teacher_forced_accuracy: Tensor


@dataclass(frozen=True)
class TrainingResult:
    """What a finished run reports."""

    steps: int
    supervised_positions: list[int]
    out_of_vocabulary_positions: int
    skipped_batches: int
    validation: list[dict[str, float]]
    last_batch_losses: list[float]


def new_head(shape: Head, backbone: Backbone, sequences: Sequence[CapturedSequence], seed: int) -> MTPHead:
    """A head for ``backbone``, its draft vocabulary cut by frequency.

    Raises:
        UserError: a layer in ``kv_layers`` does not exist.
    """
    card = backbone.card
    if max(shape.kv_layers) >= card.layers:
        raise UserError(
            f"head.kv_layers names layer {max(shape.kv_layers)}",
            f"the backbone has layers 0..{card.layers - 1}",
            "correct head.kv_layers",
        )
    chosen = choose_draft_vocabulary(sequences, shape.draft_vocabulary_size, card.vocab_size, card.eos_ids)
    torch.manual_seed(seed)
    return MTPHead(
        HeadConfig(
            hidden_size=card.hidden_size,
            intermediate_size=shape.intermediate_size,
            query_heads=card.query_heads,
            kv_heads=card.kv_heads,
            head_dim=card.head_dim,
            kv_layers=shape.kv_layers,
            rope_theta=backbone.rope_theta,
            rms_norm_eps=backbone.rms_norm_eps,
            embedding_scale=backbone.embedding_scale,
            draft_to_target=tuple(chosen),
        )
    )


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
) -> StepResult:
    """Unroll the head over a batch.

    Args:
        head: the drafter.
        batch: see :class:`TrainingBatch`.
        embed: token ids -> embeddings as the backbone feeds them.
        draft_rows: output rows of the draft vocabulary, [draft, hidden_size].
        step_weights: one weight per depth.
        soft_target_weight: see :func:`mixed_targets`.
    """
    cos, sin = rotary_angles(batch.positions, head.config.head_dim, head.config.rope_theta)
    anchors, state, losses, right = batch.positions.shape[1], batch.hidden, [], []
    with torch.no_grad():  # one state teaches up to K anchors: its distribution is computed once
        teacher = (batch.states @ draft_rows.T).softmax(dim=-1)
    for step in range(len(step_weights)):
        state = head(embed(batch.inputs[..., step]), state, batch.keys_values, batch.mask, cos, sin)
        targets = batch.targets[..., step]
        chosen = targets != UNSUPERVISED
        logits = state[chosen] @ draft_rows.T
        count = max(int(chosen.sum()), 1)
        wanted = mixed_targets(targets[chosen], teacher[:, step + 1 :][:, :anchors][chosen], soft_target_weight)
        losses.append(F.cross_entropy(logits, wanted, reduction="sum") / count)
        right.append((logits.detach().argmax(dim=-1) == targets[chosen]).sum() / count)
    per_depth = torch.stack(losses)
    return StepResult((per_depth * torch.tensor(step_weights)).sum(), per_depth.detach(), torch.stack(right))


def learning_rate_factor(step: int, total: int, warmup: int) -> float:
    """Linear warm-up, then half a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    share = (step - warmup) / max(1, total - warmup)
    return 0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * min(1.0, share)))


class Trainer:
    """One training run, resumable at any moment.

    Args:
        head: the head to train, in place.
        backbone: source of embeddings and output rows; frozen.
        sequences: supervised sequences, loops already left out.
        settings: the `train` section.
        folder: where checkpoints are kept; its name must change with data and parameters.
    """

    def __init__(
        self, head: MTPHead, backbone: Backbone, sequences: Sequence[CapturedSequence], settings: Train, folder: Path
    ) -> None:
        self.head, self.backbone, self.sequences, self.settings, self.folder = (
            head,
            backbone,
            sequences,
            settings,
            folder,
        )
        self.vocabulary: DraftVocabulary = make_vocabulary(head.config.draft_to_target, backbone.card.vocab_size)
        self.draft_rows = backbone.output_rows[self.vocabulary.draft_to_target].contiguous()
        self.optimizer = torch.optim.AdamW(
            head.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay
        )
        self.steps_per_epoch = math.ceil(len(sequences) / settings.batch_sequences)
        self.total_steps = self.steps_per_epoch * settings.epochs
        self.progressed = load_checkpoint(folder, head, self.optimizer)

    def run(self, validate: Validate, log: Log) -> TrainingResult:
        """Train to the end, from wherever the last checkpoint stands.

        Args:
            validate: decodes live with the head; called after each epoch.
            log: takes (step, figures).

        Raises:
            UserError: no position is supervised, or every batch had to be skipped.
        """
        figures = self.progressed.figures
        figures.setdefault("validation", [])
        figures.setdefault("skipped_batches", 0)
        if not figures.get("supervised_positions"):
            figures["supervised_positions"], figures["out_of_vocabulary_positions"] = self._count_supervised()
        progress = Progress("train", self.total_steps, "steps")
        progress.resume_at(self.progressed.step)
        self.head.train()
        while self.progressed.step < self.total_steps:
            self._one_step(log, progress)
            # A checkpoint at the end of an epoch always holds that epoch's validation.
            if self.progressed.step % self.steps_per_epoch == 0:
                self._end_of_epoch(validate, log)
            elif self.progressed.step % CHECKPOINT_EVERY_STEPS == 0:
                self._save()
        if figures["skipped_batches"] >= self.total_steps:
            raise UserError("training learned nothing", "every batch was skipped", "lower train.learning_rate")
        return TrainingResult(
            steps=self.total_steps,
            supervised_positions=figures["supervised_positions"],
            out_of_vocabulary_positions=figures["out_of_vocabulary_positions"],
            skipped_batches=figures["skipped_batches"],
            validation=figures["validation"],
            last_batch_losses=figures.get("losses", []),
        )

    def _one_step(self, log: Log, progress: Progress) -> None:
        step, settings, figures = self.progressed.step, self.settings, self.progressed.figures
        epoch, position = divmod(step, self.steps_per_epoch)
        chosen = batch_order(self.sequences, settings.batch_sequences, settings.seed, epoch)[position]
        batch = collate([self.sequences[i] for i in chosen], settings.draft_length, self.vocabulary)
        factor = learning_rate_factor(step, self.total_steps, max(1, round(settings.warmup_share * self.total_steps)))
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * factor
        result = draft_step_losses(
            self.head,
            batch,
            self.backbone.embed,
            self.draft_rows,
            settings.step_weights,
            settings.soft_target_weight,
        )
        if self._update(batch, result):
            figures["losses"] = [round(float(loss), 5) for loss in result.losses]
        else:
            figures["skipped_batches"] += 1
        self.progressed.step += 1
        note = f"loss {float(result.loss.detach()):.3f}"
        progress.advance(1, note)
        if self.progressed.step % LOG_EVERY_STEPS == 0:
            log(self.progressed.step, step_figures(result, settings.learning_rate * factor))

    def _update(self, batch: TrainingBatch, result: StepResult) -> bool:
        if int(batch.supervised().sum()) == 0 or not bool(torch.isfinite(result.loss)):
            return False
        self.optimizer.zero_grad(set_to_none=True)
        result.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.settings.clip_norm)
        if not bool(torch.isfinite(norm)):
            return False
        self.optimizer.step()
        return True

    def _end_of_epoch(self, validate: Validate, log: Log) -> None:
        self.head.eval()
        figures = validate(self.head)
        self.head.train()
        self.progressed.figures["validation"].append(figures)
        log(self.progressed.step, {f"validation/{name}": value for name, value in figures.items()})
        self._save()

    def _save(self) -> None:
        save_checkpoint(self.folder, self.head, self.optimizer, self.progressed)

    def _count_supervised(self) -> tuple[list[int], int]:
        """Supervised positions per depth, and answer tokens at depth 1 that the draft vocabulary lacks."""
        per_depth = [0] * self.settings.draft_length
        outside = 0
        for sequence in self.sequences:
            known = self.vocabulary.target_to_draft[torch.tensor(sequence.answer)] != UNSUPERVISED
            for depth in range(self.settings.draft_length):
                per_depth[depth] += int(known[depth + 1 :].sum())
            outside += int((~known[1:]).sum())
        if per_depth[0] == 0:
            raise UserError(
                "nothing to train on", "no answer token is supervised", "check data/distilled/answers.parquet"
            )
        return per_depth, outside


def step_figures(result: StepResult, learning_rate: float) -> dict[str, float]:
    """Curves per depth, under names that say what they are."""
    figures = {"train/loss": float(result.loss.detach()), "train/learning_rate": learning_rate}
    for depth, (loss, accuracy) in enumerate(
        zip(result.losses.tolist(), result.teacher_forced_accuracy.tolist(), strict=True), start=1
    ):
        figures[f"train/loss_depth_{depth}"] = loss
        figures[f"train/teacher_forced_accuracy_depth_{depth}"] = accuracy
    return figures
