"""Captured sequences in memory-mappable shards.

Owns the shard format: one safetensors file per shard, three tensors per sequence, the texts in its metadata. It
refuses rows that decoding would not show a head: exactly `prompt + answer - 1` rows are kept, of keys and values as of
hidden states; the last answer token was never processed and has none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from components.core.errors import UserError
from components.core.files import atomic_path


@dataclass(frozen=True)
class Sequence:
    """One prompt, its answer and what the backbone computed for them.

    Attributes:
        prompt_id: name of the prompt.
        prompt, answer: token ids; the answer ends with its end-of-sequence token, if that ended it.
        stop_reason: eos, stop_text or length.
        text: decoded answer, cut at the stop text.
        hidden: states after the final norm of rows 0 .. P+A-2, [P+A-1, hidden_size] float32; row P-1+i gave answer[i].
        keys_values: cached rows 0 .. P+A-2, [kv_layers, 2, kv_heads, P+A-1, head_dim] float32.
    """

    prompt_id: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    stop_reason: str
    text: str
    hidden: Tensor
    keys_values: Tensor

    def __post_init__(self) -> None:
        rows = len(self.prompt) + len(self.answer) - 1
        if self.hidden.shape[0] != rows or self.keys_values.shape[3] != rows:
            raise ValueError(
                f"{self.prompt_id}: {self.hidden.shape[0]} states and {self.keys_values.shape[3]} rows "
                f"for {len(self.prompt)} + {len(self.answer)} tokens"
            )


def shard_path(folder: Path, number: int) -> Path:
    """File of shard ``number``."""
    return folder / f"shard-{number:05d}.safetensors"


def write_shard(folder: Path, number: int, sequences: list[Sequence]) -> None:
    """Write a shard; it exists only when it is whole."""
    tensors: dict[str, Tensor] = {}
    texts = []
    for index, sequence in enumerate(sequences):
        tensors[f"{index}.hidden"] = sequence.hidden.contiguous()
        tensors[f"{index}.keys_values"] = sequence.keys_values.contiguous()
        tensors[f"{index}.tokens"] = torch.tensor(sequence.prompt + sequence.answer, dtype=torch.int32)
        texts.append([sequence.prompt_id, len(sequence.prompt), sequence.stop_reason, sequence.text])
    with atomic_path(shard_path(folder, number)) as temporary:
        save_file(tensors, temporary, metadata={"sequences": json.dumps(texts)})


def read_shard(path: Path) -> Iterator[Sequence]:
    """Read a shard; tensors are memory-mapped, bytes come in when touched.

    Raises:
        UserError: the file is damaged.
    """
    try:
        with safe_open(path, framework="pt") as shard:
            for index, (prompt_id, prompt_tokens, reason, text) in enumerate(json.loads(shard.metadata()["sequences"])):
                tokens = tuple(shard.get_tensor(f"{index}.tokens").tolist())
                yield Sequence(
                    prompt_id=prompt_id,
                    prompt=tokens[:prompt_tokens],
                    answer=tokens[prompt_tokens:],
                    stop_reason=reason,
                    text=text,
                    hidden=shard.get_tensor(f"{index}.hidden"),
                    keys_values=shard.get_tensor(f"{index}.keys_values"),
                )
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise UserError(f"{path} is damaged", str(error)[:200], "run `mtp repro distil`") from error


def read_shards(folder: Path) -> Iterator[Sequence]:
    """Every sequence of every shard, in shard order."""
    for path in sorted(folder.glob("shard-*.safetensors")):
        yield from read_shard(path)
