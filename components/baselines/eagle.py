"""An EAGLE-style drafter: the head's shape, but with keys and values of its own and a pass over the prompt.

Owns the module, its training unroll and its drafter. Row i is made from (E[x_{i+1}], h_i), as in EAGLE (arXiv
2401.15077); later steps feed the drafter's own state back, and training sees that too (EAGLE-3, arXiv 2503.01840). It
refuses to keep a tentative row: rows of drafts live for one proposal only. Its surprising decision: the layers have
the head's widths and add key and value projections, so what differs from the head is whose cache is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from components.baselines.training import LossOf, depth_loss
from components.core.config import Train
from components.modeling.batches import DraftVocabulary, TrainingBatch, collate
from components.modeling.features import Sequence as Captured
from components.modeling.head import HeadConfig, RMSNorm, rotary_angles, rotate_queries
from components.modeling.session import TorchBackbone

Rows = list[tuple[Tensor, Tensor]]  # keys and values of each layer, [batch, kv_heads, rows, head_dim]
Embed = Callable[[Tensor], Tensor]


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, own: Rows) -> Tensor:
    """Attention over shared rows and, for each query, rows that only it sees.

    Args:
        queries: [batch, heads, anchors, head_dim].
        keys, values: [batch, kv_heads, rows, head_dim].
        mask: [batch, 1, anchors, rows] bool, True where a query may look.
        own: keys and values [batch, kv_heads, anchors, head_dim]; entry i belongs to query i.
    """
    times, rows = queries.shape[1] // keys.shape[1], keys.shape[2]
    keys, values = (part.repeat_interleave(times, dim=1) for part in (keys, values))
    own = [(k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)) for k, v in own]
    shared = (queries @ keys.transpose(-1, -2)).masked_fill(~mask, -torch.inf)
    scores = torch.cat((shared, *((queries * k).sum(dim=-1, keepdim=True) for k, _ in own)), dim=-1)
    weights = (scores / queries.shape[-1] ** 0.5).softmax(dim=-1)
    mixed: Tensor = weights[..., :rows] @ values
    for index, (_, value) in enumerate(own):
        mixed = mixed + weights[..., rows + index, None] * value
    return mixed


class EagleLayer(nn.Module):
    """Pre-norm decoder layer; the caller chooses the rows that its queries see."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        width, inner, cached = (
            config.hidden_size,
            config.query_heads * config.head_dim,
            config.kv_heads * config.head_dim,
        )
        self.head_dim = config.head_dim
        self.attention_norm = RMSNorm(width, config.rms_norm_eps)
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, cached, bias=False)
        self.v_proj = nn.Linear(width, cached, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=False)
        self.mlp_norm = RMSNorm(width, config.rms_norm_eps)
        self.gate_proj = nn.Linear(width, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(width, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, width, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of ``x``, [batch, heads, rows, head_dim]; queries and keys rotated."""
        normed = self.attention_norm(x)
        queries, keys, values = (
            layer(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate_queries(queries, cos, sin), rotate_queries(keys, cos, sin), values

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The rest of the layer after attention."""
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(-2))
        inner = self.mlp_norm(x)
        output: Tensor = x + self.down_proj(F.silu(self.gate_proj(inner)) * self.up_proj(inner))
        return output


class EagleHead(nn.Module):
    """The drafter; ``config.kv_layers`` only gives the number of layers."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.state_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_projection = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(EagleLayer(config) for _ in config.kv_layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def no_rows(self, batch: int) -> Rows:
        """An empty cache."""
        empty = torch.zeros(batch, self.config.kv_heads, 0, self.config.head_dim)
        return [(empty, empty) for _ in self.layers]

    def extend(self, embedding: Tensor, state: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        """Append rows: each sees all of ``rows`` and those appended before it.

        Args:
            embedding: E[x_{i+1}] of each new row, [batch, new, hidden_size].
            state: h_i, or this drafter's own state where the backbone has not been yet.
            rows: the cache so far.

        Returns:
            Normalised states [batch, new, hidden_size], and the longer cache.
        """
        known, new = rows[0][0].shape[2], embedding.shape[1]
        cos, sin = self._angles(torch.arange(known, known + new)[None])
        mask = torch.arange(known + new) <= torch.arange(known, known + new)[:, None]
        x, longer = self._enter(embedding, state), []
        for layer, (past_keys, past_values) in zip(self._stack(), rows, strict=True):
            queries, keys, values = layer.project(x, cos, sin)
            keys, values = torch.cat((past_keys, keys), dim=2), torch.cat((past_values, values), dim=2)
            mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
            x = layer.finish(x, mixed)
            longer.append((keys, values))
        return self.norm(x), longer

    def unroll(
        self, embedding: Tensor, state: Tensor, positions: Tensor, rows: Rows, mask: Tensor, own: list[Rows]
    ) -> Tensor:
        """One later draft step of every anchor at once; its new row is added to ``own``, which no other anchor sees."""
        cos, sin = self._angles(positions)
        x = self._enter(embedding, state)
        for layer, (keys, values), mine in zip(self._stack(), rows, own, strict=True):
            queries, *new = layer.project(x, cos, sin)
            mine.append((new[0], new[1]))
            x = layer.finish(x, attend(queries, keys, values, mask, mine))
        normalised: Tensor = self.norm(x)
        return normalised

    def _stack(self) -> list[EagleLayer]:
        return cast(list[EagleLayer], list(self.layers))

    def _enter(self, embedding: Tensor, state: Tensor) -> Tensor:
        x: Tensor = self.pre_projection(torch.cat((self.embedding_norm(embedding), self.state_norm(state)), dim=-1))
        return x

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_angles(positions, self.config.head_dim, self.config.rope_theta)


def pad_rows(sequences: Sequence[Captured]) -> tuple[Tensor, Tensor]:
    """Newest tokens [batch, rows] int64 and states [batch, rows, hidden_size] of rows 0 .. P+A-2, zeros behind."""
    longest, width = max(s.hidden.shape[0] for s in sequences), sequences[0].hidden.shape[1]
    tokens = torch.zeros(len(sequences), longest, dtype=torch.int64)
    states = torch.zeros(len(sequences), longest, width)
    for row, sequence in enumerate(sequences):
        known = sequence.hidden.shape[0]
        tokens[row, :known] = torch.tensor((sequence.prompt + sequence.answer)[1:])
        states[row, :known] = sequence.hidden
    return tokens, states


def unrolled_states(head: EagleHead, embed: Embed, sequences: Sequence[Captured], batch: TrainingBatch) -> list[Tensor]:
    """States of every anchor at every depth, true tokens fed in between, [batch, anchors, hidden_size] each."""
    tokens, states = pad_rows(sequences)
    first, rows = head.extend(embed(tokens), states, head.no_rows(len(sequences)))
    index = batch.positions[..., None].expand(-1, -1, first.shape[-1])
    state = first.gather(1, index)
    own: list[Rows] = [[] for _ in head.layers]
    found = [state]
    for step in range(1, batch.inputs.shape[2]):
        state = head.unroll(embed(batch.inputs[..., step]), state, batch.positions + step, rows, batch.mask, own)
        found.append(state)
    return found


def eagle_loss(
    head: EagleHead, embed: Embed, draft_rows: Tensor, vocabulary: DraftVocabulary, settings: Train
) -> LossOf:
    """The head's loss over the drafter's own rows."""

    def loss(sequences: list[Captured]) -> Tensor:
        batch = collate(sequences, settings.draft_length, vocabulary)
        return depth_loss(unrolled_states(head, embed, sequences, batch), batch, draft_rows, settings)

    return loss


class EagleDrafter:
    """Implements :class:`components.decoding.loop.Drafter`.

    Attributes:
        rows: keys and values of rows that the backbone has confirmed, never of a draft.
    """

    def __init__(self, head: EagleHead, session: TorchBackbone, draft_rows: Tensor, draft_to_target: Tensor) -> None:
        self.head, self.session = head, session
        self.draft_rows, self.draft_to_target = draft_rows, draft_to_target
        self.rows = head.no_rows(1)

    @torch.inference_mode()
    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Take in the rows of the backbone's last pass (the whole prompt at first), then draft ``limit`` tokens.

        Raises:
            RuntimeError: rows of an earlier pass were never seen.
        """
        embed, first = self.session.backbone.embed, self.session.length - self.session.hidden.shape[1]
        if first > self.rows[0][0].shape[2]:
            raise RuntimeError(f"rows before {first} were never seen; propose after every pass")
        known = [(keys[:, :, :first], values[:, :, :first]) for keys, values in self.rows]
        newest = torch.tensor([list(tokens[first + 1 : self.session.length + 1])])
        state, rows = self.head.extend(embed(newest), self.session.hidden, known)
        self.rows, state, drafts = rows, state[:, -1:], [self._choose(state)]
        while len(drafts) < limit:
            state, rows = self.head.extend(embed(torch.tensor([drafts[-1:]])), state, rows)
            drafts.append(self._choose(state))
        return drafts

    def _choose(self, state: Tensor) -> int:
        return int(self.draft_to_target[(state[0, -1] @ self.draft_rows.T).argmax()])
