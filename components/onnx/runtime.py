"""A bundle at work: onnxruntime sessions over one set of preallocated buffers.

Owns the KV buffers, the bindings and the sessions. It needs onnxruntime, numpy and tokenizers only, so it runs on a
device as it runs here. It refuses bundles whose files or graph interfaces differ from the manifest. Its surprising
decision: "past" and "present" of a layer are the same memory, and the head is bound to that memory too, so a KV row is
written once and never copied; roll-back is a change of one number.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from tokenizers import Tokenizer

from components.core.errors import UserError
from components.core.host import resolve_threads
from components.core.manifest import Graph, Manifest, bundle_hash, check_files, read_manifest
from components.onnx.loaded import Bundle

__all__ = ["Bundle", "OrtBackbone", "OrtHead", "open_bundle"]

TOKENIZER_FILE = "tokenizer.json"
PROVIDERS = ["CPUExecutionProvider"]
EXPORT_AGAIN = "run `mtp repro export`"


def open_session(path: Path, threads: int) -> Any:
    """An onnxruntime session with an explicit number of threads.

    Args:
        path: .onnx file.
        threads: intra-op threads, at least 1.

    Raises:
        UserError: this onnxruntime cannot load the graph.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    # Backbone and head have a thread pool each: one that spins after its run takes the cores from the other.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        return ort.InferenceSession(str(path), options, providers=PROVIDERS)
    except Exception as error:  # onnxruntime's own exceptions share no base class
        raise UserError(
            f"onnxruntime {ort.__version__} cannot load {path.name}", str(error)[:300], EXPORT_AGAIN
        ) from error


def check_interface(session: Any, graph: Graph) -> None:
    """Compare names and shapes of a session with the manifest.

    Raises:
        UserError: names the first input or output that differs.
    """
    for kind, found, wanted in (
        ("input", session.get_inputs(), graph.inputs),
        ("output", session.get_outputs(), graph.outputs),
    ):
        seen = {(value.name, tuple(value.shape)) for value in found}
        for tensor in wanted:
            if (tensor.name, tensor.shape) not in seen:
                raise UserError(
                    f"{graph.file} does not have the {kind} that the manifest promises",
                    f"no {tensor.name} of shape {list(tensor.shape)}",
                    EXPORT_AGAIN,
                )


def share(array: NDArray[Any]) -> Any:
    """An OrtValue over the memory of ``array``.

    Raises:
        RuntimeError: this onnxruntime made a copy.
    """
    value = ort.OrtValue.ortvalue_from_numpy(array)
    if value.data_ptr() != array.ctypes.data:
        raise RuntimeError(f"onnxruntime {ort.__version__} copies arrays into OrtValues; buffers cannot be shared")
    return value


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
        self._length = 0
        binding = self._bind(len(tokens), logit_rows=1)
        self._run(binding, tokens, first_logit=len(tokens) - 1)
        self.last_logits = self._logits_of(1)[0]
        self.keep(len(tokens))
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
