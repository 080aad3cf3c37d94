"""Large channels of the activations made smaller and the weights that meet them larger, before both are quantized.

Owns the rewrite (SmoothQuant, arXiv 2211.10438), which is exact algebra: the float32 graph computes the same before and
after, but for rounding. It refuses observations that do not fit the graph. Its surprising decision: only factors that
cost no node are moved: into the norm before a product, or through the gate into the up projection. What attention
gives and the final hidden states stay as they are: the KV cache holds the one, the head reads the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from components.core.errors import UserError
from components.onnx.products import Product, find_products, product_name

NORMS = {"SimplifiedLayerNormalization": 1, "SkipSimplifiedLayerNormalization": 2}  # operator -> input of its weight
FLOOR = 1e-6  # of the mean: a channel that was never seen, or that no weight reads, is treated as that small


def smooth_backbone(model: onnx.ModelProto, energies: Mapping[str, NDArray[np.float32]]) -> list[str]:
    """Move factors between activations and weights, in place; returns the activations that were smoothed.

    Args:
        model: the edited float32 backbone graph, weights in memory.
        energies: mean square of each channel, [in], by :func:`components.onnx.products.product_name`.

    Raises:
        UserError: a product whose input was not observed, or has another width.
    """
    products = find_products(model)
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    uses = Counter(
        [name for node in model.graph.node for name in node.input] + [out.name for out in model.graph.output]
    )
    producers = {name: node for node in model.graph.node for name in node.output}
    groups: dict[str, list[Product]] = {}
    for product in products.values():
        groups.setdefault(product.activation, []).append(product)
    smoothed = {}
    # From the last product to the first: the factors of a down projection change the weights of the up projection.
    for activation, group in reversed(groups.items()):
        before = _weight_before(producers.get(activation), products, uses)
        if before is None or uses[activation] != len(group):
            continue
        factors = _factors(group, [weights[product.weight_name] for product in group], energies)
        smoothed[activation] = before
        weights[before] = weights[before] / factors
        weights |= {product.weight_name: weights[product.weight_name] * factors[:, None] for product in group}
    changed = {*smoothed.values(), *(product.weight_name for name in smoothed for product in groups[name])}
    for tensor in model.graph.initializer:
        if tensor.name in changed:
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(weights[tensor.name]), tensor.name))
    return list(smoothed)


def _weight_before(node: onnx.NodeProto | None, products: Mapping[str, Product], uses: Counter[str]) -> str | None:
    """The weight whose last axis scales the output of ``node`` and nothing else, if there is one."""
    if node is None:
        return None
    if node.op_type in NORMS:
        weight = str(node.input[NORMS[node.op_type]])
        return weight if uses[weight] == 1 else None
    if node.op_type == "Mul":
        for name in node.input:
            if name in products and uses[name] == 1:
                return products[name].weight_name
    return None


def _factors(
    group: Sequence[Product], weights: Sequence[NDArray[np.float32]], energies: Mapping[str, NDArray[np.float32]]
) -> NDArray[np.float32]:
    """What the activations are divided by and the weights multiplied with, [in]: the two are then equally large."""
    energy = energies.get(name := product_name(group[0].weight_name))
    if energy is None or energy.shape != (len(weights[0]),):
        seen = "nothing" if energy is None else f"{len(energy)} channels"
        raise UserError(
            f"the observed activations do not fit {name}",
            f"{seen}, not {len(weights[0])} channels",
            "observe this backbone",
        )
    weight = sum(np.square(matrix).sum(axis=1) for matrix in weights)
    ratio = np.maximum(energy, energy.mean() * FLOOR) / np.maximum(weight, weight.mean() * FLOOR)
    return np.asarray(ratio**0.25, dtype=np.float32)
