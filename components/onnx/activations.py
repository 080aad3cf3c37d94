"""How much each input channel of the backbone's linear layers carries, seen on a few texts of its own.

Owns the observation, with torch. It refuses to observe nothing.
Its surprising decision: it keeps the mean of the squares, not the largest value as SmoothQuant does: where channels are
mixed before they are quantized, what one of them adds to the error of the row is its energy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from components.core.errors import UserError
from components.modeling.backbone import Backbone
from components.onnx.products import product_name


@torch.inference_mode()
def observe_activations(backbone: Backbone, sequences: Sequence[Sequence[int]]) -> dict[str, NDArray[np.float32]]:
    """Mean square of each input channel of each linear layer, [in] float32, by :func:`product_name`.

    Args:
        backbone: the model in float32.
        sequences: token ids, prompt and answer together; a dozen are enough.

    Raises:
        UserError: there is no sequence.
    """
    if not sequences:
        raise UserError("activations need at least one text to be seen on", "0 sequences", "run `mtp repro distil`")
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def watch(name: str) -> Callable[[nn.Module, Any], None]:
        def seen(_: nn.Module, inputs: Any) -> None:
            rows = inputs[0].flatten(0, -2).double()
            sums[name] = sums.get(name, torch.zeros(rows.shape[-1])) + rows.square().sum(dim=0)
            counts[name] = counts.get(name, 0) + len(rows)

        return seen

    layers = [(name, layer) for name, layer in backbone.model.named_modules() if isinstance(layer, nn.Linear)]
    hooks = [layer.register_forward_pre_hook(watch(product_name(name))) for name, layer in layers]
    try:
        for sequence in sequences:
            backbone.model(input_ids=torch.tensor([list(sequence)]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: (total / counts[name]).float().numpy() for name, total in sums.items()}
