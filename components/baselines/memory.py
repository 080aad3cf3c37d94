"""What a drafter keeps and needs in memory, measured while it drafts; and how long it takes to its first draft.

Owns the split into weights, keys and values, and activations. It refuses to derive bytes from a formula: a dispatch
mode sees every tensor that a proposal makes. What is still alive afterwards is the drafter's cache, the rest of the
peak is activations; scratch memory inside one operator is not seen. Its surprising decision: nothing is declared, so a
drafter that hides a cache is found out.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from components.baselines.contest import Contender
from components.decoding.loop import Drafter
from components.modeling.session import TorchBackbone


class LiveBytes(TorchDispatchMode):
    """Counts bytes of tensors made while it is active.

    Attributes:
        live: of those that still exist.
        peak: the most that existed at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._ours: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then count storages in its result that none of its arguments had."""
        kwargs = kwargs or {}
        given = {id(storage) for storage in _storages((args, kwargs))}
        result = function(*args, **kwargs)
        for storage in _storages(result):
            if id(storage) not in given | self._ours:
                self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        name, size = id(storage), storage.nbytes()
        self._ours.add(name)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, name, size)

    def _forget(self, name: int, size: int) -> None:
        self._ours.discard(name)
        self.live -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_iter(tree) if isinstance(leaf, Tensor)]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors; memory that several share counts once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@dataclass(frozen=True)
class FirstDraft:
    """A drafter's own cost of one prompt, the backbone's pass over it left out.

    Attributes:
        prompt_tokens: length of the prompt.
        first_draft_ms: median time from the backbone's first token to the drafter's first draft.
        samples: times it was timed.
        kv_bytes: what it keeps after a full proposal.
        activations_bytes: what it needs beyond that at its peak.
    """

    prompt_tokens: int
    first_draft_ms: float
    samples: int
    kv_bytes: int
    activations_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def measure_first_draft(drafter: Drafter, context: Sequence[int], draft_length: int, repeats: int) -> FirstDraft:
    """Time the first draft, then count the bytes of a whole proposal.

    Args:
        drafter: it must start anew when it gets a context that is not longer than the one before.
        context: a prompt and the token that followed it, just processed by the drafter's session.
        draft_length: K, for the bytes.
        repeats: timed runs, after one that is not.
    """
    drafter.propose(context, 1)
    seconds = [_timed(drafter, context) for _ in range(repeats)]
    with LiveBytes() as counted:
        drafter.propose(context, draft_length)
    kept = counted.live
    return FirstDraft(len(context) - 1, 1e3 * statistics.median(seconds), repeats, kept, counted.peak - kept)


def _timed(drafter: Drafter, context: Sequence[int]) -> float:
    started = time.perf_counter()
    drafter.propose(context, 1)
    return time.perf_counter() - started


def long_context(session: TorchBackbone, tokens: Sequence[int], length: int) -> tuple[list[int], float]:
    """Process ``length`` tokens, ``tokens`` over and over; the context with the next token, and milliseconds."""
    prompt = [tokens[index % len(tokens)] for index in range(length)]
    started = time.perf_counter()
    newest = session.prefill(prompt)
    return [*prompt, newest], 1e3 * (time.perf_counter() - started)


def memory_rows(
    contenders: Sequence[Contender],
    session: TorchBackbone,
    tokens: Sequence[int],
    lengths: Sequence[int],
    repeats: int,
) -> list[dict[str, Any]]:
    """One row per prompt length and drafter: time to the first draft, and bytes by kind.

    Args:
        session: the one that the drafters look into; it must hold the longest prompt and a round.
        tokens: what prompts are cut from.
    """
    rows = []
    for length in lengths:
        context, prefill_ms = long_context(session, tokens, length)
        for contender in contenders:
            if contender.drafter is None:
                continue
            drafter, longest = contender.drafter, contender.draft_length
            measured = measure_first_draft(drafter, context, longest, repeats).as_dict()
            weights, copied = bytes_of(contender.weights), bytes_of(contender.copied_rows)
            row = {"drafter": contender.name, "weights_bytes": weights, "copied_rows_bytes": copied, **measured}
            row["total_bytes"] = weights + copied + measured["kv_bytes"] + measured["activations_bytes"]
            rows.append(row | {"backbone_prompt_pass_ms": prefill_ms})
    return rows


def memory_saved(rows: Sequence[dict[str, Any]], ours: str, other: str) -> list[dict[str, Any]]:
    """Bytes that one instance saves by running ``ours`` instead of ``other``, at each prompt length."""
    known = {(row["drafter"], row["prompt_tokens"]): row for row in rows}
    return [
        {
            "prompt_tokens": length,
            "instead_of": other,
            **{
                f"{kind}_bytes": known[other, length][f"{kind}_bytes"] - known[ours, length][f"{kind}_bytes"]
                for kind in ("weights", "copied_rows", "kv", "activations", "total")
            },
        }
        for length in sorted({row["prompt_tokens"] for row in rows})
    ]
