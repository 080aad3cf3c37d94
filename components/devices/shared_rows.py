"""Proof that the head owns no keys and no values: addresses of what its session is bound to, before and after rounds.

Owns the comparison. It refuses to take a name for a proof: only the address of the memory counts, and it is asked
twice, since a binding could be replaced while decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from components.onnx.runtime import Bundle


@dataclass(frozen=True)
class SharedRows:
    """What the head's session reads.

    Attributes:
        buffers: keys and values that it is bound to.
        rounds: passes of the backbone between the first look and the last.
        shared_bytes: of buffers that lie where the backbone's lie.
        owned_bytes: of all others.
    """

    buffers: int
    rounds: int
    shared_bytes: int
    owned_bytes: int


def look_at_addresses(bundle: Bundle, prompt: Sequence[int], draft_length: int) -> SharedRows:
    """Decode one round after ``prompt`` and compare the addresses of every buffer that the head reads.

    Raises:
        RuntimeError: the head reads other memory than the backbone writes, or the memory has moved.
    """
    backbone, head = bundle.backbone, bundle.head
    before = _addresses(bundle)
    newest = backbone.prefill(prompt)
    drafts = [draft for draft, _ in islice(head.drafts(newest), draft_length)]
    backbone.verify([newest, *drafts])
    backbone.keep(1)
    after = _addresses(bundle)
    sizes = {name: backbone.buffers[name].nbytes for name in head.keys_values}
    wrong = [name for name in sizes if len({*before[name], *after[name]}) != 1]
    owned = sum(sizes[name] for name in wrong)
    if owned or not sizes:
        raise RuntimeError(f"the head reads {len(sizes)} buffers, {owned} bytes of them its own: {wrong}")
    return SharedRows(len(sizes), 1, sum(sizes.values()), owned)


def _addresses(bundle: Bundle) -> dict[str, tuple[int, int]]:
    """Of each buffer that the head reads: where the backbone's array lies, and where the head looks."""
    return {
        name: (bundle.backbone.buffers[name].ctypes.data, value.data_ptr())
        for name, value in bundle.head.keys_values.items()
    }
