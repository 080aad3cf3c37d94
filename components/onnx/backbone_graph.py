"""The backbone as one float32 ONNX graph whose passes of every width agree to the last bit.

Owns the export (onnxruntime-genai's model builder) and the edits after it. It refuses graphs in which it does not find
exactly the pattern it edits. Its surprising decision: every attention gets one dummy query row. onnxruntime's
GroupQueryAttention rounds differently for exactly one query row than for two or more (FACTS), so a one-token pass would
differ from a verify pass in the last bit; with the dummy row it never sees a single row. The dummy's key and value land
behind the tentative rows of the buffer, where no query looks and the next pass overwrites them.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from components.core.errors import UserError
from components.core.manifest import BackboneCard
from components.onnx.graphs import (
    MICROSOFT,
    Nodes,
    key_input,
    key_output,
    save_graph,
    value_input,
    value_output,
)

PADDING_ROWS = 1
EMBEDDING = "model.embed_tokens.weight"
COSINE, SINE = "cos_cache", "sin_cache"
BUILDER_FILE = "model.onnx"


def export_backbone(source: Path, target: Path, card: BackboneCard, limits: tuple[int, int]) -> None:
    """Export a transformers directory to ``target`` (an .onnx path; weights beside it).

    Inputs of the graph: ``input_ids`` int64 [1, q]; ``past_length`` int64 [1], valid rows in the buffers;
    ``first_logit`` int64 [1], first of the q rows whose logits are wanted; per layer past keys and values, float32
    [1, kv_heads, rows, head_dim], bound to the same memory as the outputs ``present.*``. Other outputs: ``logits``
    float32 [1, q - first_logit, vocab_size]; ``hidden_states`` float32 [1, q, hidden_size], after the final norm.

    Args:
        source: folder with config.json, float32 weights and the tokenizer.
        target: file to write.
        card: shape of the model.
        limits: opset and IR version (:func:`components.onnx.graphs.version_limits`).

    Raises:
        UserError: the builder cannot export this model, or its graph has another shape than expected.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".builder-") as scratch:
        model = _run_builder(source, Path(scratch))
        edit_backbone(model, card, limits)
        save_graph(model, target)


def edit_backbone(model: onnx.ModelProto, card: BackboneCard, limits: tuple[int, int]) -> None:
    """All edits after the builder, in place."""
    _set_versions(model, limits)
    _count_rows_in_graph(model)
    padded = _pad_attention(model)
    if padded != card.layers:
        raise _unexpected(f"{padded} attention nodes for {card.layers} layers")
    _tie_output_to_embedding(model)
    _choose_logit_rows(model)
    _declare_inputs_and_outputs(model, card)
    _drop_unused(model)


def _run_builder(source: Path, folder: Path) -> onnx.ModelProto:
    from onnxruntime_genai.models.builder import create_model, parse_extra_options

    said = io.StringIO()
    arguments = ("", str(source), str(folder), "fp32", "cpu", str(folder / "cache"))
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            options = parse_extra_options(*arguments, ["include_hidden_states=true", "shared_embeddings=false"])
            create_model(*arguments, **options)
    except Exception as error:  # the builder raises bare exceptions of many kinds
        last = said.getvalue().strip().splitlines()[-1:]
        raise UserError(
            f"the model builder cannot export {source}",
            f"{error} {' '.join(last)}"[:300],
            "choose a Llama-like backbone",
        ) from error
    return onnx.load(folder / BUILDER_FILE)


def _unexpected(what: str) -> UserError:
    return UserError(
        "the exported backbone graph has an unknown shape",
        what,
        "install the pinned onnxruntime-genai (constraints.txt)",
    )


def _set_versions(model: onnx.ModelProto, limits: tuple[int, int]) -> None:
    """Lower the declared opset and IR version; refuse when that changes the meaning of a node."""
    opset, ir_version = limits
    declared = {entry.domain: entry for entry in model.opset_import}
    before = declared[""].version
    for op in {node.op_type for node in model.graph.node if node.domain == ""}:
        if op not in _standard_ops():
            continue  # onnxruntime's own operators that it registers in the standard domain
        old, new = (onnx.defs.get_schema(op, version).since_version for version in (before, min(before, opset)))
        if old != new:
            raise _unexpected(f"{op} of opset {before} differs from that of opset {opset}")
    declared[""].version = min(before, opset)
    model.ir_version = min(model.ir_version, ir_version)


def _standard_ops() -> frozenset[str]:
    return frozenset(schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == "")


def _count_rows_in_graph(model: onnx.ModelProto) -> None:
    """Replace the attention mask by ``past_length``; both row counts then include the dummy row."""
    writer = Nodes("/rows")
    zero = writer.constant("zero", np.array([0], dtype=np.int64))
    one = writer.constant("one", np.array([1], dtype=np.int64))
    shape = writer.add("Shape", "input_ids", start=1, end=2)
    last = writer.add("Add", "past_length", shape)  # index of the dummy row = rows attended - 1
    seqlens = writer.add("Cast", last, to=TensorProto.INT32)
    total = writer.add("Cast", writer.add("Add", last, one), to=TensorProto.INT32)
    total = writer.add("Squeeze", total, zero)
    attention = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]
    for node in attention:
        node.input[5], node.input[6] = seqlens, total
    _prepend(model, writer)


def _pad_attention(model: onnx.ModelProto) -> int:
    """Append a zero row to every attention's query, key and value; cut it off its output. Returns how many."""
    writer = Nodes("/padding")
    bounds = {
        "start": writer.constant("start", np.array([0], dtype=np.int64)),
        "end": writer.constant("end", np.array([-PADDING_ROWS], dtype=np.int64)),
        "axis": writer.constant("axis", np.array([1], dtype=np.int64)),
    }
    rows: dict[int, str] = {}
    edited: list[onnx.NodeProto] = []
    widths = _matmul_widths(model)
    for node in model.graph.node:
        if node.op_type != "GroupQueryAttention":
            edited.append(node)
            continue
        before = Nodes(f"{node.name}/before")
        for index in (0, 1, 2):
            if index < len(node.input) and node.input[index]:
                width = widths.get(node.input[index])
                if width is None:
                    raise _unexpected(f"{node.input[index]} is not the output of a matrix product")
                if width not in rows:
                    zeros = np.zeros((1, PADDING_ROWS, width), dtype=np.float32)
                    rows[width] = writer.constant(f"row_{width}", zeros)
                node.input[index] = before.add("Concat", node.input[index], rows[width], axis=1)
        while node.input and not node.input[-1]:
            node.input.pop()  # older runtimes know fewer optional inputs
        wanted = node.output[0]
        node.output[0] = f"{wanted}/padded"
        cut = helper.make_node(
            "Slice", [node.output[0], bounds["start"], bounds["end"], bounds["axis"]], [wanted], f"{node.name}/cut"
        )
        edited += [*before.nodes, node, cut]
    del model.graph.node[:]
    model.graph.node.extend(edited)
    model.graph.initializer.extend(writer.initializers)
    return sum(node.op_type == "GroupQueryAttention" for node in edited)


def _matmul_widths(model: onnx.ModelProto) -> dict[str, int]:
    """Last size of the output of each product with a weight (and of a bias added to one)."""
    sizes = {tensor.name: tensor.dims[-1] for tensor in model.graph.initializer}
    widths: dict[str, int] = {}
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in sizes:
            widths[node.output[0]] = sizes[node.input[1]]
        elif node.op_type == "Add" and node.input[0] in widths:
            widths[node.output[0]] = widths[node.input[0]]
    return widths


def _tie_output_to_embedding(model: onnx.ModelProto) -> None:
    """Where the output matrix equals the embedding, keep one of them: the product reads the embedding transposed."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    (product,) = [node for node in model.graph.node if "logits" in node.output]
    if EMBEDDING not in tensors:
        raise _unexpected(f"no initializer {EMBEDDING}")
    if product.op_type != "MatMul" or product.input[1] not in tensors:
        raise _unexpected("the logits are not a product with a weight")
    embedding, output = numpy_helper.to_array(tensors[EMBEDDING]), numpy_helper.to_array(tensors[product.input[1]])
    if output.shape[::-1] == embedding.shape and np.array_equal(output.T, embedding):
        product.op_type, product.domain, product.input[1] = "FusedMatMul", MICROSOFT, EMBEDDING
        product.attribute.append(helper.make_attribute("transB", 1))


def _choose_logit_rows(model: onnx.ModelProto) -> None:
    """Compute logits from row ``first_logit`` on: a prompt needs those of its last row only."""
    (product,) = [node for node in model.graph.node if "logits" in node.output]
    writer = Nodes("/logit_rows")
    end = writer.constant("end", np.array([np.iinfo(np.int64).max], dtype=np.int64))
    axis = writer.constant("axis", np.array([1], dtype=np.int64))
    rows = writer.add("Slice", product.input[0], "first_logit", end, axis)
    product.input[0] = rows
    position = list(model.graph.node).index(product)
    model.graph.node.insert(position, writer.nodes[0])
    model.graph.initializer.extend(writer.initializers)


def _declare_inputs_and_outputs(model: onnx.ModelProto, card: BackboneCard) -> None:
    cache = (1, card.kv_heads, "rows", card.head_dim)
    layers = range(card.layers)
    inputs: list[tuple[str, int, tuple[int | str, ...]]] = [
        ("input_ids", TensorProto.INT64, (1, "q")),
        ("past_length", TensorProto.INT64, (1,)),
    ]
    inputs.append(("first_logit", TensorProto.INT64, (1,)))
    inputs += [(name(layer), TensorProto.FLOAT, cache) for layer in layers for name in (key_input, value_input)]
    outputs: list[tuple[str, int, tuple[int | str, ...]]] = [
        ("logits", TensorProto.FLOAT, (1, "logit_rows", card.vocab_size)),
        ("hidden_states", TensorProto.FLOAT, (1, "q", card.hidden_size)),
    ]
    outputs += [(name(layer), TensorProto.FLOAT, cache) for layer in layers for name in (key_output, value_output)]
    produced = {name for node in model.graph.node for name in node.output}
    lost = [name for name, _, _ in outputs if name not in produced]
    if lost:
        raise _unexpected(f"no output {lost[0]}")
    for declared, wanted in ((model.graph.input, inputs), (model.graph.output, outputs)):
        del declared[:]
        declared.extend(helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in wanted)
    del model.graph.value_info[:]  # shapes of the builder, without the dummy row


def _prepend(model: onnx.ModelProto, writer: Nodes) -> None:
    nodes = [*writer.nodes, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(writer.initializers)


def _drop_unused(model: onnx.ModelProto) -> None:
    """Remove nodes and weights that no output needs any more."""
    needed = {value.name for value in model.graph.output}
    kept: list[onnx.NodeProto] = []
    for node in reversed(model.graph.node):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(node.input)
    weights = [tensor for tensor in model.graph.initializer if tensor.name in needed]
    del model.graph.node[:]
    model.graph.node.extend(reversed(kept))
    del model.graph.initializer[:]
    model.graph.initializer.extend(weights)
