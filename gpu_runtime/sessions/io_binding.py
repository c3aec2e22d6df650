"""onnxruntime's IOBinding and OrtValue: a session's inputs and outputs in the caller's memory, on the host or on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from gpu_runtime.runtime.arrays import check_known
from gpu_runtime.sessions.open_sizes import Signature

# ONNX's numbers of element types -> NumPy's names.
ELEMENT_TYPES = {1: "float32", 2: "uint8", 3: "int8", 6: "int32", 7: "int64", 9: "bool", 10: "float16"}
Run = Callable[[Mapping[str, Any], Mapping[str, Any]], tuple[Mapping[str, Any], Any]]


class OrtValue:
    """An output of a run, as a NumPy or CuPy `array`, with the methods of onnxruntime's OrtValue."""

    def __init__(self, array: Any) -> None:
        self.array, self._on_host = array, isinstance(array, np.ndarray)

    def numpy(self) -> np.ndarray:
        return self.array if self._on_host else self.array.get()

    def shape(self) -> list[int]:
        return list(self.array.shape)

    def element_type(self) -> int:
        return next(number for number, name in ELEMENT_TYPES.items() if name == self.array.dtype.name)

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data if self._on_host else self.array.data.ptr)

    def device_name(self) -> str:
        return "cpu" if self._on_host else "cuda"


class IOBinding:
    """The inputs and outputs of a session at addresses, as InferenceSession.io_binding returns it. `run`: runs arrays by input
    name into given arrays, and returns all outputs and CuPy, None for it in the emulator.

    Addresses are on the host ("cpu") or on the session's GPU ("cuda"); their memory must last until they are bound anew. A run
    follows CuPy's current stream, and returns at its end, so that nothing remains to be waited for.
    """

    def __init__(self, declared: Signature, run: Run, emulated: bool) -> None:
        self._declared, self._run, self._places = declared, run, ("cpu",) if emulated else ("cpu", "cuda")
        self._inputs: dict[str, Any] = {}
        self._outputs: dict[str, tuple[str, Any]] = {}  # name -> (place, the array to fill or None)
        self._found: list[OrtValue] = []
        self._alive: dict[tuple[bool, str], Any] = {}  # OrtValues, whose memory is bound

    def bind_cpu_input(self, name: str, arr_on_cpu: Any) -> None:
        check_known("input", [arg.name for arg in self._declared.inputs], [name])
        self._inputs[name] = arr_on_cpu

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Binds an input to memory of this shape and type at the address `buffer_ptr`.

        `device_type`: "cpu" or "cuda". Raises ValueError for an unknown name, place or type.
        """
        self.bind_cpu_input(name, self._array(device_type, element_type, shape, buffer_ptr))

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Binds an output to memory at the address `buffer_ptr`; None: each run puts it into new memory on `device_type`.

        `element_type` and `shape` are needed with an address. Raises ValueError as `bind_input` does.
        """
        check_known("output", [arg.name for arg in self._declared.outputs], [name])
        if buffer_ptr is not None and (element_type is None or shape is None):
            raise ValueError("buffer_ptr: expected element_type and shape with it")
        array = self._array(device_type, element_type, shape or (), buffer_ptr)
        self._outputs[name] = device_type.lower(), array

    def bind_ortvalue_input(self, name: str, ortvalue: Any) -> None:
        """Binds an input to an OrtValue: onnxruntime's, or one that `get_outputs` returned."""
        self._alive[True, name] = ortvalue
        self.bind_input(name, ortvalue.device_name(), 0, ortvalue.element_type(), ortvalue.shape(), ortvalue.data_ptr())

    def bind_ortvalue_output(self, name: str, ortvalue: Any) -> None:
        self._alive[False, name] = ortvalue
        self.bind_output(name, ortvalue.device_name(), 0, ortvalue.element_type(), ortvalue.shape(), ortvalue.data_ptr())

    def get_outputs(self) -> list[OrtValue]:
        """Returns the outputs of the last run, in the order in which they were bound."""
        return list(self._found)

    def copy_outputs_to_cpu(self) -> list[np.ndarray]:
        return [value.numpy() for value in self._found]

    def synchronize_inputs(self) -> None:
        """Do nothing: a run follows CuPy's current stream."""

    def synchronize_outputs(self) -> None:
        """Do nothing: a run has ended when it returns."""

    def clear_binding_inputs(self) -> None:
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        self._outputs, self._found = {}, []

    def run(self) -> None:
        """Runs the bound inputs, and waits for the end of the run, as onnxruntime does."""
        filled = {name: array for name, (_, array) in self._outputs.items() if array is not None}
        found, cupy = self._run(self._inputs, filled)
        if cupy is not None:
            places = {"cpu": cupy.asnumpy, "cuda": cupy.asarray}
            found = {name: places[place](found[name]) for name, (place, _) in self._outputs.items()}
            cupy.cuda.get_current_stream().synchronize()
        self._found = [OrtValue(found[name]) for name in self._outputs]

    def _array(self, place: str, element_type: Any, shape: Sequence[int], address: int | None) -> Any:
        """Returns a caller's memory as a NumPy array, or on the GPU as an object that CuPy reads; None if `address` is None.

        Raises ValueError for another place or type.
        """
        if not isinstance(place, str) or place.lower() not in self._places:
            raise ValueError(
                f"device_type: expected {' or '.join(self._places)}, which this InferenceSession reads, got {place!r}"
            )
        if address is None:
            return None
        if isinstance(element_type, int) and element_type not in ELEMENT_TYPES:
            raise ValueError(f"element_type: expected NumPy's or one of {sorted(ELEMENT_TYPES)}, got {element_type}")
        dtype = np.dtype(ELEMENT_TYPES[element_type] if isinstance(element_type, int) else element_type)
        found = {"data": (int(address), False), "shape": tuple(map(int, shape)), "typestr": dtype.str, "version": 3}
        if place.lower() == "cuda":
            return SimpleNamespace(__cuda_array_interface__=found)
        return np.asarray(SimpleNamespace(__array_interface__=found))
