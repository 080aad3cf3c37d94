"""Self-distillation: the frozen backbone answers the prompts; what the head will read is captured in the same passes.

Owns continuous batching: a fixed number of slots, each refilled from the chunk's queue as soon as its answer ends, and
the capture of KV rows and hidden states *while* generating: a second pass over prompt and answer would double the cost.
It refuses to sample: answers are what the model alone would write. Its surprising decision: a chunk is a shard: what
one process decodes together is written together, so a killed run loses one chunk per process and nothing else.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from components.core.parallel import map_processes
from components.decoding.stopping import Answer, StopRule
from components.modeling.backbone import Backbone, load_backbone
from components.modeling.chunks import Chunk, shared_tokens
from components.modeling.features import Sequence as CapturedSequence
from components.modeling.features import shard_path, write_shard
from components.modeling.packed import ATTENTION, Admission, PackedPass, SlotRows

ADMIT_TOKENS = 384  # prompt tokens that one pass may add: larger passes overflow the cache, smaller ones starve it


@dataclass(frozen=True)
class Work:
    """What decoding cost; sums over chunks.

    Attributes:
        prompts: answered prompts.
        computed_tokens: prompt tokens that went through the backbone.
        shared_tokens: prompt tokens whose rows were copied from another prompt.
        answer_tokens: emitted tokens.
        passes: forward passes.
        busy_s: seconds of the processes, each counted in full; loading of the model left out.
    """

    prompts: int = 0
    computed_tokens: int = 0
    shared_tokens: int = 0
    answer_tokens: int = 0
    passes: int = 0
    busy_s: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Slot:
    """A prompt and its answer in writing.

    Attributes:
        index: of the prompt in its chunk.
        prompt: token ids.
        answer: what has been written; the slot is free once it is done.
    """

    index: int
    prompt: tuple[int, ...]
    answer: Answer

    @property
    def rows(self) -> int:
        """Rows processed so far: the last answer token has neither a row nor a hidden state yet."""
        return len(self.prompt) + len(self.answer.tokens) - 1


class ChunkDecoder:
    """Greedy decoding of one chunk after another, with capture.

    Args:
        backbone: the frozen model, loaded with ``attention=ATTENTION``.
        kv_layers: backbone layers whose keys and values are captured.
        decode: token ids to text, for stop texts.
        slots: prompts decoded at once.
    """

    def __init__(
        self, backbone: Backbone, kv_layers: Sequence[int], decode: Callable[[Sequence[int]], str], slots: int
    ) -> None:
        self.backbone, self.kv_layers, self.decode, self.slots = backbone, tuple(kv_layers), decode, slots

    def run(self, chunk: Chunk) -> tuple[list[CapturedSequence], Work]:
        """Decode every prompt of the chunk; the sequences are in the order of its prompts."""
        return _ChunkRun(self, chunk).finish()


class _ChunkRun:
    """The state of one chunk: who sits in which slot, who waits, who is done."""

    def __init__(self, decoder: ChunkDecoder, chunk: Chunk) -> None:
        task, card = chunk.task, decoder.backbone.card
        self.decoder, self.chunk, self.work = decoder, chunk, Work()
        self.rule = StopRule(frozenset(card.eos_ids), tuple(task.stop_texts), task.max_new_tokens)
        self.places = min(decoder.slots, len(chunk.prompts))
        self.held = SlotRows(card, self.places, max(map(len, chunk.prompts)) + task.max_new_tokens)
        self.slots: list[Slot] = []
        self.waiting = deque(range(len(chunk.prompts)))
        self.done: dict[int, CapturedSequence] = {}

    @torch.inference_mode()
    def finish(self) -> tuple[list[CapturedSequence], Work]:
        started = time.monotonic()
        while len(self.done) < len(self.chunk.prompts):
            self._one_pass()
        self.work += Work(prompts=len(self.done), busy_s=time.monotonic() - started)
        return [self.done[index] for index in range(len(self.done))], self.work

    def _one_pass(self) -> None:
        writing = [place for place, slot in enumerate(self.slots) if not slot.answer.done]
        triples = [(place, self.slots[place].rows, self.slots[place].answer.tokens[-1]) for place in writing]
        admissions = self._admit()
        backbone = self.decoder.backbone
        states = self.held.run(backbone, PackedPass(triples, admissions))
        tokens = (states @ backbone.output_rows.T).argmax(dim=-1).tolist()
        for place, token in zip([*writing, *(a.slot for a in admissions)], tokens, strict=True):
            if self.slots[place].answer.append(token):
                self._capture(place)
        if not self.waiting:
            self._close_gaps()
        self.work += Work(
            computed_tokens=sum(a.computed for a in admissions),
            shared_tokens=sum(a.shared for a in admissions),
            answer_tokens=len(tokens),
            passes=1,
        )

    def _admit(self) -> list[Admission]:
        """Fill free places from the queue, until the pass is large enough."""
        admissions: list[Admission] = []
        free = [place for place, slot in enumerate(self.slots) if slot.answer.done]
        free += range(len(self.slots), self.places)
        while self.waiting and free and sum(a.computed for a in admissions) < ADMIT_TOKENS:
            admissions.append(self._admit_one(free.pop(0), self.waiting.popleft()))
        return admissions

    def _admit_one(self, place: int, index: int) -> Admission:
        prompt = self.chunk.prompts[index]
        # Free places give rows too, as long as nobody else has moved in: `slots` names whose rows a place holds.
        shared, _, donor = max(
            ((shared_tokens(slot.prompt, prompt[:-1]), at == place, at) for at, slot in enumerate(self.slots)),
            default=(0, True, place),
        )
        slot = Slot(index, prompt, Answer(self.rule, self.decoder.decode))
        self.slots[place : place + 1] = [slot]
        return Admission(place, prompt, donor, shared)

    def _capture(self, place: int) -> None:
        slot = self.slots[place]
        hidden, keys_values = self.held.captured(place, slot.rows, self.decoder.kv_layers)
        self.done[slot.index] = CapturedSequence(
            prompt_id=self.chunk.prompt_ids[slot.index],
            prompt=slot.prompt,
            answer=tuple(slot.answer.tokens),
            stop_reason=slot.answer.stop_reason,
            text=slot.answer.text(),
            hidden=hidden,
            keys_values=keys_values,
        )

    def _close_gaps(self) -> None:
        """Move the last writers into free places: attention then reads no row of an ended answer."""
        writers = [slot for slot in self.slots if not slot.answer.done]
        for place in range(len(writers)):
            if self.slots[place].answer.done:
                source = max(at for at, slot in enumerate(self.slots) if not slot.answer.done)
                self.held.move(source, place, self.slots[source].rows)
                self.slots[place], self.slots[source] = self.slots[source], self.slots[place]
        del self.slots[len(writers) :]


_worker: ChunkDecoder | None = None


def _start_worker(backbone_folder: Path, kv_layers: Sequence[int], slots: int) -> None:
    global _worker  # noqa: PLW0603 - a pool hands its workers no state of their own
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(backbone_folder / "tokenizer.json"))
    _worker = ChunkDecoder(load_backbone(backbone_folder, ATTENTION), kv_layers, tokenizer.decode, slots)


def _run_worker(task: tuple[Chunk, Path]) -> Work:
    chunk, folder = task
    if _worker is None:
        raise RuntimeError("the worker was not started")
    sequences, work = _worker.run(chunk)
    started = time.monotonic()
    write_shard(folder, chunk.number, sequences)
    return work + Work(busy_s=time.monotonic() - started)


def distil_chunks(
    chunks: Sequence[Chunk], backbone_folder: Path, kv_layers: Sequence[int], slots: int, folder: Path, processes: int
) -> Iterator[Work]:
    """Decode chunks into shards below ``folder``; yields each chunk's work when its shard is whole.

    Shards that exist already are left alone, so a killed run goes on where it stopped.
    """
    missing = [chunk for chunk in chunks if not shard_path(folder, chunk.number).exists()]
    # Longest first: the last chunks to finish are short ones, so no core idles for long.
    missing.sort(key=lambda chunk: -chunk.tokens)
    arguments = (backbone_folder, tuple(kv_layers), slots)
    work = [(chunk, folder) for chunk in missing]
    yield from map_processes(_run_worker, work, processes, _start_worker, arguments)
