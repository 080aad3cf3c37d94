"""From captured sequences to training batches: every anchor position of a sequence in one pass.

Owns the pairing of inputs and targets, the cutoff mask and the count of supervised positions. Anchor ``i`` of an
answer is row p = P-1+i: step j is fed the true token ``answer[i+j-1]`` and must draft ``answer[i+j]``. It never shows a
query a row that decoding would not show it: ``row <= p`` and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from components.modeling.features import Sequence

UNSUPERVISED = -100


@dataclass(frozen=True)
class DraftVocabulary:
    """Token ids that the head can propose.

    Attributes:
        draft_to_target: [draft] int64, token id of each draft id.
        target_to_draft: [vocab] int64, draft id of each token id, UNSUPERVISED where there is none.
    """

    draft_to_target: Tensor
    target_to_draft: Tensor


def choose_draft_vocabulary(sequences: Iterable[Sequence], size: int, vocab_size: int, always: Seq[int]) -> list[int]:
    """The ``size`` most frequent token ids: ``always`` first, then by answers, then by prompts; sorted by id."""
    answers, prompts = torch.zeros(vocab_size, dtype=torch.int64), torch.zeros(vocab_size, dtype=torch.int64)
    for sequence in sequences:
        answers += torch.bincount(torch.tensor(sequence.answer), minlength=vocab_size)
        prompts += torch.bincount(torch.tensor(sequence.prompt), minlength=vocab_size)
    # One key, so that ties always fall the same way: answers count first, then prompts, then the lower id.
    order = sorted(range(vocab_size), key=lambda token: (-int(answers[token]), -int(prompts[token]), token))
    chosen = list(dict.fromkeys([*always, *order]))[: min(size, vocab_size)]
    return sorted(chosen)


def make_vocabulary(draft_to_target: Seq[int], vocab_size: int) -> DraftVocabulary:
    """Both directions of the map."""
    chosen = torch.tensor(list(draft_to_target))
    back = torch.full((vocab_size,), UNSUPERVISED)
    back[chosen] = torch.arange(len(chosen))
    return DraftVocabulary(chosen, back)


@dataclass(frozen=True)
class TrainingBatch:
    """Padded sequences and their anchors.

    Attributes:
        states: the backbone's states from the first anchor's own on, [batch, anchors + K, hidden_size] float32; zero
            behind the end. State i is h_p of anchor i, and its logits are the soft targets of anchor i-j at step j.
        inputs: tokens fed at each step, [batch, anchors, K] int64.
        targets: draft ids to be drafted at each step, [batch, anchors, K] int64; UNSUPERVISED where there is none.
        positions: p of each anchor, [batch, anchors] int64.
        keys_values: one (keys, values) pair per head layer, each [batch, kv_heads, rows, head_dim] float32.
        mask: [batch, 1, anchors, rows] bool, True at rows 0..p.
    """

    states: Tensor
    inputs: Tensor
    targets: Tensor
    positions: Tensor
    keys_values: list[tuple[Tensor, Tensor]]
    mask: Tensor

    @property
    def hidden(self) -> Tensor:
        """h_p of each anchor, [batch, anchors, hidden_size] float32."""
        return self.states[:, : self.positions.shape[1]]

    def supervised(self) -> Tensor:
        """Supervised positions at each step, [K] int64."""
        return (self.targets != UNSUPERVISED).sum(dim=(0, 1))


def collate(sequences: Seq[Sequence], draft_length: int, vocabulary: DraftVocabulary) -> TrainingBatch:
    """Pad sequences to one batch; padded anchors look at row 0 and are never supervised."""
    batch, rows = len(sequences), max(sequence.keys_values.shape[3] for sequence in sequences)
    anchors = max(1, *(len(sequence.answer) - 1 for sequence in sequences))
    layers, _, kv_heads, _, head_dim = sequences[0].keys_values.shape
    cached = torch.zeros(layers, 2, batch, kv_heads, rows, head_dim)
    states = torch.zeros(batch, anchors + draft_length, sequences[0].hidden.shape[1])
    tokens = torch.full((batch, anchors + draft_length), UNSUPERVISED)
    positions = torch.zeros(batch, anchors, dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        cached[:, :, row, :, : sequence.keys_values.shape[3]] = sequence.keys_values
        count = len(sequence.answer) - 1
        states[row, : count + 1] = sequence.hidden[len(sequence.prompt) - 1 :]
        tokens[row, : count + 1] = torch.tensor(sequence.answer)
        positions[row, :count] = torch.arange(count) + len(sequence.prompt) - 1
    windows = tokens.unfold(1, draft_length + 1, 1)[:, :anchors]
    inputs, truth = windows[..., :-1].clamp(min=0), windows[..., 1:]
    # tokens are a prefix of true ids followed by UNSUPERVISED, so a padded input always comes with a padded target.
    targets = torch.where(truth >= 0, vocabulary.target_to_draft[truth.clamp(min=0)], UNSUPERVISED)
    mask = torch.arange(rows)[None, None, None, :] <= positions[:, None, :, None]
    pairs = [(cached[layer, 0], cached[layer, 1]) for layer in range(layers)]
    return TrainingBatch(states, inputs, targets, positions, pairs, mask)


def batch_order(sequences: Seq[Sequence], batch_sequences: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices of each batch of an epoch: equal lengths together, batches shuffled by (seed, epoch) alone."""
    generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
    jitter = torch.randperm(len(sequences), generator=generator).tolist()
    # Every anchor behind an answer's end is computed for nothing; who shares a length's batch changes with the epoch.
    by_length = sorted(range(len(sequences)), key=lambda i: (len(sequences[i].answer), jitter[i]))
    batches = [by_length[i : i + batch_sequences] for i in range(0, len(by_length), batch_sequences)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
