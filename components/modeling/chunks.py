"""Units of distillation: which prompts one process decodes into one shard.

Owns the order of prompts. It depends on nothing but the prompts, so shards hold the same bytes whatever the number of
processes and wherever a killed run went on. Its surprising decision: prompts are sorted by their tokens, not by their
length: neighbours then share the longest prefixes, and packed passes have no padding that lengths could spare.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from components.core.manifest import TaskPrompt


@dataclass(frozen=True)
class Chunk:
    """Prompts of one task that are decoded together.

    Attributes:
        number: index of the shard that will hold them.
        prompt_ids: name of each prompt.
        prompts: token ids of each prompt.
        task: template and stop rule.
    """

    number: int
    prompt_ids: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    task: TaskPrompt

    @property
    def tokens(self) -> int:
        """Upper bound of the tokens to be processed; orders chunks by their cost."""
        return sum(len(prompt) + self.task.max_new_tokens for prompt in self.prompts)


def make_chunks(
    rows: Sequence[tuple[str, str, Sequence[int]]], tasks: dict[str, TaskPrompt], chunk_prompts: int
) -> list[Chunk]:
    """Cut (prompt name, task, token ids) into chunks of one task, of even size, at most ``chunk_prompts``."""
    chunks: list[Chunk] = []
    for name in sorted(tasks):
        of_task = sorted((tuple(ids), prompt) for prompt, task, ids in rows if task == name)
        count = math.ceil(len(of_task) / chunk_prompts)
        for index in range(count):
            part = of_task[len(of_task) * index // count : len(of_task) * (index + 1) // count]
            ids, names = tuple(ids for ids, _ in part), tuple(prompt for _, prompt in part)
            chunks.append(Chunk(len(chunks), names, ids, tasks[name]))
    return chunks


def shared_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
