"""The manifest of a bundle: the decode contract, shapes, names and hashes, in one JSON file.

Owns what a device must know to decode with a bundle. It refuses unknown keys and files whose hash differs. Its
surprising decision: the bundle's identity is the hash of the manifest, which holds the hash of every other file but
the evidence: evidence *about* a bundle cannot be part of its name.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from components.core.config import Strict
from components.core.errors import UserError
from components.core.files import read_json, sha256_file, write_json

MANIFEST_FILE = "manifest.json"


class Contract(Strict):
    """The decode contract (DESIGN), pinned: what the head was trained on is what a runtime must do."""

    kv_layers: tuple[int, ...] = Field(description="backbone layer read by each head layer")
    hidden_state: Literal["after_final_norm"] = "after_final_norm"
    concatenation: Literal["embedding_then_hidden"] = "embedding_then_hidden"
    embedding_scale: float = Field(description="factor on the embedding, as the backbone applies it")
    input_norms: Literal["rms_before_concatenation"] = "rms_before_concatenation"
    visible_rows: Literal["0..p"] = "0..p"
    query_position: Literal["p"] = "p"
    feedback: Literal["normalised_output_state"] = "normalised_output_state"


class DraftPolicy(Strict):
    """How far a round drafts; every policy gives the same text. Calibrated on the validation split."""

    longest: int = Field(ge=1, le=7, description="K: drafts of a round at most")
    stop_below: float = Field(ge=0.0, le=1.0, description="the head stops once its whole chain is less likely")
    lookup_ngram: int = Field(ge=0, description="copy what followed this many tokens before; 0: never copy")


class Policies(Strict):
    """Named policies, and the one that pays best on the target."""

    modes: dict[str, DraftPolicy]
    default: str

    @property
    def policy(self) -> DraftPolicy:
        """The default one."""
        return self.modes[self.default]

    @model_validator(mode="after")
    def _default_exists(self) -> Policies:
        if self.default not in self.modes:
            raise ValueError(f"default policy {self.default!r} is not one of {sorted(self.modes)}")
        return self


class BackboneCard(Strict):
    """The frozen model."""

    source: str
    weights_sha256: str = Field(description="hash over names, dtypes, shapes and bytes of every weight")
    model_type: str
    layers: int
    hidden_size: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    eos_ids: tuple[int, ...]


class HeadCard(Strict):
    """The trained drafter."""

    weights_sha256: str
    parameters: int
    draft_vocabulary_size: int


class Tensor(Strict):
    """One graph input or output; symbolic sizes are names."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


class Graph(Strict):
    """One ONNX file."""

    file: str
    opset: int
    ir_version: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class TaskPrompt(Strict):
    """What a runtime needs to prompt for one task."""

    rendered: str = Field(description="chat template already applied; slots in {braces}")
    answer_prefix: str = Field(default="", description="end of `rendered` that opens the answer: shown, not decoded")
    choices: dict[str, tuple[str, ...]] = Field(
        default_factory=dict, description="slots that may be left out, and their texts in training; the first stands in"
    )
    stop_texts: tuple[str, ...]
    max_new_tokens: int

    @model_validator(mode="after")
    def _prefix_ends_prompt(self) -> TaskPrompt:
        if not self.rendered.endswith(self.answer_prefix):
            raise ValueError("the prompt does not end with the answer's prefix")
        return self


class Manifest(Strict):
    """All of manifest.json."""

    format_version: Literal[1] = 1
    name: str
    precision: Literal["float32"]
    max_length: int = Field(description="rows of the KV buffer")
    kv_padding_rows: int = Field(default=0, ge=0, description="rows behind them that the graph uses as scratch")
    contract: Contract
    policies: Policies
    backbone: BackboneCard
    head: HeadCard
    graphs: dict[Literal["backbone", "head"], Graph]
    tasks: dict[str, TaskPrompt]
    versions: dict[str, str] = Field(description="packages that made the bundle")
    files: dict[str, str] = Field(description="sha256 of every file but the manifest and the evidence")


def read_policies(path: Path) -> Policies:
    """The policies that `calibrate` chose.

    Raises:
        UserError: missing, not JSON, or of another shape.
    """
    document = read_json(path, "run `mtp repro calibrate`")
    try:
        return Policies.model_validate(document["policies"])
    except (ValidationError, KeyError, TypeError) as error:
        raise UserError(f"{path} holds no policies", str(error)[:200], "run `mtp repro calibrate`") from None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` into ``folder``."""
    write_json(folder / MANIFEST_FILE, manifest.model_dump(mode="json"))


def read_manifest(folder: Path) -> Manifest:
    """Read a bundle's manifest.

    Raises:
        UserError: missing, not JSON, or of another shape.
    """
    remedy = "run `mtp repro export`, or give the folder of a whole bundle"
    document = read_json(folder / MANIFEST_FILE, remedy)
    try:
        return Manifest.model_validate(document)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise UserError(
            f"{folder / MANIFEST_FILE} is not a manifest of this version", f"problem at {where}", remedy
        ) from None


def bundle_hash(folder: Path) -> str:
    """Identity of a bundle: sha256 of its manifest."""
    return hashlib.sha256((folder / MANIFEST_FILE).read_bytes()).hexdigest()


def check_files(folder: Path, manifest: Manifest) -> None:
    """Compare every file with its recorded hash, before any compute.

    Raises:
        UserError: names the first file that is missing or differs.
    """
    remedy = "copy the whole bundle again, or run `mtp repro export`"
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"the manifest names a file outside the bundle: {name}", str(path), remedy)
        if not path.is_file():
            raise UserError(f"the bundle lacks {name}", f"no such file in {folder}", remedy)
        if (seen := sha256_file(path)) != expected:
            raise UserError(
                f"{name} differs from the bundle's manifest", f"sha256 {seen[:16]}.., not {expected[:16]}..", remedy
            )
