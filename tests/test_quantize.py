"""8-bit graphs: rows agree at every pass width to the last bit, sums are those of integers, the model stays itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from components.core.errors import UserError
from components.core.manifest import Manifest
from components.modeling.backbone import Backbone
from components.onnx.activations import observe_activations
from components.onnx.backbone_graph import EMBEDDING
from components.onnx.graphs import MICROSOFT, default_opset, save_graph, version_limits
from components.onnx.products import find_products, product_name
from components.onnx.quantize import PRECISIONS, encode_weight, hadamard, mix_rows, mixed_together, quantize_backbone
from components.onnx.runtime import OrtBackbone
from components.onnx.sessions import check_interface, open_session
from components.onnx.smooth import smooth_backbone
from helpers_bundle import random_head, tiny_bundle

CPU = ["CPUExecutionProvider"]


@pytest.fixture(scope="module")
def exported(tiny_backbone_dir: Path, backbone: Backbone, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The float32 graph and its manifest."""
    folder = tmp_path_factory.mktemp("quantize") / "bundle"
    manifest = tiny_bundle(folder, tiny_backbone_dir, backbone, random_head(backbone))
    return folder / "backbone.onnx", manifest


@pytest.fixture(scope="module")
def energies(backbone: Backbone) -> dict[str, np.ndarray]:
    random = np.random.default_rng(9)
    return observe_activations(backbone, [random.integers(0, 300, size).tolist() for size in (20, 31)])


@pytest.fixture(scope="module")
def smoothed(exported: Any, energies: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The smoothed float32 graph, and the activations that were."""
    model = onnx.load(exported[0])
    names = smooth_backbone(model, energies)
    path = tmp_path_factory.mktemp("smoothed") / "backbone.onnx"
    save_graph(model, path)
    return path, names


@pytest.fixture(scope="module", params=sorted(PRECISIONS))
def quantized(smoothed: Any, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny backbone's graph in one precision."""
    model = onnx.load(smoothed[0])
    quantize_backbone(model, PRECISIONS[request.param])
    path = tmp_path_factory.mktemp(request.param) / "backbone.onnx"
    save_graph(model, path)
    return path


def passes(path: Path, manifest: Manifest, threads: int) -> Callable[[list[int], list[int], int], list[np.ndarray]]:
    """(prompt, tokens after it, width) -> logits and hidden of those tokens, and the KV rows they left."""
    side = OrtBackbone(open_session(path, threads), manifest)

    def run(prompt: list[int], tokens: list[int], width: int) -> list[np.ndarray]:
        side.prefill(prompt)
        logits, hidden = [], []
        for at in range(0, len(tokens), width):
            side.verify(tokens[at : at + width])
            logits.append(side.last_logits.copy())
            hidden.append(side.pass_hidden.copy())
            side.keep(len(tokens[at : at + width]))
        rows = [buffer[:, :, : side.length].copy() for buffer in side.buffers.values()]
        return [np.concatenate(logits), np.concatenate(hidden), *rows]

    return run


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_agree_to_the_last_bit_at_every_width(quantized: Path, exported: Any, threads: int) -> None:
    run, random = passes(quantized, exported[1], threads), np.random.default_rng(threads)
    for past in (1, 7, 31, 70):
        prompt, after = (random.integers(0, 300, size).tolist() for size in (past, 8))
        reference = run(prompt, after, 1)
        for width in range(2, 9):
            for left, right in zip(run(prompt, after, width), reference, strict=True):
                np.testing.assert_array_equal(left, right)


def test_it_is_still_the_same_model(quantized: Path, exported: Any) -> None:
    prompt, after = (np.random.default_rng(5).integers(0, 300, size).tolist() for size in (6, 64))
    wanted = passes(*exported, threads=1)(prompt, after, 8)
    for left, right in zip(passes(quantized, exported[1], 1)(prompt, after, 8), wanted, strict=True):
        assert 1e-4 < np.linalg.norm(left - right) / np.linalg.norm(right) < 0.2
        assert left.shape == right.shape
    logits = passes(quantized, exported[1], 1)(prompt, after, 8)[0]
    assert (logits.argmax(axis=-1) == wanted[0].argmax(axis=-1)).mean() > 0.7


def test_the_interface_and_the_versions_stay(quantized: Path, exported: Any) -> None:
    check_interface(open_session(quantized, 1), exported[1].graphs["backbone"])
    model = onnx.load(quantized, load_external_data=False)
    assert (default_opset(model), model.ir_version) <= version_limits("1.20.0")


def test_sums_are_those_of_integers(quantized: Path, exported: Any) -> None:
    """Every product of the graph, on the activations that it really gets, against numpy's int32."""
    model = onnx.load(quantized)
    products = [node for node in model.graph.node if node.op_type == "MatMulIntegerToFloat"]
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    weights |= {node.output[0]: weights[node.input[0]].T for node in model.graph.node if node.op_type == "Transpose"}
    watched = sorted({name for node in products for name in (node.input[0], node.output[0])})
    model.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.UINT8 if "QuantizeLinear" in name else TensorProto.FLOAT, None)
        for name in watched
    )
    session = ort.InferenceSession(model.SerializeToString(), providers=CPU)
    random, card = np.random.default_rng(2), exported[1].backbone
    feeds = {"input_ids": random.integers(0, 300, (1, 12)), "past_length": np.array([0]), "first_logit": np.array([0])}
    cache = np.zeros((1, card.kv_heads, 16, card.head_dim), dtype=np.float32)
    feeds |= {value.name: cache.copy() for value in session.get_inputs() if value.name not in feeds}
    seen = dict(zip(watched, session.run(watched, feeds), strict=True))
    assert len(products) == 4 * 5 + 1
    for node in products:
        codes, weight, _, scales, zero, weight_zero = node.input
        left = seen[codes].astype(np.int32) - weights[zero]
        right = weights[weight].astype(np.int32) - weights[weight_zero]
        assert left.max() == 127 or left.min() == -127  # a row uses its whole range
        np.testing.assert_array_equal(seen[node.output[0]], (left @ right).astype(np.float32) * weights[scales])


def test_the_embedding_is_stored_once(quantized: Path, backbone: Backbone) -> None:
    model = onnx.load(quantized, load_external_data=False)
    vocab, hidden = backbone.card.vocab_size, backbone.card.hidden_size
    large = [tensor for tensor in model.graph.initializer if vocab in tensor.dims and hidden in tensor.dims]
    assert [(tensor.name, list(tensor.dims)) for tensor in large] == [
        (f"/quantized/{EMBEDDING}.codes", [vocab, hidden])
    ]
    parameters = sum(tensor.numel() for tensor in backbone.model.parameters())
    stored = quantized.with_name("backbone.onnx.data").stat().st_size
    assert parameters < stored < parameters + 2 * 1024 * 8 * 4 + 70 * 4096  # rotary tables; a page a tensor


# --- smoothing ----------------------------------------------------------------------------------------------------


def test_a_smoothed_graph_computes_the_same(smoothed: Any, exported: Any) -> None:
    prompt, after = (np.random.default_rng(5).integers(0, 300, size).tolist() for size in (6, 24))
    wanted = passes(*exported, threads=1)(prompt, after, 8)
    for left, right in zip(passes(smoothed[0], exported[1], 1)(prompt, after, 8), wanted, strict=True):
        np.testing.assert_allclose(left, right, atol=2e-4 * np.abs(right).max())


def test_what_norms_and_gates_give_is_smoothed_and_nothing_else(smoothed: Any, exported: Any, energies: Any) -> None:
    """Attention gives values of the cache, and the last norm the hidden states: neither may change."""
    before, after = (find_products(onnx.load(path)) for path in (exported[0], smoothed[0]))
    changed = [
        product_name(product.weight_name).split(".", 3)[-1]
        for product in before.values()
        if product.activation in smoothed[1]
    ]
    assert changed == ["attn.qkv_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"] * 4
    for name, product in before.items():
        key = product_name(product.weight_name)
        if key.endswith(("o_proj", "embed_tokens")):
            np.testing.assert_array_equal(product.weight, after[name].weight)
        if key.endswith("down_proj"):  # channels and the weights that meet them are now equally large
            factors = after[name].weight[:, 0] / product.weight[:, 0]
            ratio = energies[key] / factors**2 / np.square(after[name].weight).sum(axis=1)
            np.testing.assert_allclose(ratio, np.median(ratio), rtol=1e-3)


@pytest.mark.parametrize("name", sorted(PRECISIONS))
def test_smoothing_lowers_the_error_of_uneven_channels(name: str) -> None:
    random = np.random.default_rng(3)
    scale = random.lognormal(0.0, 1.5, 64).astype(np.float32)
    weight, rows = (random.standard_normal(shape).astype(np.float32) for shape in ((64, 32), (1, 40, 64)))
    nodes = (
        helper.make_node("SimplifiedLayerNormalization", ["x", "scale"], ["z"], axis=-1, epsilon=1e-6),
        helper.make_node("MatMul", ["z", "w.MatMul.weight"], ["y"]),
    )
    errors = []
    for energies in ({}, {"w": scale**2}):
        model = small_graph(*nodes, weights={"scale": scale, "w.MatMul.weight": weight})
        (wanted,) = run(model, rows)
        if energies:
            assert smooth_backbone(model, energies) == ["z"]
            np.testing.assert_allclose(run(model, rows)[0], wanted, atol=1e-3)
        quantize_backbone(model, PRECISIONS[name])
        errors.append(np.square(run(model, rows)[0] - wanted).mean())
    assert errors[1] < 0.7 * errors[0]


def test_observations_are_means_of_squares(backbone: Backbone, energies: Any) -> None:
    assert {name.split(".", 3)[-1] for name in energies} == {
        *("attn.qkv_proj", "attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "lm_head")
    }
    tokens = [[5, 6, 7], [8, 9]]
    (found,) = [value for name, value in observe_activations(backbone, tokens).items() if name == "lm_head"]
    hidden = [backbone.model.model(torch.tensor([part])).last_hidden_state[0] for part in tokens]
    np.testing.assert_allclose(found, torch.cat(hidden).square().mean(dim=0).numpy(), rtol=1e-4)
    assert not any(module._forward_pre_hooks for module in backbone.model.modules())


def test_observations_that_do_not_fit_are_refused(exported: Any, backbone: Backbone, energies: Any) -> None:
    model = onnx.load(exported[0])
    with pytest.raises(UserError, match="do not fit"):
        smooth_backbone(model, {})
    with pytest.raises(UserError, match="5 channels, not 128"):
        smooth_backbone(model, {**energies, "model.layers.3.mlp.down_proj": np.ones(5, dtype=np.float32)})
    with pytest.raises(UserError, match="at least one text"):
        observe_activations(backbone, [])


# --- weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [127, 64])
def test_codes_use_their_range_and_are_within_half_a_step(levels: int) -> None:
    weight = np.random.default_rng(0).standard_normal((63, 40)).astype(np.float32)
    codes, scales = encode_weight(weight, levels)
    assert np.abs(codes).max(axis=0).tolist() == [levels] * 40
    assert (np.abs(codes * scales - weight) <= scales * 0.5001).all()
    assert not encode_weight(np.zeros((4, 2), dtype=np.float32), 127)[0].any()


def test_two_products_with_signed_codes_fit_into_16_bits() -> None:
    """What an x86 without VNNI adds before it widens; the largest unsigned code is 255."""
    for codes in {codes for precision in PRECISIONS.values() for codes in (precision.layers, precision.output)}:
        assert not codes.signed or 2 * 255 * codes.levels <= np.iinfo(np.int16).max


@pytest.mark.parametrize(("channels", "together"), [(576, 64), (1536, 64), (24, 8), (7, 1)])
def test_mixing_keeps_the_product_and_spreads_an_outlier(channels: int, together: int) -> None:
    random = np.random.default_rng(channels)
    weight, row = random.standard_normal((channels, 5)), random.standard_normal((1, channels))
    assert mixed_together(channels) == together
    mixed = (row.reshape(-1, together) @ hadamard(together)).reshape(1, -1)
    np.testing.assert_allclose(mixed @ mix_rows(weight.astype(np.float32)), row @ weight, atol=1e-4)
    outlier = np.zeros(together)
    outlier[0] = 1.0
    assert np.abs(outlier @ hadamard(together)).max() == pytest.approx(together**-0.5)


# --- graphs that it does and does not know ------------------------------------------------------------------------


def small_graph(*nodes: onnx.NodeProto, weights: dict[str, np.ndarray], channels: int = 64) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, "q", channels))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    versions = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=versions, ir_version=10)


def run(model: onnx.ModelProto, rows: np.ndarray) -> list[np.ndarray]:
    """The outputs of a small graph."""
    return list(ort.InferenceSession(model.SerializeToString(), providers=CPU).run(None, {"x": rows}))


@pytest.mark.parametrize("name", sorted(PRECISIONS))
def test_an_outlier_channel_does_not_decide_for_its_row(name: str) -> None:
    random = np.random.default_rng(1)
    weight, rows = (random.standard_normal(shape).astype(np.float32) for shape in ((64, 32), (1, 4, 64)))
    rows[0, :, 9] = 80.0
    weight[9] *= 0.1
    model = small_graph(helper.make_node("MatMul", ["x", "w"], ["y"]), weights={"w": weight})
    quantize_backbone(model, PRECISIONS[name])
    step = np.abs(rows).max(axis=-1, keepdims=True) / 127
    plain = np.abs(np.rint(rows / step) * step @ weight - rows @ weight).mean()
    assert np.abs(run(model, rows)[0] - rows @ weight).mean() < (0.5 if name == "int8" else 0.8) * plain


@pytest.mark.parametrize("name", sorted(PRECISIONS))
def test_a_row_of_zeros_stays_one_and_no_row_depends_on_its_neighbours(name: str) -> None:
    random = np.random.default_rng(1)
    weight, rows = (random.standard_normal(shape).astype(np.float32) for shape in ((64, 32), (1, 4, 64)))
    rows[0, 1] = 0.0
    model = small_graph(helper.make_node("MatMul", ["x", "w"], ["y"]), weights={"w": weight})
    quantize_backbone(model, PRECISIONS[name])
    (before,) = run(model, rows)
    assert not before[0, 1].any()
    rows[0, 3] *= 1e4
    np.testing.assert_array_equal(run(model, rows)[0][0, :3], before[0, :3])


@pytest.mark.parametrize("name", sorted(PRECISIONS))
def test_the_largest_codes_of_all_do_not_saturate(name: str) -> None:
    """An outlier channel of each 64 becomes 64 equal ones: every code at its end, activations and weights."""
    weight, rows = np.zeros((256, 3), dtype=np.float32), np.zeros((1, 2, 256), dtype=np.float32)
    weight[::64], rows[..., ::64] = [1.0, -1.0, 1.0], [[1.0], [-1.0]]
    model = small_graph(helper.make_node("MatMul", ["x", "w"], ["y"]), weights={"w": weight}, channels=256)
    quantize_backbone(model, PRECISIONS[name])
    np.testing.assert_allclose(run(model, rows)[0], rows @ weight, rtol=1e-5)


MATRIX = np.ones((64, 64), dtype=np.float32)


@pytest.mark.parametrize(
    ("nodes", "weight", "said"),
    [
        ([helper.make_node("Gemm", ["x", "w"], ["y"])], MATRIX, "Gemm"),
        ([helper.make_node("MatMul", ["w", "x"], ["y"])], MATRIX, "MatMul"),
        ([helper.make_node("FusedMatMul", ["x", "w"], ["y"], domain=MICROSOFT, alpha=2.0)], MATRIX, "FusedMatMul"),
        ([helper.make_node("MatMul", ["x", "w"], ["y"])], MATRIX.astype(np.float16), "float16"),
        ([helper.make_node("MatMul", ["x", "w"], ["y"])], MATRIX[0], r"\[64\]"),
        ([helper.make_node("Add", ["x", "w"], ["y"])], MATRIX, "no product"),
        (
            [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("MatMul", ["z", "w"], ["y"])],
            MATRIX,
            "2 nodes read w",
        ),
    ],
)
def test_unknown_products_are_refused(nodes: list[onnx.NodeProto], weight: np.ndarray, said: str) -> None:
    model = small_graph(*nodes, weights={"w": weight})
    before = model.SerializeToString()
    with pytest.raises(UserError, match=said):
        quantize_backbone(model, PRECISIONS["int8"])
    assert model.SerializeToString() == before


def test_products_of_activations_are_left_alone() -> None:
    model = small_graph(
        helper.make_node("MatMul", ["x", "w"], ["z"]),
        helper.make_node("MatMul", ["z", "z"], ["y"]),
        weights={"w": MATRIX},
    )
    assert list(find_products(model)) == ["z"]
