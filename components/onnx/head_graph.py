"""One draft step of the MTP head as an ONNX graph that reads the backbone's own KV buffers.

Owns the graph; written node by node, because an exporter would leave transposes on the weights. It
refuses to hold a second copy of the embedding: that weight, and the rotary tables, are pointers into the backbone's
data file. Its surprising decision: attention runs over every row of the buffer and masks what lies behind
``valid_rows``, so the buffers are read where they lie, never sliced or copied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from components.core.manifest import BackboneCard
from components.modeling.head import HeadConfig
from components.onnx.backbone_graph import COSINE, EMBEDDING, SINE
from components.onnx.graphs import MICROSOFT, Nodes, key_input, save_graph, value_input

Weights = Mapping[str, NDArray[np.float32]]
MASKED = np.float32(-1e30)


def export_head(config: HeadConfig, weights: Weights, card: BackboneCard, backbone: Path, target: Path) -> None:
    """Write the head's graph next to the backbone's.

    Inputs: ``token`` int64 [1, 1], x_{p+1} or the last draft; ``hidden`` float32 [1, 1, hidden_size], h_p or the last
    ``state``; ``valid_rows`` int64 [1], p + 1; keys and values of the layers in ``config.kv_layers``, float32
    [1, kv_heads, rows, head_dim]. Outputs: ``draft`` int64 [1, 1], a token id of the backbone; ``probability`` float32
    [1, 1], of the draft within the draft vocabulary; ``state`` float32 [1, 1, hidden_size], fed back to the next step.

    Args:
        config: shape of the head.
        weights: the head's state, by the names of :class:`components.modeling.head.MTPHead`.
        card: shape of the backbone.
        backbone: the exported backbone, in the folder of ``target``.
        target: file to write.

    Raises:
        ValueError: the two files do not lie side by side.
    """
    if backbone.parent != target.parent:
        raise ValueError(f"{target} must lie beside {backbone}")
    source = onnx.load(backbone, load_external_data=False)
    tensors = {tensor.name: tensor for tensor in source.graph.initializer}
    writer = _HeadWriter(config, weights, output_rows(source, backbone.parent)[list(config.draft_to_target)])
    draft, probability, state = writer.step()
    graph = helper.make_graph(
        writer.nodes.nodes,
        "mtp_head",
        _inputs(config, card),
        [
            helper.make_tensor_value_info(draft, TensorProto.INT64, (1, 1)),
            helper.make_tensor_value_info(probability, TensorProto.FLOAT, (1, 1)),
            helper.make_tensor_value_info(state, TensorProto.FLOAT, (1, 1, card.hidden_size)),
        ],
        [*writer.nodes.initializers, *(tensors[name] for name in (EMBEDDING, COSINE, SINE))],
    )
    model = helper.make_model(graph, opset_imports=source.opset_import, producer_name="frozen-mtp")
    model.ir_version = source.ir_version
    save_graph(model, target)


def output_rows(backbone: onnx.ModelProto, folder: Path) -> NDArray[np.float32]:
    """The backbone's output matrix, [vocab_size, hidden_size], read from its data file."""
    (product,) = [node for node in backbone.graph.node if "logits" in node.output]
    (tensor,) = [tensor for tensor in backbone.graph.initializer if tensor.name == product.input[1]]
    matrix: NDArray[np.float32] = numpy_helper.to_array(tensor, str(folder))
    return matrix if product.op_type == "FusedMatMul" else matrix.T


def _inputs(config: HeadConfig, card: BackboneCard) -> list[onnx.ValueInfoProto]:
    cache = (1, card.kv_heads, "rows", card.head_dim)
    inputs = [
        helper.make_tensor_value_info("token", TensorProto.INT64, (1, 1)),
        helper.make_tensor_value_info("hidden", TensorProto.FLOAT, (1, 1, card.hidden_size)),
        helper.make_tensor_value_info("valid_rows", TensorProto.INT64, (1,)),
    ]
    for layer in sorted(set(config.kv_layers)):
        inputs += [
            helper.make_tensor_value_info(name(layer), TensorProto.FLOAT, cache) for name in (key_input, value_input)
        ]
    return inputs


class _HeadWriter:
    """Writes the draft step."""

    def __init__(self, config: HeadConfig, weights: Weights, draft_rows: NDArray[np.float32]) -> None:
        self.config = config
        self.nodes = Nodes("/head")
        # Weights are stored [in, out]: a transpose left in the graph would be done again in every run.
        self.weight = {
            name: self.nodes.constant(name, value.T if value.ndim == 2 else value) for name, value in weights.items()
        }
        self.draft_rows = self.nodes.constant("draft_rows", draft_rows.T)
        integer = {"one": [1], "zero": [0], "last_axis": [-1], "flat": [1, 1, -1]}
        grouped = [1, config.kv_heads, config.query_heads // config.kv_heads, config.head_dim]
        self.integer = {
            name: self.nodes.constant(name, np.array(value, dtype=np.int64))
            for name, value in {**integer, "grouped": grouped}.items()
        }
        self.masked = self.nodes.constant("masked", np.array(MASKED))
        self.scale = self.nodes.constant("embedding_scale", np.array(config.embedding_scale, dtype=np.float32))
        target_ids = np.array(config.draft_to_target, dtype=np.int64)
        self.draft_to_target = self.nodes.constant("draft_to_target", target_ids)

    def step(self) -> tuple[str, str, str]:
        """The whole graph; returns the names of the outputs: draft, probability, state."""
        state = self._state("token", "hidden", self._visible_rows(), self._position())
        return (*self._draft(state), state)

    def _visible_rows(self) -> str:
        """Bool [rows]: true for rows 0..p."""
        add = self.nodes.add
        rows = add("Shape", key_input(self.config.kv_layers[0]), start=2, end=3)
        start, end = (add("Squeeze", name, self.integer["zero"]) for name in (self.integer["zero"], rows))
        step = add("Squeeze", self.integer["one"], self.integer["zero"])
        return add("Less", add("Range", start, end, step), "valid_rows")

    def _position(self) -> str:
        """Int64 [1, 1]: p, the query position of every step."""
        return self.nodes.add(
            "Unsqueeze", self.nodes.add("Sub", "valid_rows", self.integer["one"]), self.integer["zero"]
        )

    def _state(self, token: str, state: str, visible: str, position: str) -> str:
        """(token, state) -> the next normalised state, [1, 1, hidden_size]."""
        add, layers = self.nodes.add, self.config.kv_layers
        embedding = add("Mul", add("Gather", EMBEDDING, token), self.scale)
        inputs = [self._norm(embedding, "embedding_norm.weight"), self._norm(state, "state_norm.weight")]
        x = add("MatMul", add("Concat", *inputs, axis=-1), self.weight["pre_projection.weight"])
        for index, kv_layer in enumerate(layers):
            x = self._layer(f"layers.{index}", kv_layer, x, visible, position)
        return self._norm(x, "norm.weight", output="state")

    def _layer(self, name: str, kv_layer: int, x: str, visible: str, position: str) -> str:
        add, weight = self.nodes.add, self.weight
        queries = add("MatMul", self._norm(x, f"{name}.attention_norm.weight"), weight[f"{name}.q_proj.weight"])
        queries = add("RotaryEmbedding", queries, position, COSINE, SINE, domain=MICROSOFT)
        queries = add("Reshape", queries, self.integer["grouped"])
        alpha = 1.0 / math.sqrt(self.config.head_dim)
        scores = add("FusedMatMul", queries, key_input(kv_layer), domain=MICROSOFT, transB=1, alpha=alpha)
        shares = add("Softmax", add("Where", visible, scores, self.masked), axis=-1)
        mixed = add("Reshape", add("MatMul", shares, value_input(kv_layer)), self.integer["flat"])
        x = add("Add", x, add("MatMul", mixed, weight[f"{name}.o_proj.weight"]))
        inner = self._norm(x, f"{name}.mlp_norm.weight")
        gate = add("MatMul", inner, weight[f"{name}.gate_proj.weight"])
        gate = add("Mul", gate, add("Sigmoid", gate))
        inner = add("Mul", gate, add("MatMul", inner, weight[f"{name}.up_proj.weight"]))
        return add("Add", x, add("MatMul", inner, weight[f"{name}.down_proj.weight"]))

    def _norm(self, x: str, weight: str, output: str = "") -> str:
        return self.nodes.add(
            "SimplifiedLayerNormalization",
            x,
            self.weight[weight],
            output=output,
            axis=-1,
            epsilon=self.config.rms_norm_eps,
            stash_type=1,
        )

    def _draft(self, state: str) -> tuple[str, str]:
        """(draft as a backbone token id, its probability), each [1, 1]."""
        add = self.nodes.add
        logits = add("MatMul", state, self.draft_rows)
        best = add("ArgMax", logits, axis=-1, keepdims=0)
        top = add("ReduceMax", logits, self.integer["last_axis"], keepdims=0)
        total = add("ReduceLogSumExp", logits, self.integer["last_axis"], keepdims=0)
        draft = add("Gather", self.draft_to_target, best, output="draft")
        return draft, add("Exp", add("Sub", top, total), output="probability")
