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
from components.decoding.tree import lineages
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
    """Implements :class:`components.decoding.loop.TreeBackbone` with transformers.

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
        self._prompt: tuple[tuple[int, ...], Tensor, Tensor] | None = None

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
        self._length, self._prompt = 0, None
        self._forward(tokens)
        self.last_logits = self._logits(self.hidden[0, -1:])
        self.keep(len(tokens))
        self._prompt = tuple(tokens), self.hidden, self.last_logits
        return int(self.last_logits[0].argmax())

    def rewind(self, tokens: Sequence[int]) -> int:
        """Back to the end of the prompt that was prefilled last.

        Raises:
            ValueError: it was another prompt.
        """
        if self._prompt is None or self._prompt[0] != tuple(tokens):
            raise ValueError("only the prompt that was prefilled last can be gone back to")
        _, self.hidden, self.last_logits = self._prompt
        rows = cached_rows(self.cache, 0)[0].shape[2]
        if rows > len(tokens):
            self.cache.crop(len(tokens) - rows)
        self._length = len(tokens)
        return int(self.last_logits[0].argmax())

    @torch.inference_mode()
    def verify(self, tokens: Sequence[int]) -> list[int]:
        """One pass over ``tokens``; returns the argmax after each."""
        self._forward(tokens)
        return self._choices()

    @torch.inference_mode()
    def verify_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """One pass over a tree: a row sees the valid rows, those that it follows and itself; its position is its depth.

        Args:
            tokens: the newest one, then the drafts.
            parents: the row of the pass that each draft follows.
        """
        rows = lineages(parents)
        mask = torch.zeros(1, 1, len(rows), self._length + len(rows), dtype=torch.bool)
        mask[..., : self._length] = True
        for row, seen in enumerate(rows):
            mask[0, 0, row, [self._length + one for one in seen]] = True
        self._forward(tokens, [len(seen) - 1 for seen in rows], mask)
        return self._choices()

    @torch.inference_mode()
    def narrow(self, rows: Sequence[int]) -> None:
        """Leave only ``rows`` of the last pass, in this order: their keys and values, hidden states and logits."""
        width, chosen = self.hidden.shape[1], list(rows)
        for layer in range(len(self.cache.layers)):
            for kept in cached_rows(self.cache, layer):
                tentative = kept[:, :, self._length :]
                tentative[:, :, : len(chosen)] = tentative[:, :, chosen]  # the right side is a copy
        self.cache.crop(len(chosen) - width)
        self.hidden, self.last_logits = self.hidden[:, chosen], self.last_logits[chosen]

    def keep(self, rows: int) -> None:
        """Keep the first ``rows`` rows of the last pass; the rest is cropped from every layer."""
        rejected = self.hidden.shape[1] - rows
        if rejected:
            self.cache.crop(-rejected)
        self._length += rows
        self.hidden = self.hidden[:, :rows]

    def _forward(self, tokens: Sequence[int], depths: Sequence[int] = (), mask: Tensor | None = None) -> None:
        ids = torch.tensor([list(tokens)])
        positions = self._length + torch.tensor([list(depths or range(len(tokens)))])
        output = self.backbone.model.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, cache=self.cache, use_cache=True
        )
        self.hidden = output.last_hidden_state

    def _choices(self) -> list[int]:
        self.last_logits = self._logits(self.hidden[0])
        return [int(token) for token in self.last_logits.argmax(dim=-1)]

    def _logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.backbone.output_rows.T


class TorchHead:
    """Implements :class:`components.decoding.drafting.StepDrafter` and :class:`components.decoding.branching.TreeHead`.

    Attributes:
        steps: times that the head ran, for whoever counts costs.
    """

    def __init__(self, head: MTPHead, session: TorchBackbone) -> None:
        self.head, self.session = head, session
        self.draft_to_target = torch.tensor(head.config.draft_to_target)
        self.draft_rows = session.backbone.output_rows[self.draft_to_target]
        self.steps = 0

    def drafts(self, token: int) -> Iterator[tuple[int, float]]:
        """A round behind ``token``, from the session's own cache and hidden state."""
        yield from self.drafts_from(token, self.session.last_hidden, self._keys_values())

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
        state = hidden
        while True:
            state, probabilities = self._step([token], state, keys_values)
            best = probabilities[0].argmax()
            token = int(self.draft_to_target[best])
            yield token, float(probabilities[0, best])

    @property
    def first_state(self) -> Tensor:
        """h_p of the session, [hidden_size] float32."""
        return self.session.last_hidden[0, 0]

    @torch.inference_mode()
    def expand(
        self, tokens: Sequence[int], states: Sequence[Tensor], count: int
    ) -> list[tuple[Tensor, list[tuple[int, float]]]]:
        """One step over several nodes at once: their queries see the same rows 0..p, and nothing of each other.

        Args:
            tokens: of the nodes.
            states: what came out of the step that drafted each of them, [hidden_size] float32.
            count: drafts behind each node.

        Returns:
            For each node its output state and its ``count`` likeliest drafts, each with its probability.
        """
        state, probabilities = self._step(tokens, torch.stack(list(states))[None], self._keys_values())
        likeliest = probabilities.topk(min(count, probabilities.shape[-1]))
        targets = self.draft_to_target[likeliest.indices].tolist()
        return [
            (one, list(zip(*drafts, strict=True)))
            for one, *drafts in zip(state[0], targets, likeliest.values.tolist(), strict=True)
        ]

    def _keys_values(self) -> list[tuple[Tensor, Tensor]]:
        return [cached_rows(self.session.cache, layer) for layer in self.head.config.kv_layers]

    def _step(
        self, tokens: Sequence[int], state: Tensor, keys_values: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Output states [1, tokens, hidden_size] and probabilities in the draft vocabulary, [tokens, draft]."""
        config, rows = self.head.config, keys_values[0][0].shape[2]
        angles = rotary_angles(torch.tensor([[rows - 1]]), config.head_dim, config.rope_theta)
        mask = torch.ones(1, 1, len(tokens), rows, dtype=torch.bool)
        embedding = self.session.backbone.embed(torch.tensor([list(tokens)]))
        state = self.head(embedding, state, keys_values, mask, *angles)
        self.steps += 1
        return state, (state[0] @ self.draft_rows.T).softmax(dim=-1)
