"""The head's graph at work, on the backbone's own buffers.

Owns the head's bindings. It refuses nothing of its own: what does not fit the manifest was refused before. Its
surprising decision: it holds no keys and no values; what it reads is bound from the backbone's memory, and stays there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from components.core.manifest import Manifest
from components.onnx.sessions import share

if TYPE_CHECKING:
    from components.onnx.runtime import OrtBackbone


class OrtHead:
    """Implements :class:`components.decoding.drafting.StepDrafter`; reads the backbone's buffers where they lie.

    A step's outputs are the next step's inputs, so there are two sets of output buffers, written in turn.

    Attributes:
        keys_values: by input name, what is bound as keys and values: the backbone's own OrtValues.
    """

    def __init__(self, session: Any, manifest: Manifest, backbone: OrtBackbone) -> None:
        self._session, self._backbone = session, backbone
        self._token = np.zeros((1, 1), dtype=np.int64)
        self._valid_rows = np.zeros(1, dtype=np.int64)
        self._outputs: list[dict[str, NDArray[Any]]] = [
            {
                "draft": np.zeros((1, 1), dtype=np.int64),
                "probability": np.zeros((1, 1), dtype=np.float32),
                "state": np.zeros((1, 1, manifest.backbone.hidden_size), dtype=np.float32),
            }
            for _ in range(2)
        ]
        self.keys_values: dict[str, Any] = {}
        self._first = self._bind({"token": share(self._token)}, self._outputs[0])
        self._later = [self._bind(self._inputs_from(1 - turn), self._outputs[turn]) for turn in range(2)]
        for tensor in manifest.graphs["head"].inputs:
            if tensor.name in backbone.values:
                self.bind_rows(tensor.name, backbone.values[tensor.name])

    def bind_rows(self, name: str, value: Any) -> None:
        """Read keys or values ``name`` from the memory of ``value`` from now on."""
        for binding in (self._first, *self._later):
            binding.bind_ortvalue_input(name, value)
        self.keys_values[name] = value

    def drafts(self, token: int) -> Iterator[tuple[int, float]]:
        """A round behind ``token``; the backbone must have processed everything before it, and nothing meanwhile."""
        self._token[0, 0] = token
        self._valid_rows[0] = self._backbone.length
        self._first.bind_ortvalue_input("hidden", share(self._backbone.last_hidden))
        for step in count():
            turn = step % 2
            self._session.run_with_iobinding(self._later[turn] if step else self._first)
            made = self._outputs[turn]
            yield int(made["draft"][0, 0]), float(made["probability"][0, 0])

    def _inputs_from(self, turn: int) -> dict[str, Any]:
        made = self._outputs[turn]
        return {"token": share(made["draft"]), "hidden": share(made["state"])}

    def _bind(self, inputs: dict[str, Any], outputs: dict[str, NDArray[Any]]) -> Any:
        binding = self._session.io_binding()
        for name, value in ({"valid_rows": share(self._valid_rows)} | inputs).items():
            binding.bind_ortvalue_input(name, value)
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, share(array))
        return binding
