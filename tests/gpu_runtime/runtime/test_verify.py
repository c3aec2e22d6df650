"""Engines whose plan does not follow from its layers are refused, each with its sentence; whatever is built is accepted."""

import io
import json
import os
import re
import struct
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpu_runtime import cli, engine, pipeline
from gpu_runtime.engine import Engine
from gpu_runtime.errors import EngineError, ModelError
from gpu_runtime.runtime.plan_record import EngineRecord, LaunchStep
from tactics import codec
from tests import crafted
from tests.reference_run import model, node

pytestmark = pytest.mark.slow  # the engines that all others are made from take ten seconds to build
JOINED, GATHERED = 0, 4  # of crafted.bases


def read(data: bytes) -> Engine:
    return engine.decode(io.BytesIO(data), len(data), "x.engine")


def recorded(data: dict) -> EngineRecord:
    return codec.from_json(EngineRecord, {k: v for k, v in data.items() if k not in ("format_version", "plan_sha256")})


def plan_of(data) -> dict:
    return data["plans"][0]


def at(data, kind: str) -> dict:
    """The first launched layer that computes such a problem."""
    layers = (layer for layer in plan_of(data)["layers"] if layer["problem"] and layer["tactic"])
    return next(layer for layer in layers if layer["problem"]["type"] == kind)


def moved(name: str, to: str):
    """Tensor `name` lies where `to` does, wherever either is named."""

    def change(plan):
        tensors = [t for layer in plan_of(plan)["layers"] for t in (*layer["inputs"], *layer["outputs"])]
        there = next(t["offset"] for t in tensors if t["name"] == to)
        for t in tensors:
            if t["name"] == name:
                t["offset"] = there
        crafted.agree(plan)

    return change


def tile(plan):
    layer = at(plan, "ConvProblem")
    layer["tactic"] = re.sub(r"_\d+x\d+x\d+_w", "_48x48x48_w", layer["tactic"])
    crafted.agree(plan)


def other_tile(plan):
    """A tile of the family's, but of more shared memory than the device has."""
    plan["device"] |= {"smem_per_block": 4096}


def shrink(plan):
    plan_of(plan)["memory"]["workspace"][1] //= 2


def onto_counters(plan):
    plan_of(plan)["memory"]["workspace"][0] = plan_of(plan)["memory"]["zeros"][0][0]
    crafted.agree(plan)


# fmt: off
CASES = {
    "a tile of nobody's": (JOINED, tile, "cannot compute"),
    "a tile that the device has no room for": (JOINED, other_tile, "cannot compute"),
    "an output over its own input": (JOINED, moved("p", "r"), "writes over tensor 'r', which is read later"),
    "an output over what is still to be read": (JOINED, moved("k", "y"), "to which no earlier layer wrote|writes over"),
    "a workspace too small": (JOINED, shrink, "expected 131072 bytes of workspace"),
    "a workspace over the counters": (JOINED, onto_counters, "writes over the counters"),
    "counters that nobody clears": (JOINED, lambda p: plan_of(p)["memory"].update(zeros=[]), "bytes of counters"),
    "less memory than is used": (JOINED, lambda p: plan_of(p)["memory"].update(activation_bytes=256), "256|ends at"),
    "more memory than is used": (JOINED, lambda p: plan_of(p)["memory"].update(activation_bytes=1 << 40), "its tensors end"),
    "a piece that begins inside a vector": (
        JOINED,
        lambda p: next(t for x in plan_of(p)["layers"] for t in x["outputs"] if t.get("inside"))["inside"].update(channel=3),
        "are not a tensor of|does not fit",
    ),
    "sections exchanged": (JOINED, lambda p: [s.update(name=n["name"]) for s, n in zip(
        p["sections"][:2], [dict(x) for x in reversed(p["sections"][:2])], strict=True)], "expected a section|args"),
    "a table that leads elsewhere": (GATHERED, None, "differs from the table of its problem"),
    "a problem of huge sizes": (
        JOINED, lambda p: at(p, "ConvProblem")["problem"].update(dilation=[2**62, 1]), "at most 31 bits",
    ),
    "a device of a billion SMs": (JOINED, lambda p: p["device"].update(num_sms=10**9), "no GPU's num_sms"),
}
# fmt: on


@pytest.mark.parametrize("case", CASES)
def test_crafted_plans_are_refused(case):
    base, change, sentence = CASES[case]
    plan, arena = crafted.opened(crafted.bases()[base][1])
    if change is None:
        s = next(s for s in plan["sections"] if s["name"].endswith(".table"))
        arena[s["offset"] : s["offset"] + 4] = np.int32(1 << 20).tobytes()
    else:
        change(plan)
    with pytest.raises(EngineError, match=sentence) as caught:
        read(crafted.sealed(plan, arena))
    assert str(caught.value).startswith("x.engine: ")
    assert "uild" in str(caught.value), "the message names the cure"


# ---- steps: no file has them, so there is nothing to craft


STEPS = ("steps", "frees", "kernel", "values", "grid", "block", "smem", "args", "covers", "function", "part")
CRAFTED_STEPS = {
    "any address as an argument": {"args": (("i64", 0x7F0000000000),)},
    "another stride": {"args": (("i32", 64),)},
    "an offset into the weights": {"args": (("weights", 1 << 40),)},
    "another grid": {"grid": (2**31 - 1, 1, 1)},
    "another block": {"block": (32, 1, 1)},
    "another kernel": {"kernel": "pool_global"},
    "more shared memory": {"smem": 1024},
    "another layer's step": {"covers": (0,)},
}


def keys(value) -> set[str]:
    """All names in a plan but those in problems and sparsity rows, which have a `kernel` of their own."""
    if isinstance(value, dict):
        return {*value} | {k for name, inner in value.items() if name not in ("problem", "rows") for k in keys(inner)}
    return {k for inner in value for k in keys(inner)} if isinstance(value, list) else set()


@pytest.mark.parametrize("base", [JOINED, GATHERED])
def test_no_file_has_a_step(base):
    data = crafted.bases()[base][1]
    plan, arena = crafted.opened(data)
    assert not keys(plan_of(plan)) & set(STEPS) and read(data).plan.steps
    for name in ("steps", "frees"):
        other = json.loads(json.dumps(plan))
        plan_of(other)[name] = []
        with pytest.raises(EngineError, match=f"has an unknown '{name}'"):
            read(crafted.sealed(other, arena))


@pytest.mark.parametrize("case", CRAFTED_STEPS)
def test_steps_that_a_program_made_are_not_run(case):
    """An engine from elsewhere is run, and written, by the steps that its layers give."""
    made = read(crafted.bases()[JOINED][1])
    steps = tuple(replace(s, **CRAFTED_STEPS[case]) if isinstance(s, LaunchStep) else s for s in made.plan.steps)
    for wrong in (steps, made.plan.steps[:-1], (*made.plan.steps, made.plan.steps[-1]), ()):
        record = replace(made.record, plans=(replace(made.plan, steps=wrong, frees=((0, ((0, 256),)),)),))
        with Engine(record, made.weights).context(device="emulator", graph=False) as context:
            assert context.plan == made.plan
        assert read(engine.encode(Engine(record, made.weights))).plan == made.plan


def test_a_library_function_reads_and_writes_what_its_layer_says():
    plan = read(crafted.bases()[JOINED][1]).plan
    (i,) = (i for i, layer in enumerate(plan.layers) if layer.type == "library")
    (step,) = (s for s in plan.steps if s.covers == (i,))
    (x,), (y,) = plan.layers[i].inputs, plan.layers[i].outputs
    assert [a.at for a in step.args if a] == [("arena", x.offset), ("arena", y.offset)]


def test_an_engine_says_whether_it_was_checked(tmp_path, capsys):
    plan, arena = crafted.opened(crafted.bases()[JOINED][1])
    made = read(crafted.sealed(plan, arena))
    assert made.checked and made.layer_info()["LaunchesChecked"]
    plan["source_hash"] = "0" * 64
    (tmp_path / "other.engine").write_bytes(crafted.sealed(plan, arena))
    other = engine.load(tmp_path / "other.engine")
    assert not other.checked
    with pytest.raises(EngineError, match="other kernel sources"):
        other.context(device="emulator")
    cli.main(["inspect", str(tmp_path / "other.engine")])
    assert "trust    not checked: the engine was built with other kernel sources" in capsys.readouterr().out


def test_a_plan_from_elsewhere_is_checked_before_it_runs():
    made = read(crafted.bases()[JOINED][1])
    Engine(made.record, made.weights).context(device="emulator").close()
    data = engine.file_data(made.record)
    tile(data)
    plan = recorded(data)
    with pytest.raises(EngineError, match="plan is not valid: .* cannot compute .* Build the engine again"):
        Engine(plan, made.weights).context(device="emulator")


def test_checking_takes_little():
    """Of the time that a network's plan takes to read, what no file should feel: under 3 ms per layer on a busy core."""
    data = crafted.bases()[JOINED][1]
    layers = len(read(data).plan.layers)
    began = time.process_time()
    read(data)
    assert time.process_time() - began < 0.02 + 0.003 * layers


# ---- engines from builds are accepted


def test_a_model_that_would_not_load_is_refused_when_it_is_built(tmp_path):
    weights = {"w": np.ones((8, 8, 1, 1), np.float32)}
    proto = model([node("Conv", "x w", "y", dilations=(1 << 62, 1 << 62))], {"x": (1, 8, 5, 5)}, "y", weights)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match="expected .* at most"):
        pipeline.build(tmp_path / "m.onnx", device="h200")


def test_what_reading_refuses_is_not_sealed():
    plan, arena = crafted.opened(crafted.bases()[JOINED][1])
    engine.seal(recorded(plan), np.frombuffer(bytes(arena), np.uint8))
    tile(plan)
    with pytest.raises(ValueError, match=r"could not be loaded again: in its plan, layers\[\d+\] .* cannot compute"):
        engine.seal(recorded(plan), np.frombuffer(bytes(arena), np.uint8))


def test_padding_with_infinity_is_built_and_loaded(tmp_path):
    pads = {"p": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "v": np.float32(-np.inf)}
    nodes = [node("Pad", "x p v", "a"), node("MaxPool", "a", "y", kernel_shape=(3, 3))]
    proto = model(nodes, {"x": (1, 8, 6, 6)}, "y", pads)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    made = pipeline.build(tmp_path / "m.onnx", device="h200")
    again = read(engine.encode(made))
    x = np.random.default_rng(0).standard_normal((1, 8, 6, 6)).astype(np.float32)
    with warnings.catch_warnings(), again.context(device="emulator") as context:
        warnings.simplefilter("ignore")
        assert np.isfinite(context.run({"x": x})["y"]).all()


# ---- headers and names


NOTHING = {
    "lists": b"[" + b"[]," * 20_000_000 + b"0]",
    "records": b'{"a":' + b"[" + b"{}," * 20_000_000 + b"0]}",
    "blanks": b"{" + b" " * 63_000_000 + b"}",
    "zeros": b'{"a":[' + b"0," * 30_000_000 + b"0]}",
    "a long text": b'{"__metadata__":{"plan":"' + b"x" * 63_000_000 + b'"}}',
    "depth": b"[" * 60_000_000,
}


@pytest.mark.parametrize("kind", NOTHING)
def test_a_large_header_of_nothing(tmp_path, kind):
    """In a process of its own: what it takes at most, beside the file."""
    path = tmp_path / "x.engine"
    path.write_bytes(struct.pack("<Q", len(NOTHING[kind])) + NOTHING[kind])
    script = (
        "import resource, sys\n"
        "from gpu_runtime import engine\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: engine.load(sys.argv[1])\n"
        "except engine.EngineError as e: print(e)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)\n"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", script, str(path)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=20, check=True)
    sentence, mib = run.stdout.strip().rsplit("\n", 1)
    assert "x.engine: " in sentence and int(mib) < 600, run.stdout


EVIL = "\x1b]0;owned\x07\x1b[2J\u202ex"


@pytest.mark.parametrize("command", [["inspect"], ["explain"], ["inspect", "--json"], ["explain", "--json"]])
def test_names_command_no_terminal(tmp_path, capsys, command):
    plan, arena = crafted.opened(crafted.bases()[JOINED][1])
    for s in plan["sections"]:
        layer, _, part = s["name"].rpartition(".")
        s["name"] = f"{layer}{EVIL}.{part}"
    for row in plan_of(plan)["sparsity"]["rows"]:
        row["layer"] += EVIL  # a reason is one of a table's codes: another is refused when the engine is read
    for record in (*plan_of(plan)["layers"], plan["model"]):
        record["name"] += EVIL
    plan["device"]["title"] += EVIL
    plan["timing"]["label"] += EVIL
    (tmp_path / "evil.engine").write_bytes(crafted.sealed(plan, arena))
    cli.main([command[0], str(tmp_path / "evil.engine"), *command[1:]])
    told = capsys.readouterr().out
    assert told and not set(told) & {"\x1b", "\x07", "\u202e"}
    assert "\\x1b" in told or "\\u001b" in told


def test_messages_and_warnings_command_no_terminal():
    for kind in (EngineError, ModelError):
        assert str(kind(f"a\n{EVIL}")) == "a\n\\x1b]0;owned\\x07\\x1b[2J\\u202ex"
