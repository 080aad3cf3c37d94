"""Packed passes: many sequences in one forward pass of the backbone, without padding.

Owns the KV rows of a fixed number of slots and the attention that reads and writes them. One pass takes the next token
of every writing slot and, beside them, whole new prompts: the matrix products see one long row of tokens and none of
them is padding. Its surprising decision: prefix sharing happens inside attention. A new prompt names a donor, any slot
whose rows begin with the same tokens, be it admitted in the very same pass, and copies those rows layer by layer before
it attends; so shared tokens are never computed twice and there is no separate pass for prefixes.

It refuses padding and dropout, and knows full causal attention only, as does :func:`load_backbone`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from components.core.manifest import BackboneCard
from components.modeling.backbone import Backbone

ATTENTION = "packed_slots"  # what load_backbone must be told, so that the model calls packed_attention


@dataclass(frozen=True)
class Admission:
    """A prompt that enters a slot.

    Attributes:
        slot: where it goes; what was there is lost.
        prompt: its token ids.
        donor: slot whose first ``shared`` rows belong to the same tokens; may be ``slot`` itself.
        shared: rows taken from the donor, less than the prompt has: its last token always needs a state of its own.
    """

    slot: int
    prompt: tuple[int, ...]
    donor: int
    shared: int

    @property
    def computed(self) -> int:
        """Tokens that the pass has to compute."""
        return len(self.prompt) - self.shared


class PackedPass:
    """What one pass computes: one token for each writing slot, then what is new in each admitted prompt.

    Args:
        writing: (slot, row, token) of each writing slot, in ascending order of slots.
        admissions: prompts, in the order in which donors were chosen.
    """

    def __init__(self, writing: Sequence[tuple[int, int, int]], admissions: Sequence[Admission]) -> None:
        self.admissions = tuple(admissions)
        tokens, positions = [token for _, _, token in writing], [row for _, row, _ in writing]
        last = list(range(len(writing)))
        for admission in admissions:
            tokens += admission.prompt[admission.shared :]
            positions += range(admission.shared, len(admission.prompt))
            last.append(len(tokens) - 1)
        self.tokens, self.positions = torch.tensor([tokens]), torch.tensor([positions])
        self.last = torch.tensor(last)  # index of the state that gives each slot's next token
        self.slots = torch.tensor([slot for slot, _, _ in writing], dtype=torch.int64)
        self.rows = self.positions[0, : len(writing)]
        self.mask = self._writing_mask()
        self.masks = [causal_mask(len(a.prompt))[a.shared :] for a in admissions]

    def _writing_mask(self) -> Tensor:
        """Additive mask [slots, 1, 1, rows] up to the last writing slot; idle slots among them see row 0, unread."""
        if not len(self.slots):
            return torch.empty(0)
        lengths = torch.ones(int(self.slots[-1]) + 1, dtype=torch.int64)
        lengths[self.slots] = self.rows + 1
        hidden = torch.arange(int(lengths.max())) >= lengths[:, None]
        return torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))[:, None, None]


def causal_mask(rows: int) -> Tensor:
    """Additive mask [rows, rows] float32: -inf above the diagonal."""
    return torch.full((rows, rows), float("-inf")).triu(1)


class SlotRows:
    """Keys, values and hidden states of every slot; a sequence's row r is always row r of its slot.

    Args:
        card: shape of the backbone.
        slots: sequences held at once.
        capacity: rows of the longest sequence.

    Attributes:
        keys, values: [layers, slots, kv_heads, capacity, head_dim] float32.
        hidden: states after the final norm, [slots, capacity, hidden_size] float32.
    """

    def __init__(self, card: BackboneCard, slots: int, capacity: int) -> None:
        shape = (card.layers, slots, card.kv_heads, capacity, card.head_dim)
        # Zeros, not garbage: rows that are masked out still get multiplied by their weight of zero.
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)
        self.hidden = torch.zeros(slots, capacity, card.hidden_size)

    def run(self, backbone: Backbone, step: PackedPass) -> Tensor:
        """One pass; returns the last states, [writing + admitted, hidden_size], in the order of ``step.last``."""
        output = backbone.model.model(
            input_ids=step.tokens, position_ids=step.positions, use_cache=False, slot_rows=self, step=step
        )
        states: Tensor = output.last_hidden_state[0]
        self._keep_hidden(states, step)
        return states[step.last]

    def move(self, source: int, target: int, rows: int) -> None:
        """Copy the first ``rows`` rows of a slot to another."""
        for held in (self.keys, self.values):
            held[:, target, :, :rows] = held[:, source, :, :rows]
        self.hidden[target, :rows] = self.hidden[source, :rows]

    def captured(self, slot: int, rows: int, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Copies of a slot's hidden states [rows, hidden_size] and rows [layers, 2, kv_heads, rows, head_dim]."""
        pairs = [torch.stack((self.keys[layer, slot], self.values[layer, slot])) for layer in layers]
        return self.hidden[slot, :rows].clone(), torch.stack(pairs)[..., :rows, :].clone()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, step: PackedPass) -> Tensor:
        """Write a layer's new rows, then attend.

        Args:
            layer: index of the layer.
            query: [query_heads, tokens, head_dim], rotated.
            key, value: [kv_heads, tokens, head_dim], keys rotated.
            scaling: factor on the scores.
            step: the pass.

        Returns:
            [tokens, query_heads, head_dim].
        """
        keys, values = self.keys[layer], self.values[layer]
        at, done = len(step.slots), []
        if at:
            keys[step.slots, :, step.rows] = key[:, :at].transpose(0, 1)
            values[step.slots, :, step.rows] = value[:, :at].transpose(0, 1)
            done.append(attend_writing(query[:, :at], keys, values, scaling, step))
        # In order: a donor of the same pass has its own rows by the time they are copied.
        for admission, mask in zip(step.admissions, step.masks, strict=True):
            new = slice(at, at + admission.computed)
            own_keys = fill_rows(keys, key[:, new], admission)
            own_values = fill_rows(values, value[:, new], admission)
            done.append(attend_prompt(query[:, new], own_keys, own_values, scaling, mask))
            at = new.stop
        return torch.cat(done)

    def _keep_hidden(self, states: Tensor, step: PackedPass) -> None:
        at = len(step.slots)
        self.hidden[step.slots, step.rows] = states[:at]
        for admission in step.admissions:
            rows = self.hidden[admission.slot]
            rows[: admission.shared] = self.hidden[admission.donor, : admission.shared]
            rows[admission.shared : len(admission.prompt)] = states[at : at + admission.computed]
            at += admission.computed


def fill_rows(held: Tensor, computed: Tensor, admission: Admission) -> Tensor:
    """Copy the donor's rows and append the computed ones; returns the slot's rows, a view of ``held``.

    Args:
        held: keys or values of one layer, [slots, kv_heads, capacity, head_dim].
        computed: those of the prompt's new tokens, [kv_heads, new, head_dim].
        admission: who enters which slot.
    """
    rows = held[admission.slot, :, : len(admission.prompt)]
    if admission.donor != admission.slot:
        rows[:, : admission.shared] = held[admission.donor, :, : admission.shared]
    rows[:, admission.shared :] = computed
    return rows


def attend_writing(query: Tensor, keys: Tensor, values: Tensor, scaling: float, step: PackedPass) -> Tensor:
    """One query token per writing slot: [query_heads, writing, head_dim] -> [writing, query_heads, head_dim].

    Query heads that share a key head become rows of one query, so that the cache is read in place, never repeated.
    """
    heads, writing, size = query.shape
    used, rows = step.mask.shape[0], step.mask.shape[-1]
    grouped = query.new_zeros(used, keys.shape[1], heads // keys.shape[1], size)
    grouped[step.slots] = query.transpose(0, 1).reshape(writing, *grouped.shape[1:])
    seen = keys[:used, :, :rows], values[:used, :, :rows]
    attended = scaled_dot_product_attention(grouped, *seen, step.mask, scale=scaling)
    return attended[step.slots].reshape(writing, heads, size)


def attend_prompt(query: Tensor, keys: Tensor, values: Tensor, scaling: float, mask: Tensor) -> Tensor:
    """A prompt's new tokens over its own rows: [query_heads, new, head_dim] -> [new, query_heads, head_dim]."""
    attended = scaled_dot_product_attention(query[None], keys[None], values[None], mask, scale=scaling, enable_gqa=True)
    return attended[0].transpose(0, 1)


def packed_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    """Attention function for transformers; ``options`` holds what :meth:`SlotRows.run` gave to the model."""
    rows: SlotRows = options["slot_rows"]
    return rows.attend(module.layer_idx, query[0], key[0], value[0], scaling, options["step"])[None], None


AttentionInterface.register(ATTENTION, packed_attention)
