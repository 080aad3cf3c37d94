"""The bundle folder: graphs, tokenizer, manifest and evidence, whole or not there at all.

Owns the assembly. It refuses a head that does not fit the backbone and a buffer longer than the backbone's rotary
tables. Its surprising decision: nothing that depends on the clock or on a path goes into a hashed file, so exporting
the same weights again gives the same bundle identity.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from components.core.errors import UserError
from components.core.files import atomic_folder, sha256_file
from components.core.host import package_versions
from components.core.manifest import (
    BackboneCard,
    Contract,
    Graph,
    HeadCard,
    Manifest,
    Policies,
    TaskPrompt,
    write_manifest,
)
from components.modeling.backbone import hash_weights
from components.modeling.head import HeadConfig, MTPHead
from components.onnx.backbone_graph import COSINE, PADDING_ROWS, export_backbone
from components.onnx.graphs import graph_card, initializer_rows, version_limits
from components.onnx.head_graph import export_head

TOKENIZER_FILE = "tokenizer.json"
EVIDENCE_FOLDER = "evidence"
Graphs = dict[Literal["backbone", "head"], Graph]
MAKERS = ("onnx", "onnxruntime", "onnxruntime-genai", "torch", "transformers")


@dataclass(frozen=True)
class BundleSettings:
    """What a bundle is made for.

    Attributes:
        name: shown to people, not used to find it.
        max_length: rows of the KV buffer.
        policies: how far a round drafts.
        oldest_onnxruntime: MAJOR.MINOR.PATCH that must load the graphs.
        tasks: prompts by task.
    """

    name: str
    max_length: int
    policies: Policies
    oldest_onnxruntime: str
    tasks: Mapping[str, TaskPrompt]


def build_bundle(
    folder: Path,
    source: Path,
    card: BackboneCard,
    head: MTPHead,
    settings: BundleSettings,
    evidence: Sequence[Path] = (),
) -> Manifest:
    """Export and assemble; ``folder`` is replaced only when everything is there.

    Args:
        folder: the bundle.
        source: the backbone's transformers directory.
        card: the backbone's shape and identity.
        head: trained head.
        settings: what it is made for.
        evidence: files to add where they exist; they are no part of the bundle's identity.

    Raises:
        UserError: the parts do not fit, or cannot be exported.
    """
    _check_fit(card, head.config)
    limits = version_limits(settings.oldest_onnxruntime)
    with atomic_folder(folder) as temporary:
        backbone_file, head_file = temporary / "backbone.onnx", temporary / "head.onnx"
        export_backbone(source, backbone_file, card, limits)
        _check_rotary_rows(backbone_file, settings.max_length)
        weights = {name: tensor.detach().numpy() for name, tensor in head.state_dict().items()}
        export_head(head.config, weights, card, backbone_file, head_file)
        shutil.copyfile(source / TOKENIZER_FILE, temporary / TOKENIZER_FILE)
        files = {path.name: sha256_file(path) for path in sorted(temporary.iterdir()) if path.is_file()}
        graphs: Graphs = {"backbone": graph_card(backbone_file), "head": graph_card(head_file)}
        manifest = _manifest(card, head, settings, graphs, files)
        write_manifest(temporary, manifest)
        _add_evidence(temporary / EVIDENCE_FOLDER, evidence)
    return manifest


def file_sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file of the bundle but the evidence, manifest included."""
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}


def _check_fit(card: BackboneCard, config: HeadConfig) -> None:
    wanted = (card.hidden_size, card.query_heads, card.kv_heads, card.head_dim)
    seen = (config.hidden_size, config.query_heads, config.kv_heads, config.head_dim)
    remedy = "run `mtp repro train`"
    if seen != wanted:
        raise UserError("the head was trained on another backbone", f"sizes {seen}, backbone {wanted}", remedy)
    if max(config.kv_layers) >= card.layers:
        raise UserError(
            "the head reads a layer that the backbone lacks", f"{config.kv_layers} of {card.layers}", remedy
        )
    if max(config.draft_to_target) >= card.vocab_size:
        raise UserError("the head drafts tokens that the backbone lacks", f"id {max(config.draft_to_target)}", remedy)


def _check_rotary_rows(backbone_file: Path, max_length: int) -> None:
    rows = initializer_rows(backbone_file, COSINE)
    if max_length + PADDING_ROWS > rows:
        raise UserError(
            "runtime.max_length is more than the backbone was made for",
            f"{max_length} rows; at most {rows - PADDING_ROWS}",
            "lower runtime.max_length in params.yaml",
        )


def _manifest(
    card: BackboneCard, head: MTPHead, settings: BundleSettings, graphs: Graphs, files: dict[str, str]
) -> Manifest:
    config = head.config
    return Manifest(
        name=settings.name,
        precision="float32",
        max_length=settings.max_length,
        kv_padding_rows=PADDING_ROWS,
        contract=Contract(kv_layers=config.kv_layers, embedding_scale=config.embedding_scale),
        policies=settings.policies,
        backbone=card,
        head=HeadCard(
            weights_sha256=hash_weights(head),
            parameters=sum(tensor.numel() for tensor in head.parameters()),
            draft_vocabulary_size=len(config.draft_to_target),
        ),
        graphs=graphs,
        tasks=dict(settings.tasks),
        versions=package_versions(*MAKERS),
        files=files,
    )


def _add_evidence(folder: Path, evidence: Sequence[Path]) -> None:
    folder.mkdir()
    for path in evidence:
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
