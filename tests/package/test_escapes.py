"""A model whose every name, and whose file's name, commands a terminal: whatever tells of it shows the escapes as text."""

import os
import warnings
from dataclasses import replace

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from gpu_runtime import cli
from tests import onnx_backend
from tests.reference_run import model, node

EVIL = "\x1b[2J\x1b]0;owned\x07\u202e\x9b"
SHAPE = (1, 8, 4, 4)
X = np.ones(SHAPE, np.float32)
M, E, IN, OUT, NO = f"m{EVIL}.onnx", f"m{EVIL}.engine", f"x{EVIL}", f"y{EVIL}", f"no{EVIL}"


def proto():
    def names(*parts):
        return " ".join(part + EVIL for part in parts)

    w = np.zeros((8, 8, 1, 1), np.float32)
    w[:, ::2] = 0.25
    nodes = [
        node("Conv", names("x", "w"), names("c"), name=names("conv")),
        node("Relu", names("c"), names("r"), name=names("relu")),
        node("Conv", names("r", "w"), names("y"), name=names("last")),
    ]
    made = model(nodes, {IN: SHAPE}, OUT, {names("w"): w})
    made.graph.name = names("graph")
    return made


def opened(*axes: int):
    """The model with these axes of its input open, and named so too."""
    made = proto()
    for axis in axes:
        made.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = f"N{EVIL}"
    return made


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """The model and its engine, of a device and with a timing of such names, in the current folder."""
    folder, before = tmp_path_factory.mktemp("evil"), os.getcwd()
    os.chdir(folder)
    onnx.save(proto(), M)
    built = gr.build(M, device="a100", sparsity="enable")
    device = replace(built.record.device, title=f"T{EVIL}", sources=f"S{EVIL}", assumed=f"A{EVIL}")
    record = replace(built.record, device=device, timing=replace(built.record.timing, label=f"L{EVIL}"))
    gr.Engine(record, built.weights).save(E)
    np.save("x.npy", X)
    yield
    os.chdir(before)


def engine():
    return gr.load(E)


def context():
    return engine().context(device="emulator")


def build(**options):
    return lambda: gr.build(M, **{"device": "a100"} | options)


def run(*arguments, **options):
    def call():
        with context() as ctx:
            ctx.run(*arguments, **options)

    return call


def session(do):
    def call():
        with gr.InferenceSession(E, providers=["CPUExecutionProvider"]) as made:
            return do(made)

    return call


HUGE = np.full(SHAPE, 1e6, np.float32)
# fmt: off
PYTHON = (
    lambda: repr(engine()), lambda: repr(context()), lambda: str(engine().inputs[0]), lambda: repr(engine().outputs),
    lambda: str(engine().record), session(repr), session(lambda s: repr(s.get_inputs())),
    build(shapes={NO: (1,)}), build(shapes={IN: (1, 2)}), build(shapes={IN: EVIL}), build(input_formats={NO: "fp16:chw"}),
    build(input_formats=EVIL), build(output_formats=["chw", "chw"]), build(sparsity=EVIL), build(device=EVIL),
    build(calibration={NO: X}), build(calibration={IN: X[:, :2]}), build(calibration={IN: [[1], []]}),
    build(sparsity="force", save_pruned=f"{NO}/{NO}\0"), build(example_inputs=(EVIL,)),
    lambda: gr.build(NO), lambda: gr.build(opened(0, 2)), lambda: gr.build(opened(0), device="a100"),
    lambda: gr.load(NO), lambda: gr.load(M), lambda: engine().save(f"/proc/{EVIL}/x"),
    lambda: engine().context(**{NO: 1}), lambda: engine().context(device=EVIL), lambda: context().tensor(NO),
    run({NO: X}), run({IN: X[:, :2]}), run({IN: X.astype(complex)}), run({IN: EVIL}), run({IN: object()}), run({}), run([X]),
    run({IN: X}, out={NO: X}), run({IN: X}, out={OUT: X[:, :2]}), run({IN: HUGE}), run({IN: HUGE * np.inf}),
    lambda: context().run_async({IN: HUGE}).result(), lambda: repr(context().run_async({IN: X})),
    session(lambda s: s.run([NO], {IN: X})), session(lambda s: s.run(None, {NO: X})), session(lambda s: getattr(s, NO)),
    lambda: gr.InferenceSession(E, providers=[EVIL]), lambda: gr.InferenceSession(E, **{NO: 1}),
    lambda: gr.InferenceSession(NO),
    lambda: onnx_backend.prepare(proto(), EVIL), lambda: onnx_backend.prepare(proto()).run([X, X]),
    lambda: onnx_backend.prepare(proto()).run({NO: X}), lambda: onnx_backend.prepare(proto()).run([X], **{NO: 1}),
    lambda: onnx_backend.run_node(proto().graph.node[0], [X]),
)
# fmt: on
IO = ("--input", f"{IN}=x.npy", "--output")
# fmt: off
COMMANDS = (
    ("build", M), ("build", M, "--device=l4", "--verbose", "--dumpLayerInfo", "--dumpProfile", "-o", f"o{EVIL}.engine"),
    ("build", M, "--sparsity=force", "--savePruned", f"p{EVIL}.onnx", "--exportLayerInfo", f"l{EVIL}.json"), ("build", NO),
    ("build", M, f"--shapes={NO}:1x2"), ("build", M, f"--shapes={NO}"), ("build", M, EVIL), ("build", M, f"--{NO}"),
    ("build", M, "--device", EVIL), ("build", M, "--calibration", NO), ("build", M, "-o", f"{NO}/e.engine"),
    ("build", M, "--inputIOFormats", f"fp16{EVIL}"), ("build", M, "--memPoolSize", EVIL), ("build", M, "--risk", EVIL),
    ("build", M, "--minShapes", f"{IN}:1x8x4x4", "--maxShapes", f"{IN}:2x8x4x4"), ("build", f"--loadEngine={E}", M),
    ("build", f"--loadEngine={E}", "--skipInference", "--dumpLayerInfo", "--dumpProfile"),
    ("run", E, *IO, f"o{EVIL}.npz"), ("run", E, "--input", f"{NO}=x.npy", "--output", "o.npz"),
    ("run", NO, "--output", "o.npz"),
    ("run", E, "--input", f"{IN}={NO}", "--output", "o.npz"), ("run", E, "--input", EVIL, "--output", "o.npz"),
    ("inspect", M), ("inspect", M, "--json"), ("inspect", E), ("inspect", E, "--json"), ("inspect", NO),
    ("inspect", E, "--exportTrace", f"t{EVIL}"), ("inspect", M, "--exportTrace", "t"),
    ("inspect", E, "--exportOnnx", f"n{EVIL}.onnx", "--onnx", M),
    ("explain", E), ("explain", E, f"conv{EVIL}"), ("explain", E, f"cov{EVIL}"), ("explain", E, "--json"),
    ("explain", E, "--what-if", f"conv{EVIL}=sparse"), ("explain", E, "--what-if", f"conv{EVIL}={EVIL}"),
    ("report", E, "-o", f"r{EVIL}.html"), ("report", E, "-o", "r.html", "--compare", NO), ("inspect-sparsity", M, "--require"),
    ("inspect-sparsity", M, "--device", "a100"), ("inspect-sparsity", M, "--device", EVIL),
    ("plan", M, "--devices", "a100,l4"), ("plan", M, "--devices", EVIL), ("prune", M, "-o", f"q{EVIL}.onnx", "--permute"),
    ("prune", M, "-o", "q.onnx", "--layers", NO), ("compare", M, E), ("compare", M, NO),
    ("bench", E, "--predict"), ("bench", E),
    ("bench", E, "--device", EVIL), ("bench", E, "--percentile", EVIL), ("doctor", "--emulate", EVIL), (NO,), (f"--{NO}",),
)
# fmt: on


def commanding(text: str) -> str:
    """The characters that a terminal does not show."""
    return "".join(c for c in text if not c.isprintable() and c != "\n")


@pytest.mark.parametrize("call", PYTHON)
def test_what_python_is_told(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            told = call()
        except (ValueError, TypeError, AttributeError, OSError) as e:
            told = str(e)
    texts = [told, *(str(w.message) for w in caught if w.category is not ResourceWarning)]
    texts = [text for text in texts if isinstance(text, str)]
    assert texts and not any(map(commanding, texts)), ascii(texts)


@pytest.mark.slow
def test_what_the_command_line_prints(capsys):
    for words in COMMANDS:
        try:
            cli.main(list(words))
        except SystemExit as e:
            assert e.code in (1, 2, 5), words
        out, err = capsys.readouterr()
        assert out + err and not commanding(out + err), (words, ascii(out + err))
