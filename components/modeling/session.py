"""The torch side of the decode loop: one sequence, one KV cache, one head that reads it.

Owns forward passes and roll-back for evaluation and for live validation in training. It refuses any cache but
transformers' full-attention dynamic cache, the only one that rejected rows can be cropped from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from components.core.errors import UserError
from components.modeling.backbone import Backbone
from components.modeling.head import MTPHead, rotary_angles


def cached_rows(cache: DynamicCache, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer, each [batch, kv_heads, rows, head_dim] float32, as the cache holds them.

    Raises:
        UserError: the layer keeps something else, from which rejected rows could not be cropped.
    """
    stored = cache.layers[layer]
    if not isinstance(stored, DynamicLayer) or stored.keys is None or stored.values is None:
        raise UserError(
            f"layer {layer} of the backbone has no full-attention cache",
            type(stored).__name__,
            "choose a backbone with full attention",
        )
    return stored.keys, stored.values


def top2_margin(logits: Tensor) -> float:
    """Distance between the two highest logits, [vocab_size] float32."""
    high, low = logits.topk(2).values.tolist()
    return float(high - low)


class TorchBackbone:
    """Implements :class:`components.decoding.loop.Backbone` with transformers.

    Args:
        backbone: the frozen model.
        max_length: rows that the cache may grow to.

    Attributes:
        cache: transformers cache; layer ``i`` holds keys and values [1, kv_heads, length, head_dim] float32.
        hidden: hidden states after the final norm of the last pass, [1, q, hidden_size].
        last_logits: logits of the last pass, [q, vocab_size]; after prefill one row.
    """

    def __init__(self, backbone: Backbone, max_length: int) -> None:
        self.backbone = backbone
        self._max_length = max_length
        self.cache = DynamicCache()
        self.hidden = torch.empty(0)
        self.last_logits = torch.empty(0)
        self._length = 0

    @property
    def length(self) -> int:
        """Valid rows in the cache."""
        return self._length

    @property
    def max_length(self) -> int:
        """Rows that the cache may grow to."""
        return self._max_length

    @property
    def last_hidden(self) -> Tensor:
        """Hidden state h_p of the last valid row, [1, 1, hidden_size] float32."""
        return self.hidden[:, -1:]

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int]) -> int:
        """Start anew with a prompt.

        Raises:
            UserError: the prompt leaves no room for a token.
        """
        if len(tokens) >= self._max_length:
            raise UserError(
                "the prompt is too long", f"{len(tokens)} tokens for {self._max_length} rows", "shorten the text"
            )
        self.cache = DynamicCache()
        self._length = 0
        self._forward(tokens)
        self.last_logits = self._logits(self.hidden[0, -1:])
        self.keep(len(tokens))
        return int(self.last_logits[0].argmax())

    @torch.inference_mode()
    def verify(self, tokens: Sequence[int]) -> list[int]:
        """One pass over ``tokens``; returns the argmax after each."""
        self._forward(tokens)
        self.last_logits = self._logits(self.hidden[0])
        return [int(token) for token in self.last_logits.argmax(dim=-1)]

    def keep(self, rows: int) -> None:
        """Keep the first ``rows`` rows of the last pass; the rest is cropped from every layer."""
        rejected = self.hidden.shape[1] - rows
        if rejected:
            self.cache.crop(-rejected)
        self._length += rows
        self.hidden = self.hidden[:, :rows]

    def _forward(self, tokens: Sequence[int]) -> None:
        ids = torch.tensor([list(tokens)])
        positions = torch.arange(self._length, self._length + len(tokens))[None]
        output = self.backbone.model.model(input_ids=ids, position_ids=positions, cache=self.cache, use_cache=True)
        self.hidden = output.last_hidden_state

    def _logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.backbone.output_rows.T


class TorchHead:
    """Implements :class:`components.decoding.drafting.StepDrafter` with the head, on the backbone's own cache."""

    def __init__(self, head: MTPHead, session: TorchBackbone) -> None:
        self.head, self.session = head, session
        self.draft_to_target = torch.tensor(head.config.draft_to_target)
        self.draft_rows = session.backbone.output_rows[self.draft_to_target]

    def drafts(self, token: int) -> Iterator[tuple[int, float]]:
        """A round behind ``token``, from the session's own cache and hidden state."""
        keys_values = [cached_rows(self.session.cache, layer) for layer in self.head.config.kv_layers]
        yield from self.drafts_from(token, self.session.last_hidden, keys_values)

    @torch.inference_mode()
    def drafts_from(
        self, token: int, hidden: Tensor, keys_values: list[tuple[Tensor, Tensor]]
    ) -> Iterator[tuple[int, float]]:
        """A round from any cache; step j+1 is fed step j's draft and output state.

        Args:
            token: x_{p+1}.
            hidden: h_p, [1, 1, hidden_size] float32.
            keys_values: per head layer, rows 0..p of the backbone layer it reads, [1, kv_heads, p+1, head_dim].
        """
        config, rows = self.head.config, keys_values[0][0].shape[2]
        angles = rotary_angles(torch.tensor([[rows - 1]]), config.head_dim, config.rope_theta)
        mask = torch.ones(1, 1, 1, rows, dtype=torch.bool)
        state = hidden
        while True:
            embedding = self.session.backbone.embed(torch.tensor([[token]]))
            state = self.head(embedding, state, keys_values, mask, *angles)
            probabilities = (state[0, 0] @ self.draft_rows.T).softmax(dim=-1)
            best = probabilities.argmax()
            token = int(self.draft_to_target[best])
            yield token, float(probabilities[best])
