"""Export: the graphs compute what torch computes, at every pass width to the last bit, and the folder is whole."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from components.core.errors import UserError
from components.core.manifest import MANIFEST_FILE, bundle_hash, read_manifest
from components.modeling.backbone import Backbone, load_backbone
from components.modeling.session import TorchBackbone, TorchHead
from components.onnx.backbone_graph import COSINE, EMBEDDING, SINE
from components.onnx.graphs import version_limits
from components.onnx.parity import compare_with_torch, torch_drafts
from components.onnx.runtime import Bundle, open_bundle
from helpers_bundle import DRAFT_LENGTH, MAX_LENGTH, SETTINGS, first_drafts, random_head, tiny_bundle

PADDING = 1


@pytest.fixture(scope="module")
def backbone(tiny_backbone_dir: Path) -> Backbone:
    return load_backbone(tiny_backbone_dir)


@pytest.fixture(scope="module")
def bundle_dir(tiny_backbone_dir: Path, backbone: Backbone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "bundle"
    tiny_bundle(folder, tiny_backbone_dir, backbone, random_head(backbone))
    return folder


@pytest.fixture(scope="module", params=[1, 2], ids=["1-thread", "2-threads"])
def bundle(bundle_dir: Path, request: pytest.FixtureRequest) -> Bundle:
    return open_bundle(bundle_dir, request.param)


def one_by_one(bundle: Bundle, tokens: list[int], width: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Logits and hidden of ``tokens`` after the present rows, in passes of ``width``; and the KV rows they left."""
    side, logits, hidden = bundle.backbone, [], []
    start = side.length
    for at in range(0, len(tokens), width):
        part = tokens[at : at + width]
        side.verify(part)
        logits.append(side.last_logits.copy())
        hidden.append(side.pass_hidden.copy())
        side.keep(len(part))
    rows = [buffer[:, :, start : side.length].copy() for buffer in side.buffers.values()]
    return np.concatenate(logits), np.concatenate(hidden), rows


@pytest.mark.parametrize("past", [1, 7, 31, 70])
def test_passes_of_every_width_agree_to_the_last_bit(bundle: Bundle, past: int) -> None:
    random = np.random.default_rng(past)
    prompt, after = (random.integers(0, 300, size).tolist() for size in (past, 8))
    bundle.backbone.prefill(prompt)
    reference = one_by_one(bundle, after, width=1)
    for width in range(2, 9):
        bundle.backbone.prefill(prompt)
        for left, right in zip(one_by_one(bundle, after, width), reference, strict=True):
            np.testing.assert_array_equal(left, right)


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="seen on x86 kernels; others may agree anyway"
)
def test_without_the_dummy_row_widths_do_differ(bundle_dir: Path, tmp_path: Path) -> None:
    """The test above can fail: with the padding taken out, one-row passes differ in the last bits."""
    folder = tmp_path / "bundle"
    shutil.copytree(bundle_dir, folder)
    model = onnx.load(folder / "backbone.onnx", load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "Concat" and "GroupQueryAttention" in node.name:
            node.op_type, kept = "Identity", node.input[0]
            del node.input[:], node.attribute[:]
            node.input.append(kept)
        elif node.op_type == "Slice" and "GroupQueryAttention" in node.name:
            node.op_type, kept = "Identity", node.input[0]
            del node.input[:]
            node.input.append(kept)
        elif node.op_type == "Add" and node.name.startswith("/rows/1/"):  # the count of earlier rows plus q, less one
            node.output[0] = "unpadded"
    one = onnx.helper.make_node("Sub", ["unpadded", "/rows/one"], ["/rows/1/Add"])
    model.graph.node.insert(2, one)
    onnx.save(model, folder / "backbone.onnx")
    bundle = open_bundle(folder, 1, verify_hashes=False)
    tokens = np.random.default_rng(0).integers(0, 300, 48).tolist()
    bundle.backbone.prefill(tokens[:40])
    narrow = one_by_one(bundle, tokens[40:], 1)[0]
    bundle.backbone.prefill(tokens[:40])
    wide = one_by_one(bundle, tokens[40:], 4)[0]
    np.testing.assert_allclose(narrow, wide, atol=1e-3)
    assert (narrow != wide).any()


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_bundle_equals_torch_per_pass_and_per_depth(
    tiny_backbone_dir: Path, backbone: Backbone, tmp_path: Path, scale: float
) -> None:
    head = random_head(backbone, embedding_scale=scale)
    tiny_bundle(tmp_path / "bundle", tiny_backbone_dir, backbone, head)
    bundle = open_bundle(tmp_path / "bundle", 1)
    session = TorchBackbone(backbone, MAX_LENGTH)
    session.backbone = Backbone(backbone.model, backbone.card, scale, backbone.rope_theta, backbone.rms_norm_eps)
    prompts = [np.random.default_rng(seed).integers(0, 300, 10 + seed).tolist() for seed in range(3)]
    parity = compare_with_torch(
        bundle.backbone, bundle.head, session, TorchHead(head, session), prompts, DRAFT_LENGTH, rounds=8
    )
    assert parity.passed, parity
    assert parity.drafts_compared == (24, 24, 24)
    assert parity.drafts_agreement == (1.0, 1.0, 1.0)
    assert parity.logit_difference < 1e-3


def test_parity_notices_a_wrong_head(bundle: Bundle, backbone: Backbone) -> None:
    session = TorchBackbone(backbone, MAX_LENGTH)
    other = TorchHead(random_head(backbone, seed=4), session)
    parity = compare_with_torch(bundle.backbone, bundle.head, session, other, [[5, 6, 7, 8]], DRAFT_LENGTH, rounds=4)
    assert not parity.passed


def test_parity_notices_a_wrong_probability(
    bundle: Bundle, backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops no draft from being right, but it decides where drafting stops."""
    session = TorchBackbone(backbone, MAX_LENGTH)
    right, drafts = TorchHead(random_head(backbone), session), type(bundle.head).drafts
    monkeypatch.setattr(type(bundle.head), "drafts", lambda self, token: ((d, p * 0.9) for d, p in drafts(self, token)))
    parity = compare_with_torch(bundle.backbone, bundle.head, session, right, [[5, 6, 7, 8]], DRAFT_LENGTH, rounds=4)
    assert parity.drafts_agreement == (1.0, 1.0, 1.0)
    assert not parity.passed


def test_head_reads_rows_up_to_p_and_no_others(bundle: Bundle, backbone: Backbone) -> None:
    """Poison behind the valid rows changes no draft; a change in row p does."""
    head = TorchHead(random_head(backbone), TorchBackbone(backbone, MAX_LENGTH))
    token = bundle.backbone.prefill(list(range(20, 40)))
    clean, probabilities = first_drafts(bundle.head, token, DRAFT_LENGTH)
    for buffer in bundle.backbone.buffers.values():
        buffer[:, :, 20:] = 1e4
    assert first_drafts(bundle.head, token, DRAFT_LENGTH) == (clean, probabilities)
    assert [draft for draft, _ in torch_drafts(head, bundle.backbone, token, DRAFT_LENGTH)] == clean
    for buffer in bundle.backbone.buffers.values():
        buffer[:, :, 19] += 1.0
    _, changed = first_drafts(bundle.head, token, DRAFT_LENGTH)
    assert all(left != right for left, right in zip(changed, probabilities, strict=True))


def test_head_holds_one_copy_of_its_weights_and_none_of_the_embedding(bundle_dir: Path, backbone: Backbone) -> None:
    graphs = {name: onnx.load(bundle_dir / f"{name}.onnx", load_external_data=False) for name in ("backbone", "head")}
    tensors = {name: {tensor.name: tensor for tensor in graph.graph.initializer} for name, graph in graphs.items()}
    for shared in (EMBEDDING, COSINE, SINE):
        places = [{entry.key: entry.value for entry in tensors[name][shared].external_data} for name in graphs]
        assert places[0] == places[1]
        assert places[0]["location"] == "backbone.onnx.data"
    head = random_head(backbone)
    own = sum(tensor.numel() for tensor in head.parameters()) + len(head.config.draft_to_target) * 64
    stored = sum(int(np.prod(tensor.dims)) for tensor in graphs["head"].graph.initializer if "embed" not in tensor.name)
    assert own < stored < own + 1024 * 16 + 400  # rotary tables, ids of the draft vocabulary, a few constants
    assert not any(node.op_type == "Transpose" for node in graphs["head"].graph.node)


def test_tied_weights_are_stored_once(bundle_dir: Path, backbone: Backbone) -> None:
    parameters = sum(tensor.numel() for tensor in backbone.model.parameters())
    stored = (bundle_dir / "backbone.onnx.data").stat().st_size / 4
    assert parameters <= stored < parameters + 2 * 1024 * 8 + 40 * 1024  # rotary tables and page alignment


def test_manifest_describes_the_folder(bundle_dir: Path, backbone: Backbone) -> None:
    manifest = read_manifest(bundle_dir)
    assert set(manifest.files) == {p.name for p in bundle_dir.iterdir() if p.is_file()} - {MANIFEST_FILE}
    assert (manifest.max_length, manifest.kv_padding_rows) == (MAX_LENGTH, PADDING)
    assert manifest.contract.kv_layers == (1, 2)
    assert manifest.backbone == backbone.card
    for graph in manifest.graphs.values():
        assert (graph.opset, graph.ir_version) <= version_limits("1.20.0")
    assert [tensor.name for tensor in manifest.graphs["head"].outputs] == ["draft", "probability", "state"]


def test_exporting_again_gives_the_same_bundle(bundle_dir: Path, tiny_backbone_dir: Path, backbone: Backbone) -> None:
    before = bundle_hash(bundle_dir)
    again = bundle_dir.with_name("again")
    tiny_bundle(again, tiny_backbone_dir, backbone, random_head(backbone))
    assert bundle_hash(again) == before


def test_parts_that_do_not_fit_are_refused(tiny_backbone_dir: Path, backbone: Backbone, tmp_path: Path) -> None:
    head = random_head(backbone)
    card = backbone.card.model_copy(update={"layers": 2})
    from components.onnx.bundle import build_bundle

    with pytest.raises(UserError, match="layer that the backbone lacks"):
        build_bundle(tmp_path / "bundle", tiny_backbone_dir, card, head, SETTINGS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("oldest", "limits"), [("1.20.0", (21, 10)), ("1.21.1", (22, 10)), ("1.32.0", (22, 10))])
def test_version_limits(oldest: str, limits: tuple[int, int]) -> None:
    assert version_limits(oldest) == limits


@pytest.mark.parametrize("oldest", ["1.16.0", "new"])
def test_unknown_runtimes_are_refused(oldest: str) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        version_limits(oldest)
