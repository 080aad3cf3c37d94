"""Training of the MTP head: K unrolled steps with shared weights on distilled answers; the backbone never changes.

Owns the loop with its checkpoints, and the choice of the epoch that is kept: the one that drafts best in live decoding.
It refuses to run without a supervised position, skips and counts batches that have none or whose loss is not finite,
and saves no NaN. Its surprising decision: the head starts from random weights. Starting its layers as copies of the
backbone layers they read, or its norm as the backbone's, learned more slowly (docs/recipe-log.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from components.core.config import Head, Train
from components.core.errors import UserError
from components.core.progress import Progress
from components.modeling.backbone import Backbone
from components.modeling.batches import (
    UNSUPERVISED,
    DraftVocabulary,
    batch_order,
    choose_draft_vocabulary,
    collate,
    make_vocabulary,
)
from components.modeling.checkpoint import load_checkpoint, save_checkpoint
from components.modeling.features import Sequence as CapturedSequence
from components.modeling.head import HeadConfig, MTPHead
from components.modeling.losses import StepResult, draft_step_losses, step_figures
from components.modeling.parallel_training import World
from components.modeling.schedule import best_epoch, learning_rate_factor, out_of_patience

CHECKPOINT_EVERY_STEPS = 50
LOG_EVERY_STEPS = 10
JUDGE = "extra_tokens_per_pass"  # the live figure that epochs are compared by

Log = Callable[[int, dict[str, float]], None]
Validate = Callable[[MTPHead], dict[str, float]]


@dataclass(frozen=True)
class TrainingResult:
    """What a finished run reports.

    Attributes:
        steps: optimizer steps done; fewer than planned when the run stopped early.
        supervised_positions: at each depth, in one epoch.
        out_of_vocabulary_positions: answer tokens that the draft vocabulary lacks, in one epoch.
        skipped_batches: steps that changed nothing.
        validation: live figures of each epoch.
        best_epoch: number, from 1, of the epoch whose weights the head has.
        stopped_early: whether patience ended the run before its last epoch.
        last_batch_losses: mean cross-entropy at each depth.
    """

    steps: int
    supervised_positions: list[int]
    out_of_vocabulary_positions: int
    skipped_batches: int
    validation: list[dict[str, float]]
    best_epoch: int
    stopped_early: bool
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


class Trainer:
    """One training run, resumable at any moment.

    Args:
        head: the head to train, in place.
        backbone: source of embeddings and output rows; frozen.
        sequences: supervised sequences, loops already left out.
        settings: the `train` section.
        folder: where checkpoints are kept; its name must change with data and parameters.
        world: the processes that take part, each with a trainer over the same things.
    """

    def __init__(
        self,
        head: MTPHead,
        backbone: Backbone,
        sequences: Sequence[CapturedSequence],
        settings: Train,
        folder: Path,
        world: World,
    ) -> None:
        self.head, self.backbone, self.sequences, self.settings = head, backbone, sequences, settings
        self.folder, self.world = folder, world
        self.vocabulary: DraftVocabulary = make_vocabulary(head.config.draft_to_target, backbone.card.vocab_size)
        self.draft_rows = backbone.output_rows[self.vocabulary.draft_to_target].contiguous()
        rate, decay = settings.learning_rate, settings.weight_decay
        # Fused: one pass over weights, gradients and moments instead of a dozen; memory is what an update waits for.
        self.optimizer = torch.optim.AdamW(head.parameters(), rate, (0.9, 0.95), weight_decay=decay, fused=True)
        self.steps_per_epoch = math.ceil(len(sequences) / settings.batch_sequences)
        self.total_steps = self.steps_per_epoch * settings.epochs
        self.progressed = load_checkpoint(folder, head, self.optimizer)

    def run(self, validate: Validate, log: Log) -> TrainingResult:
        """Train to the end, from wherever the last checkpoint stands; the head then has its best epoch's weights.

        Args:
            validate: decodes live with the head; called after each epoch, its :data:`JUDGE` says which one is kept.
            log: takes (step, figures). Both are called in the process that leads, and in no other.

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
        while self.progressed.step < self.total_steps and not self._stopped():
            self._one_step(log, progress)
            # A checkpoint at the end of an epoch always holds that epoch's validation.
            if self.progressed.step % self.steps_per_epoch == 0:
                self._end_of_epoch(validate, log)
            elif self.progressed.step % CHECKPOINT_EVERY_STEPS == 0:
                self._save()
        if figures["skipped_batches"] >= self.progressed.step:
            raise UserError("training learned nothing", "every batch was skipped", "lower train.learning_rate")
        self.head.load_state_dict(self.progressed.best)
        return self._result()

    def _result(self) -> TrainingResult:
        step, figures = self.progressed.step, self.progressed.figures
        return TrainingResult(
            steps=step,
            supervised_positions=figures["supervised_positions"],
            out_of_vocabulary_positions=figures["out_of_vocabulary_positions"],
            skipped_batches=figures["skipped_batches"],
            validation=figures["validation"],
            best_epoch=best_epoch(self._acceptance()),
            stopped_early=step < self.total_steps,
            last_batch_losses=figures.get("losses", []),
        )

    def _acceptance(self) -> list[float]:
        return [epoch[JUDGE] for epoch in self.progressed.figures["validation"]]

    def _stopped(self) -> bool:
        """A function of what a checkpoint holds, so that a run killed after its last epoch knows that it is over."""
        return out_of_patience(self._acceptance(), self.settings.patience)

    def _one_step(self, log: Log, progress: Progress) -> None:
        step, settings, figures = self.progressed.step, self.settings, self.progressed.figures
        epoch, position = divmod(step, self.steps_per_epoch)
        chosen = batch_order(self.sequences, settings.batch_sequences, settings.seed, epoch)[position]
        factor = learning_rate_factor(step, self.total_steps, max(1, round(settings.warmup_share * self.total_steps)))
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * factor
        mine, supervised = self.forward(self.world.share_of(chosen))
        result = mine.of_all(self.world)
        # Decided on sums over all processes, so that all of them decide alike.
        if supervised and bool(torch.isfinite(result.loss)) and self._learn(mine.loss):
            figures["losses"] = [round(float(loss), 5) for loss in result.losses]
        else:
            figures["skipped_batches"] += 1
        self.progressed.step += 1
        if self.world.leads:
            progress.advance(1, f"loss {float(result.loss):.3f}")
            if self.progressed.step % LOG_EVERY_STEPS == 0:
                log(self.progressed.step, step_figures(result, settings.learning_rate * factor))

    def _learn(self, loss: Tensor) -> bool:
        self.backward(loss)
        return self.update()

    def forward(self, chosen: Sequence[int]) -> tuple[StepResult, int]:
        """This process's part of the loss, and the supervised positions of the whole batch.

        Args:
            chosen: indices of this process's sequences.
        """
        depths = self.settings.draft_length
        if not chosen:
            return StepResult.of_nothing(depths), int(self.world.add_up(torch.zeros(depths, dtype=torch.int64)).sum())
        batch = collate([self.sequences[i] for i in chosen], depths, self.vocabulary)
        counts = self.world.add_up(batch.supervised()).tolist()
        weights, softness = self.settings.step_weights, self.settings.soft_target_weight
        embed, rows = self.backbone.embed, self.draft_rows
        return draft_step_losses(self.head, batch, embed, rows, weights, softness, counts), sum(counts)

    def backward(self, loss: Tensor) -> None:
        """This process's part of the gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        if loss.requires_grad:  # else this process had no sequence
            loss.backward()

    def update(self) -> bool:
        """Add up the gradients, clip, step; False, and no step, when they are not finite."""
        self.world.add_up_gradients(self.head.parameters())
        norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.settings.clip_norm)
        if not bool(torch.isfinite(norm)):
            return False
        self.optimizer.step()
        return True

    def _end_of_epoch(self, validate: Validate, log: Log) -> None:
        self.head.eval()
        figures = self.world.told(lambda: validate(self.head))
        self.head.train()
        self.progressed.figures["validation"].append(figures)
        if best_epoch(self._acceptance()) == len(self._acceptance()):
            self.progressed.best = {name: tensor.clone() for name, tensor in self.head.state_dict().items()}
        if self.world.leads:
            log(self.progressed.step, {f"validation/{name}": value for name, value in figures.items()})
        self._save()

    def _save(self) -> None:
        if self.world.leads:
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
