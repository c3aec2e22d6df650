"""Views callers' inputs and outputs as NumPy or CuPy arrays on the same memory; errors name the wrong argument.

GPU arrays are CuPy's, or another library's through DLPack or __cuda_array_interface__. All others are host arrays: NumPy's, or
objects that NumPy reads. Numbers, single or in lists, become an array of the expected type, if it represents their values.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from cuda_kernels.driver import code_of
from cuda_kernels.launch import Cuda
from gpu_runtime.runtime.plan_record import Bound
from gpu_runtime.text import dims, printable, suggest
from tactics.format import DTYPES

DLPACK_CUDA = (2, 13)  # DLDeviceType: CUDA's device memory, and managed memory
NUMPY_READS = ("__array_interface__", "__array_struct__", "__array__")
NUMBERS = (bool, int, float, list, tuple)
UNREADABLE = (BufferError, TypeError, ValueError, AttributeError)  # from a library that refuses to export its array
CONVERT, ALLOCATE = "convert it with .astype(np.{})", "allocate it with dtype np.{}"
SHOWN = 8  # names in a message
ON_ANOTHER = "make the context with device='cuda:{}'"


class Given(NamedTuple):
    """A caller's input or output as a NumPy array or, with `on_gpu`, as a CuPy array.

    `foreign`: another library owns the memory and may reuse it after the array is dropped; `stream`: the handle of the
    stream that computes the array, None for CuPy's current stream.
    """

    array: Any
    on_gpu: bool
    foreign: bool = False
    stream: int | None = None


class Named(Protocol):
    """An input or output of a plan, an engine or a model: anything with a name."""

    @property
    def name(self) -> str: ...


def check_names(expected: Iterable[Named], inputs: object) -> None:
    """Raises TypeError or ValueError unless `inputs` is a mapping with a value for each name, and no others."""
    names = sorted(info.name for info in expected)
    if not isinstance(inputs, Mapping):
        first = printable(repr(names[0])) if names else "name"
        what = f"a mapping of input names to arrays, such as run({{{first}: array}})"
        raise TypeError(f"inputs: expected {what}, got {kind(inputs)}; the names are {_listed(names)}")
    if set(inputs) != set(names):
        got = sorted(map(str, inputs))
        hint = suggest([n for n in got if n not in names], [n for n in names if n not in inputs])
        raise ValueError(printable(f"inputs: expected the names {_listed(names)}, got {_listed(got)}{hint}"))


def named(expected: Sequence[Bound], out: object) -> list[tuple[Bound, Any]]:
    """Returns (output, array) for each output that the caller's `out` names; [] if it is None.

    Raises TypeError unless `out` is a mapping or None, ValueError for an unknown name.
    """
    names = [info.name for info in expected]
    if out is None:
        return []
    if not isinstance(out, Mapping):
        wanted = f"a mapping of output names to arrays, such as out={{{printable(repr(names[0]))}: array}}"
        raise TypeError(f"out: expected {wanted}, got {kind(out)}; the names are {_listed(names)}")
    check_known("out", names, out)
    return [(info, out[info.name]) for info in expected if info.name in out]


def check_known(what: str, names: Sequence[str], given: Iterable[object]) -> None:
    """Raises ValueError if a name of `given` is not among `names`. `what`: the argument's name, for the message."""
    if unknown := sorted(str(name) for name in given if name not in names):
        hint = suggest(unknown, names)
        raise ValueError(printable(f"{what}: expected names out of {_listed(names)}, got {_listed(unknown)}{hint}"))


def _listed(names: Sequence[str]) -> str:
    shown = [n if len(n) <= 100 else n[:97] + "..." for n in names[:SHOWN]]
    return str(shown) if len(names) <= SHOWN else f"{str(shown)[:-1]}, ... ({len(names)} in all)]"


def kind(a: object) -> str:
    """Describes a value for a message: its type, for an array also its shape."""
    shape = a.shape if isinstance(a, np.ndarray) else ()
    text = type(a).__name__ if type(a).__module__ in ("builtins", "numpy") else f"{type(a).__module__}.{type(a).__name__}"
    return printable(text) + (f" of shape {dims(shape)}" if shape else "")


def shape_of(a: Any) -> tuple[int, ...] | None:
    """Returns an input's shape before the input is read; None if only reading it can give the shape, or the error."""
    interface = getattr(a, "__cuda_array_interface__", None)
    try:
        if interface is not None or hasattr(a, "shape"):
            return tuple(map(int, interface["shape"] if interface else a.shape))
        return None if hasattr(a, "__dlpack__") else np.shape(a)
    except (*UNREADABLE, LookupError, RuntimeError):
        return None


def _check_shape(what: str, info: Bound, shape: tuple[int, ...]) -> None:
    if shape != info.shape:
        raise ValueError(
            f"{what}: expected shape {dims(info.shape)}, got {dims(shape)}. "
            "Sizes are fixed when an engine is built: build one with --shapes, in Python shapes=, for this size"
        )


def _check_fits(what: str, info: Bound, array: Any, cure: str) -> None:
    """Raises ValueError if shape or type differ from those of the plan's input or output."""
    _check_shape(what, info, tuple(array.shape))
    want = DTYPES[info.dtype]
    if array.dtype != want:
        raise ValueError(f"{what}: expected dtype {want}, got {array.dtype}; {cure.format(want)}")


# ---- host arrays


def host_inputs(expected: Sequence[Bound], inputs: Any) -> dict[str, np.ndarray]:
    """Returns the inputs of `Context.run` as NumPy arrays by name.

    Raises TypeError or ValueError, as `run` does, for wrong names, shapes and types.
    """
    check_names(expected, inputs)
    return {info.name: host_input(info, inputs[info.name]) for info in expected}


def host_input(info: Bound, a: Any) -> np.ndarray:
    """Returns an input as a NumPy array, on the caller's memory where possible.

    It is a copy if the caller's array has the other byte order, or if numbers are given instead of an array. Raises
    TypeError or ValueError.
    """
    what = _input(info)
    array = _numbers(what, info, a) if isinstance(a, NUMBERS) else _host(what, info, a)
    want = DTYPES[info.dtype]
    if not array.dtype.isnative and array.dtype.newbyteorder("=") == want:
        array = array.astype(want)
    _check_fits(what, info, array, CONVERT)
    return array


def _input(info: Bound) -> str:
    return f"input {printable(repr(info.name))}"


def _host(what: str, info: Bound, a: Any) -> np.ndarray:
    """Returns a NumPy array on the memory of any library's host array. Raises TypeError or ValueError if NumPy cannot
    read it.
    """
    if (masked := sys.modules.get("numpy.ma")) and isinstance(a, masked.MaskedArray):  # its module is then imported
        raise ValueError(f"{what}: expected an array, got a masked array, whose mask would be ignored: give its .filled(value)")
    if isinstance(a, np.ndarray | np.generic):
        return np.asarray(a)
    wanted = f"an array of shape {dims(info.shape)} and dtype {DTYPES[info.dtype]}"
    try:
        if any(hasattr(a, name) for name in NUMPY_READS):
            return np.asarray(a)
        if hasattr(a, "__dlpack__"):
            return np.from_dlpack(a)
        if _is_buffer(a):
            return np.asarray(memoryview(a))
    except (*UNREADABLE, RuntimeError) as e:
        raise ValueError(f"{what}: expected {wanted}, got {kind(a)}, which NumPy cannot read: {printable(str(e))}") from e
    if hasattr(a, "__cuda_array_interface__"):
        raise ValueError(f"{what}: got {kind(a)} on a GPU, but this context runs in the emulator: copy it to the host first")
    raise TypeError(f"{what}: expected {wanted}, got {kind(a)}")


def _is_buffer(a: Any) -> bool:
    try:
        memoryview(a)
    except TypeError:
        return False
    return True


def _numbers(what: str, info: Bound, a: Any) -> np.ndarray:
    """Converts numbers to an array of the input's type (FP16 and FP32 round). Raises ValueError if the type cannot hold a
    number.
    """
    want = DTYPES[info.dtype]
    try:
        array = np.asarray(a)
    except UNREADABLE as e:
        wanted, got = f"{dims(info.shape)} numbers in nested lists", "rows of unequal lengths, or values that are not numbers"
        raise ValueError(f"{what}: expected {wanted}, got {got}: {printable(str(e))}") from e
    _check_shape(what, info, array.shape)
    if array.dtype.kind not in ("biuf" if want.kind == "f" else "biu" if want.kind in "iu" else "b"):
        raise ValueError(f"{what}: expected numbers that are {want}, got {array.dtype} in {kind(a)}")
    with np.errstate(over="ignore"):
        converted = array.astype(want)
    lost = (np.isinf(converted) & ~np.isinf(array)) if want.kind == "f" else converted != array
    if lost.any():
        raise ValueError(f"{what}: expected numbers that {want} holds, got {array[lost][0]}")
    return converted


def host_output(info: Bound, a: Any) -> np.ndarray:
    """Returns a NumPy array on the memory of `a`, which the run will fill. Raises TypeError or ValueError if it does not
    fit.
    """
    what = _output(info)
    if isinstance(a, NUMBERS):
        raise TypeError(f"{what}: expected an array to fill, got {kind(a)}: np.empty({info.shape}, np.{DTYPES[info.dtype]})")
    array = _host(what, info, a)
    _check_fits(what, info, array, ALLOCATE)
    if not isinstance(a, np.ndarray) and not np.may_share_memory(array, _host(what, info, a)):
        raise ValueError(f"{what}: NumPy can only copy {kind(a)}, so results would go to the copy: give a writable NumPy array")
    if not array.flags.writeable:
        raise ValueError(f"{what}: expected a writable array, got a read-only one: give a copy")
    if not array.flags.c_contiguous:
        raise ValueError(_not_contiguous(what, "np.empty"))
    return array


def _output(info: Bound) -> str:
    return f"out {printable(repr(info.name))}"


def _not_contiguous(what: str, cure: str) -> str:
    return f"{what}: expected a C-contiguous array: pass one of {cure}, then copy the result into yours"


# ---- on a GPU


def device_input(gpu: Cuda, info: Bound, a: Any) -> Given:
    """Returns an input in place, on the GPU or on the host; only numbers and arrays of another byte order are copied."""
    given = on_gpu(gpu, _input(info), a)
    if given is None:
        return Given(host_input(info, a), False)
    _check_fits(_input(info), info, given.array, CONVERT)
    return given


def device_output(gpu: Cuda, info: Bound, a: Any) -> Given:
    """Returns an output in place, on the GPU or on the host, which the run will fill."""
    what = _output(info)
    given = on_gpu(gpu, what, a, writes=True)
    if given is None:
        return Given(host_output(info, a), False)
    _check_fits(what, info, given.array, ALLOCATE)
    if not given.array.flags.c_contiguous:
        raise ValueError(_not_contiguous(what, "cupy.empty"))
    return given


def on_gpu(gpu: Cuda, what: str, a: Any, writes: bool = False, cure: str = ON_ANOTHER) -> Given | None:
    """Returns a GPU array as a CuPy array on the same memory; None for a host array.

    `what`: the argument's name, for messages; `writes`: the array will be written; `cure`: the sentence for an array of
    another GPU. Raises ValueError for an array that cannot be used.
    """
    if isinstance(a, (np.ndarray, np.generic, *NUMBERS)):
        return None
    if isinstance(a, gpu.cupy.ndarray):
        found = Given(a, True)
    elif hasattr(a, "__dlpack_device__"):
        if a.__dlpack_device__()[0] not in DLPACK_CUDA:
            return None
        found = _from_dlpack(gpu, what, a)
    elif hasattr(a, "__cuda_array_interface__"):
        found = _interface(gpu, what, a, writes)
    else:
        return None
    if (other := found.array.device.id) != gpu.number:
        cure = f"copy it there, or {cure.format(other)}"
        raise ValueError(f"{what}: it lies on GPU {other}, expected GPU {gpu.number}: {cure}")
    return found


def _from_dlpack(gpu: Cuda, what: str, a: Any) -> Given:
    try:
        with gpu.current():  # the producer makes this stream wait for the array's computation
            return Given(gpu.cupy.from_dlpack(a), True, True, _torch_stream(a))
    except (*UNREADABLE, RuntimeError) as e:
        if code_of(e) is not None:  # CUDA's own
            raise
        raise ValueError(f"{what}: {kind(a)} is not given by DLPack: {printable(str(e))}") from e


def _torch_stream(a: Any) -> int | None:
    """Returns the handle of PyTorch's current stream if `a` is a PyTorch tensor (written and freed in its order), else None."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(a, torch.Tensor):
        return None
    return int(torch.cuda.current_stream(a.device).cuda_stream)


def _interface(gpu: Cuda, what: str, a: Any, writes: bool) -> Given:
    """Returns an array given by __cuda_array_interface__ (Numba's documentation, version 3) as a CuPy array.

    The interface's `stream` computes the array; None if it is ready; 1 and 2 are CUDA's default streams, and 0 is undefined.
    `writes`: the array will be written. Raises ValueError for one with a mask, or that cannot be written.
    """
    interface = a.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise ValueError(f"{what}: its __cuda_array_interface__ has a mask; give the array that holds the values alone")
    if interface.get("stream") == 0:
        raise ValueError(
            f"{what}: stream 0 in __cuda_array_interface__ is ambiguous: expected 1 (legacy default), 2 (per-thread default), "
            "a handle or None"
        )
    address, read_only = interface["data"]
    if writes and read_only:
        raise ValueError(f"{what}: expected a writable array, got a read-only one: give a copy")
    cupy, dtype, shape = gpu.cupy, np.dtype(interface["typestr"]), tuple(interface["shape"])
    strides = interface.get("strides")
    reach = sum((n - 1) * abs(s) for n, s in zip(shape, strides or (), strict=bool(strides))) + dtype.itemsize
    nbytes = 0 if 0 in shape else reach if strides else int(np.prod(shape)) * dtype.itemsize
    memory = cupy.cuda.UnownedMemory(address, nbytes, a, gpu.number if not nbytes else -1)
    array = cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)
    return Given(array, True, True, interface.get("stream"))


def handle_of(cupy: Any, stream: Any) -> int | None:
    """Returns the CUDA handle of a stream: CuPy's, PyTorch's, another library's with __cuda_stream__, or a handle itself.

    None if `stream` is None, or without a GPU, where `cupy`, the module, is None.
    """
    if stream is None or cupy is None:
        return None
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    if isinstance(stream, cupy.cuda.Stream | cupy.cuda.ExternalStream):
        return int(stream.ptr)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(stream, torch.cuda.Stream):
        return int(stream.cuda_stream)
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    wanted = "a stream of CuPy or PyTorch, an object with __cuda_stream__, or a handle"
    raise TypeError(f"stream: expected {wanted}, got {kind(stream)}")


def check_no_overlap(outputs: Mapping[str, Given]) -> None:
    """Raises ValueError if two outputs, which are contiguous, share memory."""
    spans = sorted((address(g), name) for name, g in outputs.items() if g.array.nbytes)
    for (start, name), (after, other) in zip(spans, spans[1:], strict=False):
        if after < start + outputs[name].array.nbytes:
            raise ValueError(printable(f"out: expected one array per output, but the arrays of {name!r} and {other!r} overlap"))


def address(given: Given) -> int:
    return int(given.array.data.ptr if given.on_gpu else given.array.ctypes.data)
