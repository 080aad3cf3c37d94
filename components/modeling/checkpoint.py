"""Checkpoints of a training run, in safetensors and JSON.

Owns what "resume" means: weights, AdamW moments, the step reached, the figures so far and the best epoch's weights, all
in one file, because a kill between two files would pair the figures of one epoch with the weights of another. It
refuses a checkpoint made from other data or parameters: the key in its folder's name differs. Its surprising decision:
no generator state is kept, because after the first step nothing is random but the order of batches, a function of
(seed, epoch).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from components.core.files import atomic_path

CHECKPOINT_FILE = "checkpoint.safetensors"
BEST = "best."


@dataclass
class Progressed:
    """How far a run has come.

    Attributes:
        step: optimizer steps done.
        figures: anything JSON can hold that the run has to remember.
        best: state dict of the best epoch so far; empty before the first one ends.
    """

    step: int = 0
    figures: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Tensor] = field(default_factory=dict)


def save_checkpoint(folder: Path, head: nn.Module, optimizer: torch.optim.Optimizer, progressed: Progressed) -> None:
    """Write one file, atomically; it replaces the one before."""
    tensors = {f"{BEST}{name}": tensor for name, tensor in progressed.best.items()}
    for name, parameter in head.named_parameters():
        tensors[f"weight.{name}"] = parameter.detach().contiguous()
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}.{name}"] = value.detach().contiguous()
    metadata = {"step": str(progressed.step), "figures": json.dumps(progressed.figures)}
    with atomic_path(folder / CHECKPOINT_FILE) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def load_checkpoint(folder: Path, head: nn.Module, optimizer: torch.optim.Optimizer) -> Progressed:
    """Restore weights and moments in place; a missing or damaged checkpoint starts the run anew."""
    path = folder / CHECKPOINT_FILE
    if not path.exists():
        return Progressed()
    try:
        with safe_open(path, framework="pt") as stored:
            metadata = stored.metadata()
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - safe_open has no __iter__
    except (SafetensorError, OSError):
        return Progressed()
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(tensors[f"weight.{name}"])
            keys = ("step", "exp_avg", "exp_avg_sq")
            optimizer.state[parameter] = {key: tensors[f"{key}.{name}"].clone() for key in keys}
    best = {name.removeprefix(BEST): tensor for name, tensor in tensors.items() if name.startswith(BEST)}
    return Progressed(int(metadata["step"]), json.loads(metadata["figures"]), best)
