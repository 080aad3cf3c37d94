"""Under what circumstances a figure about a bundle was taken: machine, threads, precision, runtime.

Owns the `created_with` of device evidence. A verdict holds for these circumstances and no others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from components.core.host import host_card

if TYPE_CHECKING:
    from components.onnx.runtime import Bundle


def created_with(bundle: Bundle) -> dict[str, object]:
    """Host card, numeric mode and the promise of the runtime, as plain data for JSON."""
    return {
        **host_card("onnxruntime", "numpy", "tokenizers").as_dict(),
        "threads": bundle.threads,
        "precision": bundle.manifest.precision,
        "providers": ["CPUExecutionProvider"],
        "attention_padding_rows": bundle.manifest.kv_padding_rows,
        "policy": bundle.manifest.policies.policy.model_dump(),
    }
