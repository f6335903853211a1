"""Small ONNX models, written and run without the library onnx.

A model is a message of Protocol Buffers; the numbers of its fields are those of onnx.proto.
"""

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from numpy.typing import NDArray

from sce.errors import needing

INT8, INT32, INT64 = 3, 6, 7  # ONNX's numbers of types
_TYPES = {"int8": INT8, "int64": INT64}
_OPSET, _IR = 18, 8

Run = Callable[..., NDArray[Any]]
Tensor = tuple[str, int, int]  # name, type, and width: it is [any, width]


class Graph:
    """Nodes and constants; each is known by the name that it is given."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def constant(self, array: NDArray[Any]) -> str:
        """Add an array."""
        name = self._name()
        dims = b"".join(_field(1, size) for size in array.shape)
        kind = _field(2, _TYPES[str(array.dtype)])
        self._parts.append(_field(5, dims + kind + _field(8, name) + _field(9, array.tobytes())))
        return name

    def node(self, operator: str, *inputs: str, **attributes: int) -> str:
        """Add an operation on what was added before, or on the input."""
        name = self._name()
        node = b"".join(_field(1, one) for one in inputs) + _field(2, name) + _field(4, operator)
        for key, value in attributes.items():
            node += _field(5, _field(1, key) + _field(3, value) + _field(20, 2))
        self._parts.append(_field(1, node))
        return name

    def run(self, given: Tensor, made: Tensor) -> Run:
        """A function of the input that gives the output."""
        parts = [*self._parts, _field(2, "graph"), _field(11, _tensor(*given))]
        graph = b"".join([*parts, _field(12, _tensor(*made))])
        model = _field(1, _IR) + _field(8, _field(1, "") + _field(2, _OPSET)) + _field(7, graph)
        return onnx_function(model)

    def _name(self) -> str:
        return f"n{len(self._parts)}"


def _field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    content = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; negative numbers as 64 bits."""
    value &= (1 << 64) - 1
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _tensor(name: str, kind: int, width: int) -> bytes:
    shape = _field(1, _field(2, "any")) + _field(1, _field(1, width))
    return _field(1, name) + _field(2, _field(1, _field(1, kind) + _field(2, shape)))


def onnx_function(model: bytes, *, threads: int = 1) -> Run:
    """The function of arrays that a model computes, of one result."""
    # Read when it is imported: from 1.29 on it would else report to its makers.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    onnxruntime = needed("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Threads that wait busily would take the cores from numpy, which ranks between two batches.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(*given: NDArray[Any]) -> NDArray[Any]:
        found: NDArray[Any]
        (found,) = session.run(None, dict(zip(names, given, strict=True)))
        return found

    return run


def needed(module: str, extra: str = "serve") -> Any:
    """A library that an extra brings."""
    with needing(extra, "an export"):
        return import_module(module)
