"""A standalone drafter: a small Llama with its own embedding, its own cache and its own pass over the prompt.

Owns the model, its loss and its drafter. It refuses to see anything of the backbone but token ids. Its surprising
decision: its table holds the head's draft vocabulary and one row for every other token, since 49,152 rows would eat
five sixths of 7.6 M parameters; the interface stays that of the whole vocabulary, so transformers can use it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from components.baselines.training import LossOf
from components.core.config import Standalone, Train
from components.core.manifest import BackboneCard
from components.modeling.batches import UNSUPERVISED, DraftVocabulary
from components.modeling.features import Sequence as Captured
from components.modeling.losses import mixed_targets

LONGEST_CONTEXT = 8192


class CompactEmbedding(nn.Module):
    """Rows for the draft vocabulary, and a last one that all other tokens share."""

    def __init__(self, vocabulary: DraftVocabulary, size: int, deviation: float) -> None:
        super().__init__()
        draft = len(vocabulary.draft_to_target)
        self.weight = nn.Parameter(torch.randn(draft + 1, size) * deviation)
        rows = vocabulary.target_to_draft
        self.register_buffer("row_of", torch.where(rows == UNSUPERVISED, draft, rows))

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids of the backbone, any shape -> [..., size]."""
        row_of: Tensor = self.get_buffer("row_of")
        return F.embedding(row_of[tokens], self.weight)


class CompactOutput(nn.Module):
    """Logits with the embedding's own rows; tokens outside the draft vocabulary get the lowest float."""

    def __init__(self, embedding: CompactEmbedding, draft_to_target: Tensor, vocab_size: int) -> None:
        super().__init__()
        self.embedding, self.vocab_size = embedding, vocab_size
        self.register_buffer("draft_to_target", draft_to_target)

    def within(self, hidden: Tensor) -> Tensor:
        """Logits over the draft vocabulary, [..., draft]."""
        return hidden @ self.embedding.weight[:-1].T

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits over the backbone's vocabulary, [..., vocab_size]."""
        logits = hidden.new_full((*hidden.shape[:-1], self.vocab_size), torch.finfo(hidden.dtype).min)
        logits[..., self.get_buffer("draft_to_target")] = self.within(hidden)
        return logits


def new_standalone(shape: Standalone, card: BackboneCard, vocabulary: DraftVocabulary, seed: int) -> Any:
    """A random Llama (transformers) with the compact vocabulary."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=card.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=LONGEST_CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=list(card.eos_ids),
        pad_token_id=card.eos_ids[0],
    )
    model = LlamaForCausalLM(config)
    embedding = CompactEmbedding(vocabulary, shape.hidden_size, config.initializer_range)
    model.model.embed_tokens = embedding
    model.lm_head = CompactOutput(embedding, vocabulary.draft_to_target, card.vocab_size)
    return model


def standalone_loss(
    model: Any, draft_rows: Tensor, vocabulary: DraftVocabulary, settings: Train, prompts_too: bool
) -> LossOf:
    """Next-token loss on answers, hard and soft as the head's; and, where ``prompts_too``, hard on prompts.

    Args:
        model: from :func:`new_standalone`.
        draft_rows: the backbone's output rows of the draft vocabulary; they turn captured states into its distribution.
    """

    def loss(sequences: list[Captured]) -> Tensor:
        longest = max(len(s.prompt) + len(s.answer) - 1 for s in sequences)
        ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
        targets = torch.full((len(sequences), longest), UNSUPERVISED)
        answers = torch.zeros(len(sequences), longest, dtype=torch.bool)
        for row, sequence in enumerate(sequences):
            tokens = torch.tensor(sequence.prompt + sequence.answer)
            ids[row, : len(tokens) - 1] = tokens[:-1]
            targets[row, : len(tokens) - 1] = vocabulary.target_to_draft[tokens[1:]]
            answers[row, len(sequence.prompt) - 1 : len(tokens) - 1] = True
        # Padding is on the right, behind a causal mask: nothing real ever sees it.
        states = model.model(input_ids=ids, use_cache=False).last_hidden_state
        captured = torch.cat([s.hidden[len(s.prompt) - 1 :] for s in sequences])
        of_answers = _mixed(model, states[answers], targets[answers], captured @ draft_rows.T, settings)
        if not prompts_too:
            return of_answers
        chosen = ~answers & (targets != UNSUPERVISED)
        return of_answers + F.cross_entropy(model.lm_head.within(states[chosen]), targets[chosen])

    return loss


def _mixed(model: Any, states: Tensor, targets: Tensor, teacher: Tensor, settings: Train) -> Tensor:
    known = targets != UNSUPERVISED
    logits = model.lm_head.within(states[known])
    wanted = mixed_targets(targets[known], teacher[known].softmax(dim=-1), settings.soft_target_weight)
    return F.cross_entropy(logits, wanted, reduction="sum") / max(int(known.sum()), 1)


class StandaloneDrafter:
    """Implements :class:`components.decoding.loop.Drafter`.

    Attributes:
        seen: the tokens whose keys and values lie in ``cache``.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache = DynamicCache()
        self.seen: list[int] = []
        self._context: list[int] = []

    @torch.inference_mode()
    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Crop what was rejected, read what is new (the whole prompt at first), draft ``limit`` tokens greedily."""
        context = list(tokens)
        self._crop(context)
        new, drafts = context[len(self.seen) :], list[int]()
        while len(drafts) < limit:
            drafts.append(self._next(new))
            new = drafts[-1:]
        return drafts

    def _crop(self, context: list[int]) -> None:
        goes_on = len(context) > len(self._context) and context[: len(self._context)] == self._context
        self._context = context
        if not goes_on or not self.seen:
            self.cache, self.seen = DynamicCache(), []
            return
        # The newest token has to be processed even where it was drafted: its logits are needed.
        common = 0
        while common < min(len(self.seen), len(context) - 1) and self.seen[common] == context[common]:
            common += 1
        if rejected := len(self.seen) - common:
            self.cache.crop(-rejected)
            del self.seen[common:]

    def _next(self, tokens: list[int]) -> int:
        ids, start = torch.tensor([tokens]), len(self.seen)
        positions = torch.arange(start, start + len(tokens))[None]
        output = self.model.model(input_ids=ids, position_ids=positions, cache=self.cache, use_cache=True)
        self.seen += tokens
        logits = self.model.lm_head.within(output.last_hidden_state[0, -1])
        return int(self.model.lm_head.draft_to_target[logits.argmax()])
