"""onnxruntime sessions: opened with explicit threads, compared with the manifest, fed from our own memory.

Owns what every graph needs from onnxruntime. It refuses a graph that this onnxruntime cannot load, an interface that
differs from the manifest, and a runtime that copies arrays. Its surprising decision: a session's threads stop spinning
when its run ends, because the other graph's threads want the same cores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime as ort
from numpy.typing import NDArray

from components.core.errors import UserError
from components.core.manifest import Graph

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
