"""The MTP head: a light transformer that drafts from the backbone's own state and attends the backbone's own KV cache.

Owns the module and its directory format (config.json + model.safetensors). It owns no keys, no values and no embedding
table: its queries read rows 0..p of chosen backbone layers, its draft logits use rows of the backbone's output matrix.
The unrolled shared-weight step follows FastMTP (arXiv 2509.18362) and EAGLE-3 (arXiv 2503.01840); the two norms before
the projection follow DeepSeek-V3 (arXiv 2412.19437); Q-only attention onto the backbone's cache follows Gemma 4's
assistants. Its surprising decision: what it feeds back is the *normalised* output state, the same kind of vector as the
backbone's hidden state after its final norm.
"""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from components.core.config import Strict
from components.core.errors import UserError
from components.core.files import atomic_folder, read_json, write_json

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


class HeadConfig(Strict):
    """Shape of a head; everything a runtime needs to rebuild it.

    ``kv_layers`` holds the backbone layer that each head layer reads; ``draft_to_target`` maps draft ids to token ids.
    """

    hidden_size: int
    intermediate_size: int
    query_heads: int
    kv_heads: int
    head_dim: int
    kv_layers: tuple[int, ...]
    rope_theta: float
    rms_norm_eps: float
    embedding_scale: float
    draft_to_target: tuple[int, ...]


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x``, shape [..., size], float32."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotate_queries(queries: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, half-split layout as Llama's (Su et al. 2021).

    Args:
        queries: [batch, heads, anchors, head_dim].
        cos, sin: [batch, 1, anchors, head_dim].
    """
    first, second = queries.chunk(2, dim=-1)
    return queries * cos + torch.cat((-second, first), dim=-1) * sin


def rotary_angles(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine for ``positions`` [batch, anchors] -> two tensors [batch, 1, anchors, head_dim], float32."""
    inverse = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    angles = positions[:, None, :, None].to(torch.float32) * inverse
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


class HeadLayer(nn.Module):
    """Pre-norm decoder layer whose attention has queries only."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.query_heads * config.head_dim
        self.config = config
        self.attention_norm = RMSNorm(width, config.rms_norm_eps)
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=False)
        self.mlp_norm = RMSNorm(width, config.rms_norm_eps)
        self.gate_proj = nn.Linear(width, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(width, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, width, bias=False)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """One layer.

        Args:
            x: [batch, anchors, hidden_size] float32.
            keys, values: rows of the backbone's cache, [batch, kv_heads, rows, head_dim]; keys already rotated.
            mask: [batch, 1, anchors, rows] bool, True where a query may look.
            cos, sin: rotary angles of the query positions.

        Returns:
            [batch, anchors, hidden_size].
        """
        batch, anchors, _ = x.shape
        queries = self.q_proj(self.attention_norm(x)).view(batch, anchors, self.config.query_heads, -1).transpose(1, 2)
        queries = rotate_queries(queries, cos, sin)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        x = x + self.o_proj(mixed.transpose(1, 2).reshape(batch, anchors, -1))
        inner = self.mlp_norm(x)
        output: Tensor = x + self.down_proj(F.silu(self.gate_proj(inner)) * self.up_proj(inner))
        return output


class MTPHead(nn.Module):
    """The drafter; one set of weights serves every draft step."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.state_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_projection = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(HeadLayer(config) for _ in config.kv_layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        embedding: Tensor,
        state: Tensor,
        keys_values: list[tuple[Tensor, Tensor]],
        mask: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """One draft step.

        Args:
            embedding: E of the newest token as the backbone feeds it to its first layer, [batch, anchors, hidden_size].
            state: the backbone's hidden state after its final norm (step 1) or this head's last output (later steps).
            keys_values: per head layer, cached keys and values of the backbone layer it reads.
            mask: [batch, 1, anchors, rows] bool: rows 0..p of each anchor.
            cos, sin: rotary angles of position p, the same at every step.

        Returns:
            The normalised output state, [batch, anchors, hidden_size]; times the draft rows it gives the logits.
        """
        # Hidden states are some fifteen times longer than embeddings here; unnormalised, they drown the newest token.
        x = self.pre_projection(torch.cat((self.embedding_norm(embedding), self.state_norm(state)), dim=-1))
        for layer, (keys, values) in zip(self.layers, keys_values, strict=True):
            x = layer(x, keys, values, mask, cos, sin)
        normalised: Tensor = self.norm(x)
        return normalised

    def save_pretrained(self, folder: Path) -> None:
        """Write config.json and model.safetensors; ``folder`` appears only when both are whole.

        Raises:
            ValueError: a weight is not finite.
        """
        weights = {name: tensor.detach().contiguous() for name, tensor in self.state_dict().items()}
        broken = [name for name, tensor in weights.items() if not torch.isfinite(tensor).all()]
        if broken:
            raise ValueError(f"refusing to save a head with non-finite weights: {broken}")
        with atomic_folder(folder) as temporary:
            write_json(temporary / CONFIG_FILE, self.config.model_dump(mode="json"))
            save_file(weights, temporary / WEIGHTS_FILE)

    @classmethod
    def from_pretrained(cls, folder: Path) -> MTPHead:
        """Load a head.

        Raises:
            UserError: a file is missing, damaged, or does not fit the other.
        """
        remedy = "run `mtp repro train`"
        document = read_json(folder / CONFIG_FILE, remedy)
        try:
            head = cls(HeadConfig.model_validate(document))
            head.load_state_dict(load_file(folder / WEIGHTS_FILE))
        except (ValidationError, SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise UserError(f"{folder} is not a whole MTP head", str(error)[:200], remedy) from None
        return head.eval()
