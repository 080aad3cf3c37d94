"""The matrix products with weights in the edited float32 backbone graph.

Owns how they are found and what they are called. It refuses kinds of product that it does not know: a rewrite shall not
leave one out unseen. Its surprising decision: a product that reads the embedding transposed is one of them, its weight
turned, so that every weight here is [in, out].
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from components.core.errors import UserError
from components.onnx.backbone_graph import EMBEDDING

OPERATORS = ("MatMul", "FusedMatMul", "Gemm")


@dataclass(frozen=True)
class Product:
    """``output = activation @ weight``.

    Attributes:
        activation, output: names of tensors, [1, q, in] and [1, q, out] float32.
        weight_name: the initializer.
        weight: float32 [in, out].
        tied: the initializer is the embedding, [out, in].
    """

    activation: str
    output: str
    weight_name: str
    weight: NDArray[np.float32]
    tied: bool


def product_name(name: str) -> str:
    """One name for a layer of torch and for the weight in the graph that does its work.

    The graph's builder joins the projections that read the same input into one ``qkv_proj``.
    """
    name = name.removesuffix(".MatMul.weight").removesuffix(".weight").replace(".self_attn.", ".attn.")
    return re.sub(r"\.[qkv]_proj$", ".qkv_proj", name)


def find_products(model: onnx.ModelProto) -> dict[str, Product]:
    """Every product with a weight, by the name of its output, in the order of the graph.

    Args:
        model: edited float32 backbone graph, weights in memory.

    Raises:
        UserError: there is none, one of another kind, or a weight that other nodes read too.
    """
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    readers = Counter(name for node in model.graph.node for name in node.input)
    found: dict[str, Product] = {}
    for node in model.graph.node:
        if node.op_type not in OPERATORS or not any(name in weights for name in node.input):
            continue
        attributes = {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}
        activation, name = node.input[:2]
        tied = node.op_type == "FusedMatMul" and attributes == {"transB": 1} and name == EMBEDDING
        if not tied and (node.op_type != "MatMul" or name not in weights):
            raise unknown_graph(f"{node.op_type} {node.name} with {attributes}")
        matrix = numpy_helper.to_array(weights[name])
        if matrix.dtype != np.float32 or matrix.ndim != 2:
            raise unknown_graph(f"weight {name} is {matrix.dtype} {list(matrix.shape)}")
        if readers[name] != (2 if tied else 1):
            raise unknown_graph(f"{readers[name]} nodes read {name}")
        found[node.output[0]] = Product(activation, node.output[0], name, matrix.T if tied else matrix, tied)
    if not found:
        raise unknown_graph("no product with a weight")
    return found


def unknown_graph(what: str) -> UserError:
    """The error for a graph that cannot be rewritten."""
    return UserError(
        "the backbone graph cannot be quantized",
        what,
        "export it in float32, or install the pinned onnxruntime-genai (constraints.txt)",
    )
