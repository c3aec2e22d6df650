"""Inputs and outputs of every kind that callers give, against NumPy's own conversion; and what is refused, with its words."""

import array
import re

import numpy as np
import pytest

import gpu_runtime as gr
from gpu_runtime.runtime import arrays
from gpu_runtime.runtime.plan_record import Bound
from tactics.format import DTYPES, Format
from tests.reference_run import model, node

rng = np.random.default_rng(4)
SHAPE = (2, 3, 4)
X = rng.integers(-9, 9, SHAPE).astype(np.float32)


class Only:
    """Another library's array, which has nothing but one protocol."""

    def __init__(self, values, *protocols):
        for name in protocols:
            setattr(type(self), name, property(lambda self, name=name: getattr(values, name)))


def only(values, *protocols):
    return type("Theirs", (Only,), {})(values, *protocols)


@pytest.fixture(scope="module")
def context():
    """y = x + x, z = -x, both FP32: what comes out says what went in."""
    nodes = [node("Add", "x x", "y"), node("Neg", "x", "z")]
    proto = model(nodes, {"x": SHAPE}, "y z", {})
    with gr.build(proto, device="a100").context(device="emulator") as ctx:
        yield ctx


# ---- inputs

KINDS = {
    "as it is": lambda a: a,
    "column-major": np.asfortranarray,
    "strided": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "backwards": lambda a: a[::-1, :, ::-1].copy()[::-1, :, ::-1],
    "other byte order": lambda a: a.astype(a.dtype.newbyteorder("S")),
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
    "lists": lambda a: a.tolist(),
    "tuples of arrays": lambda a: tuple(a),
    "lists of whole numbers": lambda a: a.astype(int).tolist(),
    "DLPack alone": lambda a: only(a.copy(), "__dlpack__", "__dlpack_device__"),
    "__array__ alone": lambda a: only(a, "__array__"),
    "__array_interface__ alone": lambda a: only(a, "__array_interface__"),
    "memoryview": lambda a: memoryview(a.copy()),
    "subclass": lambda a: a.view(type("Sub", (np.ndarray,), {})),
}


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_every_kind(context, kind):
    for _ in range(5):
        x = rng.integers(-100, 100, SHAPE).astype(np.float32)
        given = KINDS[kind](x)
        got = context.run({"x": given})
        assert np.array_equal(got["y"], 2 * x) and np.array_equal(got["z"], -x)
        assert got["y"].dtype == np.float32


OTHERS = (np.bool_, np.int8, np.int32, np.int64, np.uint8, np.uint64, np.float16, np.float64, np.complex64, object)


@pytest.mark.parametrize("dtype", OTHERS, ids=lambda d: np.dtype(d).name)
def test_arrays_have_the_engines_type(context, dtype):
    """No conversion of arrays that nobody asked for: it costs time, and may lose values."""
    with pytest.raises(ValueError, match=rf"input 'x': expected dtype float32, got {np.dtype(dtype)}; .*astype\(np.float32\)"):
        context.run({"x": X.astype(dtype)})


def test_numbers_become_what_numpy_makes_of_them():
    """Engines of each type; numbers that the type does not hold are refused."""
    for dtype, good, bad in (
        ("float16", [[1, 2.5, 3], [-3, 65504.0, 0.1]], 1e5),
        ("int32", [[1, 2, 3], [-4, 2**31 - 1, True]], 2**31),
        ("int64", [[1, 2, 3], [-4, 2**62, 0]], 0.5),
        ("bool", [[True, False, True], [False, False, True]], 2),
    ):
        proto = model([node("Identity", "x", "y")], {"x": (2, 3)}, "y", {}, dtype=dtype)
        with gr.build(proto, device="a100").context(device="emulator") as ctx:
            got = ctx.run({"x": good})["y"]
            assert got.dtype == dtype and np.array_equal(got, np.asarray(good, dtype))
            with pytest.raises(ValueError, match=f"input 'x': expected numbers that .*{dtype}"):
                ctx.run({"x": [[bad] * 3] * 2})


REFUSED = {
    "a bare array": (X, TypeError, "inputs: expected a mapping .*, such as run({'x': array}), got ndarray of shape 2x3x4"),
    "a list": ([X], TypeError, "inputs: expected a mapping .*, got list; the names are ['x']"),
    "nothing": (None, TypeError, "inputs: expected a mapping .*, got NoneType"),
    "no inputs": ({}, ValueError, "inputs: expected the names ['x'], got []"),
    "another name": ({"input": X}, ValueError, "inputs: expected the names ['x'], got ['input']"),
    "one too many": ({"x": X, "w": X}, ValueError, "expected the names ['x'], got ['w', 'x']"),
    "no string": ({0: X}, ValueError, "expected the names ['x'], got ['0']"),
    "shape": ({"x": X[:1]}, ValueError, "input 'x': expected shape 2x3x4, got 1x3x4. Sizes are fixed when .*--shapes"),
    "a number": ({"x": 1.0}, ValueError, "input 'x': expected shape 2x3x4, got ()"),
    "a list of numbers": ({"x": [1, 2]}, ValueError, "input 'x': expected shape 2x3x4, got 2."),
    "ragged": ({"x": [[1, 2], [3]]}, ValueError, "input 'x': expected 2x3x4 numbers .*, got rows of unequal lengths"),
    "strings": ({"x": np.full(SHAPE, "a").tolist()}, ValueError, "expected numbers that are float32, got <U1 in list"),
    "complex": ({"x": (X + 1j).tolist()}, ValueError, "input 'x': expected numbers that are float32, got complex128"),
    "too large": ({"x": np.full(SHAPE, 1e39).tolist()}, ValueError, "expected numbers that float32 holds, got 1e+39"),
    "none": ({"x": None}, TypeError, "input 'x': expected an array of shape 2x3x4 and dtype float32, got NoneType"),
    "a path": ({"x": "x.npy"}, TypeError, "input 'x': expected an array .*, got str"),
    "a generator": ({"x": iter(X)}, TypeError, "input 'x': expected an array .*, got iterator"),
    "masked": ({"x": np.ma.masked_less(X, 0)}, ValueError, "input 'x': expected an array, got a masked array.*.filled(value)"),
    "bytes": ({"x": array.array("f", [1, 2])}, ValueError, "input 'x': expected shape 2x3x4, got 2"),
}


def told(text):
    """A message of the tables as a pattern, in which `.*` alone is special."""
    return "^.*" + ".*".join(re.escape(part) for part in text.split(".*"))


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_input_says_what_was_expected_and_got(context, case):
    inputs, error, text = REFUSED[case]
    with pytest.raises(error, match=told(text)) as caught:
        context.run(inputs)
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


def test_a_misspelt_name_is_told():
    names = ["image", "mask", "scale"]
    proto = model([node("Add", "image mask", "t"), node("Mul", "t scale", "y")], {n: SHAPE for n in names}, "y", {})
    with gr.build(proto, device="a100").context(device="emulator") as ctx:
        text = "expected the names ['image', 'mask', 'scale'], got ['imag', 'mask', 'scales']; did you mean 'image' instead of "
        with pytest.raises(ValueError, match=told(text + "'imag'?; did you mean 'scale' instead of 'scales'?")):
            ctx.run({"imag": X, "mask": X, "scales": X})


def test_what_numpy_cannot_read_says_whose_it_is(context):
    class Theirs:
        def __array__(self, *args, **options):
            raise RuntimeError("use .detach()")

    with pytest.raises(ValueError, match=r"input 'x': .*Theirs, which NumPy cannot read: use .detach\(\)"):
        context.run({"x": Theirs()})


def test_torch_tensors(context):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    y = torch.empty(SHAPE)
    got = context.run({"x": torch.from_numpy(X)}, out={"y": y})
    assert got["y"] is y and np.array_equal(y.numpy(), 2 * X)
    with pytest.raises(ValueError, match="torch.Tensor, which NumPy cannot read: .*detach"):
        context.run({"x": torch.from_numpy(X).requires_grad_()})
    assert np.array_equal(torch.from_dlpack(context.run({"x": X})["z"]).numpy(), -X)


# ---- outputs that are there already


def test_outputs_are_filled_in_place(context):
    y, z = np.empty(SHAPE, np.float32), np.empty(SHAPE, np.float32)
    before = y.ctypes.data
    got = context.run({"x": X}, out={"z": z, "y": y})
    assert list(got) == ["y", "z"] and got["y"] is y and got["z"] is z and y.ctypes.data == before
    assert np.array_equal(y, 2 * X) and np.array_equal(z, -X)
    y[:] = 0
    got = context.run({"x": X}, out={"z": z})
    assert got["z"] is z and got["y"] is not y and np.array_equal(got["y"], 2 * X) and not y.any()


def test_an_output_may_be_the_input(context):
    x = X.copy()
    assert context.run({"x": x}, out={"y": x})["y"] is x and np.array_equal(x, 2 * X)


@pytest.mark.parametrize("protocols", [("__array_interface__",), ("__dlpack__", "__dlpack_device__"), ("__array__",)], ids=str)
def test_outputs_of_other_libraries(context, protocols):
    y = np.zeros(SHAPE, np.float32)
    theirs = only(y, *protocols)
    assert context.run({"x": X}, out={"y": theirs})["y"] is theirs and np.array_equal(y, 2 * X)
    flat = bytearray(X.nbytes)
    given = memoryview(flat).cast("f", SHAPE)
    context.run({"x": X}, out={"y": given})
    assert np.array_equal(np.frombuffer(flat, np.float32).reshape(SHAPE), 2 * X)


class Copies:
    """An array that gives NumPy a copy of itself."""

    def __array__(self, dtype=None, copy=None):
        return np.zeros(SHAPE, np.float32)


def frozen():
    y = np.empty(SHAPE, np.float32)
    y.setflags(write=False)
    return y


OVERLAP = np.empty((3, *SHAPE[1:]), np.float32)
OUT_REFUSED = {
    "a bare array": (X, TypeError, "out: expected a mapping of output names to arrays, such as out={'y': array}, got ndarray"),
    "another name": ({"yy": X}, ValueError, "out: expected names out of ['y', 'z'], got ['yy']"),
    "an input's name": ({"x": X, "y": X}, ValueError, "out: expected names out of ['y', 'z'], got ['x']"),
    "shape": ({"y": np.empty((2, 3), np.float32)}, ValueError, "out 'y': expected shape 2x3x4, got 2x3"),
    "dtype": ({"y": np.empty(SHAPE)}, ValueError, "out 'y': expected dtype float32, got float64; allocate it"),
    "byte order": ({"y": np.empty(SHAPE, ">f4")}, ValueError, "out 'y': expected dtype float32, got >f4"),
    "column-major": ({"y": np.empty(SHAPE, np.float32, "F")}, ValueError, "out 'y': expected a C-contiguous array.*np.empty"),
    "strided": ({"y": np.empty((2, 3, 8), np.float32)[..., ::2]}, ValueError, "out 'y': expected a C-contiguous array"),
    "read-only": ({"y": frozen()}, ValueError, "out 'y': expected a writable array, got a read-only one"),
    "overlap": ({"y": OVERLAP[:2], "z": OVERLAP[1:]}, ValueError, "but the arrays of 'y' and 'z' overlap"),
    "a copy": ({"y": Copies()}, ValueError, "out 'y': NumPy can only copy .*Copies, so results"),
    "a list": ({"y": X.tolist()}, TypeError, "out 'y': expected an array to fill, got list: np.empty((2, 3, 4), np.float32)"),
    "none": ({"y": None}, TypeError, "out 'y': expected an array of shape 2x3x4 and dtype float32, got NoneType"),
}


@pytest.mark.parametrize("case", OUT_REFUSED)
def test_a_wrong_output_says_what_was_expected_and_got(context, case):
    out, error, text = OUT_REFUSED[case]
    given = {name: a for name, a in out.items() if isinstance(a, np.ndarray)} if isinstance(out, dict) else {}
    held = {name: a.copy() for name, a in given.items()}
    with pytest.raises(error, match=told(text)):
        context.run({"x": X}, out=out)
    assert all(np.array_equal(a, held[name], equal_nan=True) for name, a in given.items()), "nothing is written"


# ---- any of these, at random


def numpys(given, dtype):
    """What NumPy makes of it, and whether an engine's input may be that: an array has its type, numbers keep their values."""
    array = np.asarray(given)
    if isinstance(given, (list, bool, int, float)):
        if array.dtype.kind == "c":
            return array, False
        with np.errstate(over="ignore", invalid="ignore"):
            told = array.astype(dtype)
        allowed = {"f": "biuf", "i": "biu", "b": "b"}[np.dtype(dtype).kind]
        kept = np.isinf(told) == np.isinf(array) if np.dtype(dtype).kind == "f" else told == array
        return told, array.dtype.kind in allowed and bool(np.all(kept))
    return array, array.dtype.newbyteorder("=") == dtype


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int32", "int64", "bool"])
def test_any_input_is_what_numpy_makes_of_it_or_refused(dtype):
    """A thousand of them: values, types, shapes, strides and wrappings drawn."""
    draw, want = np.random.default_rng(7), DTYPES[dtype]
    accepted = 0
    for _ in range(1000):
        shape = tuple(int(n) for n in draw.integers(1, 4, draw.integers(0, 4)))
        info = Bound("x", shape, (1, 1, 1, 1), Format(dtype, "chw"), 0)
        source = draw.choice(["?", "i1", "u8", "i4", "i8", "f2", "f4", "f8", "c8"]) if draw.random() < 0.5 else want.str[1:]
        given = (draw.integers(-2, 3, shape) * 10.0 ** draw.integers(0, 12)).clip(-60000, None)
        with np.errstate(over="ignore", invalid="ignore"):
            given = given.astype(source) if draw.random() < 0.9 else np.zeros((*shape, 2), source)
        given = np.asarray(given)
        wrapped = [given, given.tolist(), np.asfortranarray(given), np.repeat(given[None], 2, 0)[::2][0]]
        wrapped += [given.astype(given.dtype.newbyteorder("S")), only(given, "__array_interface__"), only(given, "__array__")]
        chosen = wrapped[draw.integers(len(wrapped))]
        value, fits = numpys(chosen if not isinstance(chosen, Only) else given, want)
        fits = fits and value.shape == shape
        try:
            got = arrays.host_input(info, chosen)
        except (TypeError, ValueError) as e:
            assert not fits and str(e).startswith("input 'x': expected"), (chosen, e)
        else:
            assert fits and got.dtype == want and np.array_equal(got, value), chosen
            accepted += 1
    assert 200 < accepted < 900
