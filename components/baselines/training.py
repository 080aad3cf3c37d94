"""One small trainer for every baseline: AdamW, cosine, clipped gradients; the head's own settings and epochs.

Owns the loop, the loss that Medusa and EAGLE share with the head, and the count of supervised answer tokens. It refuses
to give a baseline another budget than the head's: settings come from the head's own section. Its surprising decision:
no checkpoint inside a run, only finished weights are kept, because each run takes minutes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from components.core.config import Train
from components.core.files import atomic_path
from components.core.progress import Progress
from components.modeling.batches import UNSUPERVISED, DraftVocabulary, TrainingBatch, batch_order
from components.modeling.features import Sequence as Captured
from components.modeling.losses import mixed_targets
from components.modeling.schedule import learning_rate_factor

LossOf = Callable[[list[Captured]], Tensor]


@dataclass(frozen=True)
class Fitted:
    """What a training run cost.

    Attributes:
        epochs: passes over its answers.
        steps: optimizer steps.
        skipped_batches: those whose loss was not finite.
        supervised_answer_tokens: answer tokens seen as targets of the first draft, repeats counted.
        seconds: wall clock.
        threads: that torch used.
    """

    epochs: int
    steps: int
    skipped_batches: int
    supervised_answer_tokens: int
    seconds: float
    threads: int

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def supervised_tokens(sequences: Sequence[Captured], vocabulary: DraftVocabulary) -> int:
    """Answer tokens that can be a first draft: all but each answer's first, within the draft vocabulary."""
    known = [vocabulary.target_to_draft[torch.tensor(sequence.answer[1:])] for sequence in sequences]
    return sum(int((ids != UNSUPERVISED).sum()) for ids in known)


def fit(
    module: nn.Module,
    sequences: Sequence[Captured],
    loss_of: LossOf,
    settings: Train,
    vocabulary: DraftVocabulary,
    label: str,
) -> Fitted:
    """Train ``module`` in place for ``settings.epochs``.

    Args:
        loss_of: scalar loss of some sequences.
        label: for the line of progress.
    """
    started = time.perf_counter()
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay
    )
    per_epoch = math.ceil(len(sequences) / settings.batch_sequences)
    total, skipped = per_epoch * settings.epochs, 0
    progress = Progress(f"train {label}", total, "steps")
    module.train()
    for step in range(total):
        epoch, position = divmod(step, per_epoch)
        chosen = batch_order(sequences, settings.batch_sequences, settings.seed, epoch)[position]
        factor = learning_rate_factor(step, total, max(1, round(settings.warmup_share * total)))
        loss = loss_of([sequences[index] for index in chosen])
        skipped += not _update(module, optimizer, loss, settings, factor)
        progress.advance(1, f"loss {float(loss.detach()):.3f}")
    module.eval().requires_grad_(False)
    seen = settings.epochs * supervised_tokens(sequences, vocabulary)
    return Fitted(settings.epochs, total, skipped, seen, time.perf_counter() - started, torch.get_num_threads())


def _update(module: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, settings: Train, factor: float) -> bool:
    if not bool(torch.isfinite(loss)) or not loss.requires_grad:
        return False
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate * factor
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), settings.clip_norm)
    if not bool(torch.isfinite(norm)):
        return False
    optimizer.step()
    return True


def depth_loss(states: Sequence[Tensor], batch: TrainingBatch, draft_rows: Tensor, settings: Train) -> Tensor:
    """The head's own loss on the states of another drafter.

    Args:
        states: one per depth, [batch, anchors, hidden_size]; times ``draft_rows`` they give the logits.
        batch: anchors and targets.
        draft_rows: the backbone's output rows of the draft vocabulary, [draft, hidden_size].
        settings: step weights and the share of soft targets.
    """
    total, anchors = torch.zeros(()), batch.positions.shape[1]
    with torch.no_grad():
        teacher = (batch.states @ draft_rows.T).softmax(dim=-1)
    for step, (state, weight) in enumerate(zip(states, settings.step_weights, strict=True)):
        targets = batch.targets[..., step]
        chosen = targets != UNSUPERVISED
        wanted = teacher[:, step + 1 :][:, :anchors][chosen]
        wanted = mixed_targets(targets[chosen], wanted, settings.soft_target_weight)
        loss = F.cross_entropy(state[chosen] @ draft_rows.T, wanted, reduction="sum")
        total = total + weight * loss / max(int(chosen.sum()), 1)
    return total


def fit_once(file: Path, module: nn.Module, train: Callable[[], Fitted]) -> Fitted:
    """Load finished weights from ``file``, or train and write them.

    Args:
        file: its folder's name must change with data and parameters.
        module: gets the weights, in place.
        train: trains ``module``.
    """
    if file.exists():
        with safe_open(file, framework="pt") as stored, torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(stored.get_tensor(name))
            known = {key: float(value) for key, value in stored.metadata().items()}
        module.eval().requires_grad_(False)
        return Fitted(**{key: value if key == "seconds" else int(value) for key, value in known.items()})  # type: ignore[arg-type]
    fitted = train()
    weights = {name: parameter.detach().contiguous() for name, parameter in module.named_parameters()}
    with atomic_path(file) as temporary:
        save_file(weights, temporary, metadata={key: str(value) for key, value in fitted.as_dict().items()})
    return fitted
