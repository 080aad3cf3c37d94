"""A bundle at work: the backbone over one set of preallocated buffers, and a bundle opened whole.

Owns the KV buffers, the backbone's bindings, and who is put together with whom. It needs onnxruntime, numpy and
tokenizers only, so it runs on a device as it runs here. It refuses bundles whose files or graph interfaces differ from
the manifest. Its surprising decision: "past" and "present" of a layer are the same memory, and the head is bound to it
too, so a KV row is written once and never copied; roll-back is a change of one number.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from components.core.errors import UserError
from components.core.host import resolve_threads
from components.core.manifest import Manifest, bundle_hash, check_files, read_manifest
from components.onnx.loaded import Bundle
from components.onnx.ort_head import OrtHead
from components.onnx.sessions import check_interface, open_session, share

__all__ = ["Bundle", "OrtBackbone", "OrtHead", "open_bundle"]

TOKENIZER_FILE = "tokenizer.json"


class OrtBackbone:
    """Implements :class:`components.decoding.loop.Backbone`, and not `TreeBackbone`: the loop refuses trees by name.

    GroupQueryAttention of the oldest runtime that bundles promise (1.20) takes no attention bias, so the graph has no
    way to let a row see its own branch only.

    Args:
        session: the backbone graph.
        manifest: shapes and the number of rows.

    Attributes:
        buffers: by input name, keys or values of a layer, float32 [1, kv_heads, max_length + padding, head_dim].
    """

    def __init__(self, session: Any, manifest: Manifest) -> None:
        card = manifest.backbone
        self._session = session
        self._max_length = manifest.max_length
        self._length = 0
        self._width = 0
        rows = manifest.max_length + manifest.kv_padding_rows
        self.buffers: dict[str, NDArray[np.float32]] = {
            tensor.name: np.zeros((1, card.kv_heads, rows, card.head_dim), dtype=np.float32)
            for tensor in manifest.graphs["backbone"].inputs
            if tensor.name.startswith("past_key_values.")
        }
        self.values = {name: share(array) for name, array in self.buffers.items()}
        self._ids = np.zeros((1, manifest.max_length), dtype=np.int64)
        self._past = np.zeros(1, dtype=np.int64)
        self._first_logit = np.zeros(1, dtype=np.int64)
        self._hidden = np.zeros((1, manifest.max_length, card.hidden_size), dtype=np.float32)
        self._logits: dict[int, NDArray[np.float32]] = {}
        self._vocab_size = card.vocab_size
        self._bindings: dict[int, Any] = {}
        self._last_row = 0
        self._prompt: tuple[tuple[int, ...], NDArray[np.float32], NDArray[np.float32]] | None = None
        self.last_logits: NDArray[np.float32] = np.zeros((0, card.vocab_size), dtype=np.float32)

    @property
    def length(self) -> int:
        """Valid rows in the buffers."""
        return self._length

    @property
    def max_length(self) -> int:
        """Rows that the buffers hold for tokens."""
        return self._max_length

    @property
    def last_hidden(self) -> NDArray[np.float32]:
        """h_p of the last valid row, a view of [1, 1, hidden_size] float32."""
        return self._hidden[:, self._last_row : self._last_row + 1]

    @property
    def pass_hidden(self) -> NDArray[np.float32]:
        """Hidden states of the last pass, a view of [q, hidden_size] float32."""
        return self._hidden[0, : self._width]

    def prefill(self, tokens: Sequence[int]) -> int:
        """Start anew with a prompt; returns the argmax after its last token.

        Raises:
            UserError: the prompt leaves no room for a token.
        """
        if len(tokens) >= self._max_length:
            raise UserError(
                "the prompt is too long for this bundle",
                f"{len(tokens)} tokens for {self._max_length} rows",
                "shorten the text, or raise runtime.max_length and run `mtp repro export`",
            )
        if not tokens:
            raise UserError("the prompt is empty", "0 tokens", "give some text")
        self._length, self._prompt = 0, None
        binding = self._bind(len(tokens), logit_rows=1)
        self._run(binding, tokens, first_logit=len(tokens) - 1)
        self.last_logits = self._logits_of(1)[0]
        self.keep(len(tokens))
        self._prompt = tuple(tokens), self.last_hidden.copy(), self.last_logits.copy()
        return int(self.last_logits[0].argmax())

    def rewind(self, tokens: Sequence[int]) -> int:
        """Back to the end of the prompt that was prefilled last: rows before it are never written, so they still stand.

        Raises:
            ValueError: it was another prompt.
        """
        if self._prompt is None or self._prompt[0] != tuple(tokens):
            raise ValueError("only the prompt that was prefilled last can be gone back to")
        _, hidden, self.last_logits = self._prompt
        self._length, self._last_row = len(tokens), 0
        self._hidden[:, :1] = hidden
        return int(self.last_logits[0].argmax())

    def verify(self, tokens: Sequence[int]) -> list[int]:
        """One pass after the valid rows; returns the argmax after each token.

        Raises:
            UserError: the buffers are full.
        """
        width = len(tokens)
        if self._length + width > self._max_length:
            raise UserError(
                "the context is full",
                f"{self._length} + {width} tokens for {self._max_length} rows",
                "shorten the text, or raise runtime.max_length and run `mtp repro export`",
            )
        if width not in self._bindings:
            self._bindings[width] = self._bind(width, logit_rows=width)
        self._run(self._bindings[width], tokens, first_logit=0)
        self.last_logits = self._logits_of(width)[0]
        return [int(token) for token in self.last_logits.argmax(axis=-1)]

    def keep(self, rows: int) -> None:
        """Make the first ``rows`` rows of the last pass valid; the others will be overwritten before they are read.

        Raises:
            ValueError: the last pass had fewer rows, or ``rows`` is not positive.
        """
        if not 0 < rows <= self._width:
            raise ValueError(f"keep({rows}) after a pass of {self._width} rows")
        self._length += rows
        self._last_row = rows - 1

    def _run(self, binding: Any, tokens: Sequence[int], first_logit: int) -> None:
        self._width = len(tokens)
        self._ids[0, : self._width] = tokens
        self._past[0], self._first_logit[0] = self._length, first_logit
        self._session.run_with_iobinding(binding)

    def _logits_of(self, width: int) -> NDArray[np.float32]:
        if width not in self._logits:
            self._logits[width] = np.zeros((1, width, self._vocab_size), dtype=np.float32)
        return self._logits[width]

    def _bind(self, width: int, logit_rows: int) -> Any:
        binding = self._session.io_binding()
        binding.bind_ortvalue_input("input_ids", share(self._ids[:, :width]))
        binding.bind_ortvalue_input("past_length", share(self._past))
        binding.bind_ortvalue_input("first_logit", share(self._first_logit))
        binding.bind_ortvalue_output("hidden_states", share(self._hidden[:, :width]))
        binding.bind_ortvalue_output("logits", share(self._logits_of(logit_rows)))
        for name, value in self.values.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(name.replace("past_key_values.", "present."), value)
        return binding


def open_bundle(folder: Path, threads: int = 0, verify_hashes: bool = True) -> Bundle:
    """Load a bundle from any folder.

    Args:
        folder: holds manifest.json and the files that it names.
        threads: intra-op threads; 0 uses every core the process may use.
        verify_hashes: compare every file with the manifest first (half a second per 500 MB).

    Raises:
        UserError: missing or changed files, or graphs that this onnxruntime cannot load.
    """
    manifest = read_manifest(folder)
    if verify_hashes:
        check_files(folder, manifest)
    used = resolve_threads(threads)
    sessions = {}
    for part, graph in manifest.graphs.items():
        sessions[part] = open_session(folder / graph.file, used)
        check_interface(sessions[part], graph)
    backbone = OrtBackbone(sessions["backbone"], manifest)
    return Bundle(
        folder=folder,
        sha256=bundle_hash(folder),
        manifest=manifest,
        tokenizer=Tokenizer.from_file(str(folder / TOKENIZER_FILE)),
        backbone=backbone,
        head=OrtHead(sessions["head"], manifest, backbone),
        threads=used,
        lock=threading.Lock(),
    )
