"""Self-distillation: the frozen backbone answers the prompts; what the head will read is captured in the same passes.

Owns batched greedy decoding with left padding, shedding of finished rows, and capture of KV rows and hidden states
*while* generating: a second pass over prompt and answer would double the cost. It refuses to sample: answers are what
the model alone would write. Its surprising decision: the answer's batch is a shard: what one process decodes
together is written together, so a killed run loses one batch per process and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import DynamicCache

from components.core.manifest import TaskPrompt
from components.core.parallel import map_processes
from components.decoding.stopping import Answer, StopRule
from components.modeling.backbone import Backbone, load_backbone
from components.modeling.features import Sequence as CapturedSequence
from components.modeling.features import shard_path, write_shard
from components.modeling.session import cached_rows

SHED_BELOW = 0.75  # compact the batch when fewer than this share of its rows still write


@dataclass(frozen=True)
class Batch:
    """Prompts decoded together: one task, similar lengths.

    Attributes:
        number: index of the shard that will hold them.
        prompts: token ids of each prompt.
        prompt_ids: name of each prompt.
        task: template and stop rule.
    """

    number: int
    prompt_ids: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    task: TaskPrompt


def make_batches(
    rows: Sequence[tuple[str, str, Sequence[int]]], tasks: dict[str, TaskPrompt], batch_rows: int
) -> list[Batch]:
    """Group (prompt name, task, token ids) by task and length; the same rows always give the same batches."""
    batches: list[Batch] = []
    for name in sorted(tasks):
        of_task = sorted((len(ids), prompt, tuple(ids)) for prompt, task, ids in rows if task == name)
        for start in range(0, len(of_task), batch_rows):
            part = of_task[start : start + batch_rows]
            ids = tuple(prompt_ids for _, _, prompt_ids in part)
            batches.append(Batch(len(batches), tuple(prompt for _, prompt, _ in part), ids, tasks[name]))
    return batches


def left_pad(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids and mask, both int64 [batch, longest]; the padding token is 0 and is never attended."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


class BatchDecoder:
    """Greedy decoding of one batch with capture.

    Args:
        backbone: the frozen model.
        kv_layers: backbone layers whose keys and values are captured.
        decode: token ids to text, for stop texts.
    """

    def __init__(self, backbone: Backbone, kv_layers: Sequence[int], decode: Callable[[Sequence[int]], str]) -> None:
        self.backbone, self.kv_layers, self.decode = backbone, tuple(kv_layers), decode

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[CapturedSequence]:
        """Decode every prompt of the batch; the result is in the order of its prompts."""
        rule = StopRule(frozenset(self.backbone.card.eos_ids), tuple(batch.task.stop_texts), batch.task.max_new_tokens)
        answers = [Answer(rule, self.decode) for _ in batch.prompts]
        hidden: list[list[Tensor]] = [[] for _ in batch.prompts]
        done: dict[int, CapturedSequence] = {}
        ids, mask = left_pad(batch.prompts)
        cache, live = DynamicCache(), list(range(len(batch.prompts)))
        while live:
            states = self._pass(ids, mask, cache)
            tokens = (states @ self.backbone.output_rows.T).argmax(dim=-1)
            for row, index in enumerate(live):
                if index in done:
                    continue
                hidden[index].append(states[row])
                if answers[index].append(int(tokens[row])):
                    done[index] = self._captured(batch, index, answers[index], hidden[index], cache, row)
            ids, mask = tokens[:, None], torch.cat((mask, torch.ones(len(live), 1, dtype=mask.dtype)), dim=1)
            ids, mask, live = self._shed(ids, mask, cache, live, done)
        return [done[index] for index in range(len(batch.prompts))]

    def _pass(self, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self.backbone.model.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True
        )
        states: Tensor = output.last_hidden_state[:, -1]
        return states

    def _shed(
        self, ids: Tensor, mask: Tensor, cache: DynamicCache, live: list[int], done: dict[int, CapturedSequence]
    ) -> tuple[Tensor, Tensor, list[int]]:
        writing = [row for row, index in enumerate(live) if index not in done]
        if not writing or len(writing) >= SHED_BELOW * len(live):
            return ids, mask, live if writing else []
        chosen = torch.tensor(writing)
        cache.batch_select_indices(chosen)
        return ids[chosen], mask[chosen], [live[row] for row in writing]

    def _captured(
        self, batch: Batch, index: int, answer: Answer, hidden: list[Tensor], cache: DynamicCache, row: int
    ) -> CapturedSequence:
        # The last answer token was never processed: it has neither a row nor a hidden state.
        rows = len(batch.prompts[index]) + len(answer.tokens) - 1
        layers = [cached_rows(cache, layer) for layer in self.kv_layers]
        keys_values = torch.stack([torch.stack((keys[row], values[row])) for keys, values in layers])
        return CapturedSequence(
            prompt_id=batch.prompt_ids[index],
            prompt=batch.prompts[index],
            answer=tuple(answer.tokens),
            stop_reason=answer.stop_reason,
            text=answer.text(),
            hidden=torch.stack(hidden).clone(),
            keys_values=keys_values[..., -rows:, :].clone(),
        )


_worker: BatchDecoder | None = None


def _start_worker(backbone_folder: Path, kv_layers: Sequence[int]) -> None:
    global _worker  # noqa: PLW0603 - a pool hands its workers no state of their own
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(backbone_folder / "tokenizer.json"))
    _worker = BatchDecoder(load_backbone(backbone_folder), kv_layers, tokenizer.decode)


def _run_worker(task: tuple[Batch, Path]) -> int:
    batch, folder = task
    if _worker is None:
        raise RuntimeError("the worker was not started")
    write_shard(folder, batch.number, _worker.run(batch))
    return len(batch.prompts)


def distil_batches(
    batches: Sequence[Batch], backbone_folder: Path, kv_layers: Sequence[int], folder: Path, processes: int
) -> Iterator[int]:
    """Decode batches into shards below ``folder``; yields the number of sequences each time a shard is whole.

    Shards that exist already are left alone, so a killed run goes on where it stopped.
    """
    missing = [batch for batch in batches if not shard_path(folder, batch.number).exists()]
    # Longest first: the last batches to finish are short ones, so no core idles for long.
    missing.sort(key=lambda batch: -len(batch.prompts[-1]))
    work = [(batch, folder) for batch in missing]
    yield from map_processes(_run_worker, work, processes, _start_worker, (backbone_folder, tuple(kv_layers)))
