"""What both graphs need: names of inputs and outputs, a node writer, version limits, and weights beside the graph.

Owns the names by which runtime, head and backbone meet. It refuses to write a graph that the oldest promised runtime
cannot load. Its surprising decision: weights are laid out here, not by `onnx.save`, so that their place in the file is
known and a second graph can point into it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from components.core.errors import UserError
from components.core.manifest import Graph, Tensor

MICROSOFT = "com.microsoft"
ALIGNMENT = 4096  # a page: a memory-mapped weight then starts where a page starts

# onnxruntime release -> newest (ai.onnx opset, IR version) it loads. Sources: its Compatibility page and release notes.
RUNTIME_LIMITS = {(1, 18): (21, 10), (1, 19): (21, 10), (1, 20): (21, 10), (1, 21): (22, 10), (1, 22): (22, 10)}


def key_input(layer: int) -> str:
    """Name of a layer's cached keys, [1, kv_heads, rows, head_dim] float32."""
    return f"past_key_values.{layer}.key"


def value_input(layer: int) -> str:
    """Name of a layer's cached values, [1, kv_heads, rows, head_dim] float32."""
    return f"past_key_values.{layer}.value"


def key_output(layer: int) -> str:
    """Name of a layer's updated keys; bound to the same memory as :func:`key_input`."""
    return f"present.{layer}.key"


def value_output(layer: int) -> str:
    """Name of a layer's updated values; bound to the same memory as :func:`value_input`."""
    return f"present.{layer}.value"


def version_limits(oldest_onnxruntime: str) -> tuple[int, int]:
    """Opset and IR version that the graphs may use.

    Args:
        oldest_onnxruntime: the oldest runtime that must load them, as MAJOR.MINOR.PATCH.

    Raises:
        UserError: a version for which the limits are not known.
    """
    try:
        major, minor = (int(part) for part in oldest_onnxruntime.split(".")[:2])
    except ValueError:
        major, minor = 0, 0
    known = sorted(RUNTIME_LIMITS)
    if (major, minor) < known[0]:
        raise UserError(
            f"graphs for onnxruntime {oldest_onnxruntime} cannot be written",
            f"known from {known[0][0]}.{known[0][1]} on",
            "correct runtime.oldest_onnxruntime in params.yaml",
        )
    return RUNTIME_LIMITS[max(version for version in known if version <= (major, minor))]


@dataclass
class Nodes:
    """Collects nodes; every method returns the name of the node's output.

    Args:
        prefix: start of every name, so that two writers never clash in one graph.
    """

    prefix: str
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[TensorProto] = field(default_factory=list)

    def add(self, op: str, *inputs: str, output: str = "", domain: str = "", **attributes: Any) -> str:
        """Append one node with one output."""
        name = output or f"{self.prefix}/{len(self.nodes)}/{op}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], f"{name}/node", domain=domain, **attributes))
        return name

    def constant(self, name: str, value: NDArray[np.generic]) -> str:
        """Add a weight or a constant under ``name``; a name can be given one value only."""
        full = f"{self.prefix}/{name}"
        if any(known.name == full for known in self.initializers):
            raise ValueError(f"{full} is defined twice")
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(value), full))
        return full


def tensor_card(value: onnx.ValueInfoProto) -> Tensor:
    """Name, dtype and shape of a graph input or output."""
    kind = value.type.tensor_type
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type)).name
    return Tensor(name=value.name, dtype=dtype, shape=tuple(dim.dim_param or dim.dim_value for dim in kind.shape.dim))


def graph_card(path: Path) -> Graph:
    """What the manifest says about one ONNX file."""
    model = onnx.load(path, load_external_data=False)
    return Graph(
        file=path.name,
        opset=default_opset(model),
        ir_version=model.ir_version,
        inputs=tuple(tensor_card(value) for value in model.graph.input),
        outputs=tuple(tensor_card(value) for value in model.graph.output),
    )


def default_opset(model: onnx.ModelProto) -> int:
    """Version of the standard operator set that a model asks for."""
    return next(int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx"))


def point_to(tensor: TensorProto, location: str, offset: int, length: int) -> None:
    """Make ``tensor`` refer to bytes of a file beside the graph."""
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)


def save_graph(model: onnx.ModelProto, path: Path, smallest_bytes: int = 1024) -> None:
    """Write ``path`` and ``path.data``; initializers that already point elsewhere are left as they are.

    Args:
        model: graph whose other weights are in memory; they are taken out of it.
        path: the .onnx file.
        smallest_bytes: smaller tensors stay inside the graph.
    """
    data = path.with_name(f"{path.name}.data")
    with data.open("wb") as stream:
        for tensor in model.graph.initializer:
            if tensor.data_location == TensorProto.EXTERNAL:
                continue
            content = numpy_helper.to_array(tensor).tobytes()
            if len(content) < smallest_bytes:
                continue
            stream.write(b"\0" * (-stream.tell() % ALIGNMENT))
            offset = stream.tell()
            stream.write(content)
            point_to(tensor, data.name, offset, len(content))
    path.write_bytes(model.SerializeToString(deterministic=True))


def initializer_rows(path: Path, name: str) -> int:
    """First size of a weight of an ONNX file."""
    model = onnx.load(path, load_external_data=False)
    return next(int(tensor.dims[0]) for tensor in model.graph.initializer if tensor.name == name)
