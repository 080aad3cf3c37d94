"""Which split a conversation belongs to, over all tasks.

Owns the hash that splits corpora and the ratio that splits a user's own rows. Its surprising decision: the share of
conversations that is held out is fixed, not derived from the number of prompts, so asking for more training data never
moves a conversation from test to training.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from components.core.config import SPLITS
from components.data.recipes import Candidate

HELD_OUT = {"test": 0.2, "validation": 0.05}  # shares of the conversations; the rest trains


class SplitCounts(Protocol):
    """Prompts of one task in each split (core.config.SplitSizes)."""

    train: int
    validation: int
    test: int


class DataParams(Protocol):
    """What is read of section `data`."""

    seed: int
    prompts_per_task: SplitCounts
    max_prompt_tokens: int
    deduplicate_ngram: int


def split_of(group: str, seed: int) -> str:
    """Split of a conversation, from its id and the seed alone."""
    place = int.from_bytes(hashlib.sha256(f"{seed}:split:{group}".encode()).digest()[:8]) / 2**64
    for split, share in HELD_OUT.items():
        if place < share:
            return split
        place -= share
    return "train"


def assign_rows(rows: Sequence[Candidate], data: DataParams, split_by_group: dict[str, str]) -> None:
    """Split a user's rows in the ratio of the wanted counts, whole groups only; adds to ``split_by_group``.

    Each split gets one group before the ratio counts, so that three groups are enough. A group that another task has
    placed already stays where it is.
    """
    sizes = Counter(row.group for row in rows)
    order = sorted(sizes, key=lambda group: hashlib.sha256(f"{data.seed}:split:{group}".encode()).digest())
    wanted = {split: getattr(data.prompts_per_task, split) for split in SPLITS}
    placed = Counter(dict.fromkeys(SPLITS, 0))
    for group in order:
        if group in split_by_group:
            placed[split_by_group[group]] += sizes[group]
    for group in order:
        if group not in split_by_group:
            missing = {
                split: (not placed[split], wanted[split] / sum(wanted.values()) * len(rows) - placed[split])
                for split in SPLITS
            }
            split = max(SPLITS, key=lambda one: missing[one])
            split_by_group[group] = split
            placed[split] += sizes[group]
