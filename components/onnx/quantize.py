"""The float32 backbone graph, rewritten so that its linear layers multiply 8-bit integers.

Owns the rewrite. Each row of activations is quantized by its own largest value, so no row depends on its neighbours,
and a sum of integers is the same however wide a pass is: rows stay bit-identical at every width. It refuses graphs with
products that it does not know. Its surprising decision: before a row is quantized, every 64 of its channels are mixed
by a Hadamard matrix, and the weight's rows alike (QuaRot, arXiv 2404.00456). The product is the same, but an outlier
channel, spread over 64, no longer decides the scale of its whole row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from components.onnx.graphs import MICROSOFT, Nodes
from components.onnx.products import Product, find_products

LEVELS = 127  # codes of activations run from 1 to 255 around the code of zero: as far down as up
ZERO_CODE = 128
MIXED_CHANNELS = 64
LOGITS = "logits"
SMALLEST = 1e-30  # zeros are divided by this instead of by zero


@dataclass(frozen=True)
class Codes:
    """How a weight is stored.

    Attributes:
        signed: as int8, which onnxruntime multiplies fastest on x86; else as uint8 around 128.
        levels: codes run from -levels to levels around the code of zero.
    """

    signed: bool
    levels: int

    @property
    def zero(self) -> np.int8 | np.uint8:
        """The code of zero, in the type of the codes."""
        return np.int8(0) if self.signed else np.uint8(ZERO_CODE)


# Without VNNI, x86 adds two products of an unsigned and a signed code in 16 bits and saturates silently; 2 * 255 * 64
# still fits. Unsigned weights take another kernel, without that step.
UNSIGNED, SIGNED = Codes(signed=False, levels=127), Codes(signed=True, levels=64)


@dataclass(frozen=True)
class Precision:
    """Which codes the weights get; activations are unsigned 8-bit codes in every precision.

    Attributes:
        name: what a manifest or a report calls it.
        layers: weights inside the layers.
        output: the output matrix, and with it a tied embedding: the eighth bit costs little there and saves argmaxes.
    """

    name: str
    layers: Codes
    output: Codes


PRECISIONS = {
    precision.name: precision
    for precision in (Precision("int8", UNSIGNED, UNSIGNED), Precision("int8_fast", SIGNED, UNSIGNED))
}


def quantize_backbone(model: onnx.ModelProto, precision: Precision) -> None:
    """Rewrite every product with a weight, in place; inputs and outputs of the graph stay as they are.

    Where the output matrix is the embedding, its codes are stored once, a row for each token: the embedding is decoded
    from the rows it looks up, the product reads them transposed (onnxruntime transposes once, when it loads the graph).

    Args:
        model: what :func:`components.onnx.backbone_graph.edit_backbone` left, weights in memory.
        precision: how to store the weights.

    Raises:
        UserError: a product of another kind than the backbone graph has.
    """
    products = find_products(model)
    writer = _Writer(precision, {product.weight_name: product for product in products.values()})
    for node in model.graph.node:
        if node.output[0] in products:
            writer.product(products[node.output[0]])
        elif node.op_type == "Gather" and node.input[0] in writer.products:
            writer.look_up(node)
        else:
            writer.nodes.nodes.append(node)
    kept = [tensor for tensor in model.graph.initializer if tensor.name not in writer.products]
    del model.graph.node[:]
    model.graph.node.extend(writer.nodes.nodes)
    del model.graph.initializer[:]
    model.graph.initializer.extend([*kept, *writer.nodes.initializers])


def encode_weight(weight: NDArray[np.float32], levels: int) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
    """Codes of a weight [in, out] within -levels..levels, and the scale of each of its outputs, [out]."""
    scales = np.maximum(np.abs(weight).max(axis=0), np.float32(SMALLEST)) / np.float32(levels)
    return np.rint(weight / scales).astype(np.int16), scales


def hadamard(size: int) -> NDArray[np.float32]:
    """The symmetric orthogonal matrix of Sylvester, float32 [size, size]; ``size`` is a power of two."""
    matrix = np.ones((1, 1), dtype=np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(math.sqrt(size))


def mixed_together(channels: int) -> int:
    """How many neighbouring channels are mixed: the largest power of two, up to 64, that divides ``channels``."""
    return math.gcd(channels, MIXED_CHANNELS)


def mix_rows(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """A weight [in, out] for activations whose neighbouring channels are mixed."""
    size = mixed_together(len(weight))
    mixed: NDArray[np.float32] = (hadamard(size) @ weight.reshape(-1, size, weight.shape[1])).reshape(weight.shape)
    return mixed


@dataclass
class _Writer:
    """Writes the new graph's nodes, in order."""

    precision: Precision
    products: Mapping[str, Product]
    nodes: Nodes = field(default_factory=lambda: Nodes("/quantized"))
    stored: dict[str, tuple[str, str]] = field(default_factory=dict)
    activations: dict[str, tuple[str, str]] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)

    def product(self, product: Product) -> None:
        """Sums of integers, times the scale of the output, times the largest value of the row."""
        codes, largest = self._encode(product.activation, len(product.weight))
        weight, scales = self._store(product)
        if product.tied:
            weight = self.nodes.add("Transpose", weight, perm=[1, 0])
        zero = self._codes_of(product).zero
        zeros = self._scalar("zero", np.uint8(ZERO_CODE)), self._scalar(f"zero_{zero.dtype}", zero)
        inputs = (codes, weight, self._scalar("one", np.float32(1)), scales, *zeros)
        self.nodes.add(
            "Mul", self.nodes.add("MatMulIntegerToFloat", *inputs, domain=MICROSOFT), largest, output=product.output
        )

    def look_up(self, node: onnx.NodeProto) -> None:
        """Rows of the tied embedding, decoded from the codes that the output product reads."""
        add, product = self.nodes.add, self.products[node.input[0]]
        codes, scales = self._store(product)
        rows = add("Cast", add("Gather", codes, node.input[1]), to=TensorProto.FLOAT)
        rows = add("Sub", rows, self._scalar("embedding_zero", np.float32(self._codes_of(product).zero)))
        scale = add("Unsqueeze", add("Gather", scales, node.input[1]), self._integers("last_axis", -1))
        scale = add("Mul", scale, self._scalar("levels", np.float32(LEVELS)))
        add("Mul", self._mix(rows, len(product.weight)), scale, output=node.output[0])

    def _encode(self, activation: str, channels: int) -> tuple[str, str]:
        """Unsigned codes [1, q, channels] of mixed activations, and the largest value of each row, [1, q, 1]."""
        if activation not in self.activations:
            add, last_axis = self.nodes.add, self._integers("last_axis", -1)
            mixed = self._mix(activation, channels)
            largest = add("ReduceMax", add("Abs", mixed), last_axis, keepdims=1)
            largest = add("Max", largest, self._scalar("smallest", np.float32(SMALLEST)))
            step, zero = self._scalar("step", np.float32(1 / LEVELS)), self._scalar("zero", np.uint8(ZERO_CODE))
            self.activations[activation] = add("QuantizeLinear", add("Div", mixed, largest), step, zero), largest
        return self.activations[activation]

    def _store(self, product: Product) -> tuple[str, str]:
        """Names of the codes, [in, out] or for the embedding [out, in], and of the scales, [out]."""
        name = product.weight_name
        if name not in self.stored:
            kind = self._codes_of(product)
            codes, scales = encode_weight(mix_rows(product.weight), kind.levels)
            codes = (codes.T if product.tied else codes) + int(kind.zero)
            self.stored[name] = (
                self.nodes.constant(f"{name}.codes", codes.astype(kind.zero.dtype)),
                self.nodes.constant(f"{name}.scales", scales / np.float32(LEVELS)),
            )
        return self.stored[name]

    def _codes_of(self, product: Product) -> Codes:
        return self.precision.output if product.output == LOGITS else self.precision.layers

    def _mix(self, rows: str, channels: int) -> str:
        """Mix neighbouring channels of [1, q, channels]; mixing twice gives the same rows again."""
        size = mixed_together(channels)
        if size == 1:
            return rows
        add, matrix = self.nodes.add, self._constant(f"hadamard_{size}", hadamard(size))
        apart = add("Reshape", rows, self._integers(f"apart_{size}", 1, -1, size))
        return add("Reshape", add("MatMul", apart, matrix), self._integers(f"rows_{channels}", 1, -1, channels))

    def _integers(self, name: str, *values: int) -> str:
        return self._constant(name, np.array(values, dtype=np.int64))

    def _scalar(self, name: str, value: np.generic) -> str:
        full = f"{self.nodes.prefix}/{name}"
        if name not in self.shared:  # as a tensor without dimensions, which `Nodes.constant` would turn into a vector
            self.nodes.initializers.append(numpy_helper.from_array(np.asarray(value), full))
            self.shared[name] = full
        return self.shared[name]

    def _constant(self, name: str, value: NDArray[np.generic]) -> str:
        if name not in self.shared:
            self.shared[name] = self.nodes.constant(name, value)
        return self.shared[name]
