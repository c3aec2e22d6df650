"""Engines whose plan does not follow from its layers are refused, each with its sentence; whatever is built is accepted."""

import io
import os
import re
import struct
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from gpu_runtime import cli, engine, pipeline
from gpu_runtime.engine import Engine
from gpu_runtime.errors import EngineError, ModelError
from gpu_runtime.runtime.plan_record import EngineRecord
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


def step_of(data, kind: str) -> dict:
    i = plan_of(data)["layers"].index(at(data, kind))
    return next(s for s in plan_of(data)["steps"] if s["covers"] == [i])


def stride(plan):
    args = step_of(plan, "PoolProblem")["args"]
    args[next(i for i, a in enumerate(args) if a[0] == "i32")][1] += 64


def null(plan):
    args = step_of(plan, "ConvProblem")["args"]
    args[next(i for i, a in enumerate(args) if a == ["i64", 0])][1] = 0x7F0000000000


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


CASES = {
    "any address as an argument": (JOINED, null, r"steps\[\d+\].args\[\d+\]: expected \['i64', 0\]"),
    "another stride": (JOINED, stride, r"steps\[\d+\].args\[\d+\]: expected \['i32'"),
    "a library array beyond the arena": (
        JOINED, lambda p: step_of(p, "LibraryProblem")["args"][0][3].__setitem__(0, 4000), "args",
    ),
    "a library output into the weights": (
        JOINED, lambda p: step_of(p, "LibraryProblem")["args"][-1].__setitem__(0, "weights"), "args",
    ),
    "another grid": (JOINED, lambda p: step_of(p, "PoolProblem")["grid"].__setitem__(0, 2**31 - 1), "grid: expected"),
    "another block": (JOINED, lambda p: step_of(p, "PoolProblem")["block"].__setitem__(0, 32), "block: expected"),
    "another kernel": (JOINED, lambda p: step_of(p, "PoolProblem").update(kernel="pool_global"), "kernel: expected"),
    "more shared memory": (JOINED, lambda p: step_of(p, "PoolProblem").update(smem=1024), "smem: expected"),
    "a tile of nobody's": (JOINED, tile, "is no tactic for"),
    "a tile that the device has no room for": (JOINED, other_tile, "is no tactic for"),
    "an output over its own input": (JOINED, moved("p", "r"), "its output|lies where an input does|belong to two"),
    "an output over what is still to be read": (JOINED, moved("k", "y"), "two tensors|an input does|ends|expected"),
    "a workspace too small": (JOINED, shrink, "expected 131072 bytes of workspace"),
    "a workspace over the counters": (JOINED, onto_counters, "belong to two tensors|counters"),
    "counters that nobody clears": (JOINED, lambda p: plan_of(p)["memory"].update(zeros=[]), "bytes of counters"),
    "memory freed too early": (JOINED, lambda p: plan_of(p)["memory"]["frees"][0].__setitem__(0, 0), "frees"),
    "less memory than is used": (JOINED, lambda p: plan_of(p)["memory"].update(activation_bytes=256), "256|ends at"),
    "more memory than is used": (JOINED, lambda p: plan_of(p)["memory"].update(activation_bytes=1 << 40), "its tensors end at"),
    "a step left out": (JOINED, lambda p: plan_of(p)["steps"].pop(), "its layers launch more"),
    "a step added": (JOINED, lambda p: plan_of(p)["steps"].append(plan_of(p)["steps"][-1]), "its layers launch"),
    "another layer's step": (JOINED, lambda p: plan_of(p)["steps"][2].update(covers=[0]), "covers"),
    "a piece that begins inside a vector": (
        JOINED,
        lambda p: next(t for x in plan_of(p)["layers"] for t in x["outputs"] if t.get("inside"))["inside"].update(channel=3),
        "are no tensor of|does not fit",
    ),
    "sections exchanged": (JOINED, lambda p: [s.update(name=n["name"]) for s, n in zip(
        p["sections"][:2], [dict(x) for x in reversed(p["sections"][:2])], strict=True)], "expected a section|args"),
    "a table that leads elsewhere": (GATHERED, None, "holds other numbers than its problem"),
    "a problem of huge sizes": (
        JOINED, lambda p: at(p, "ConvProblem")["problem"].update(dilation=[2**62, 1]), "at most 31 bits",
    ),
    "a device of a billion SMs": (JOINED, lambda p: p["device"].update(num_sms=10**9), "no GPU's num_sms"),
}  # fmt: skip


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
    assert "trust    not checked: its steps are those of other kernel sources" in capsys.readouterr().out


def test_a_plan_from_elsewhere_is_checked_before_it_runs():
    made = read(crafted.bases()[JOINED][1])
    Engine(made.record, made.weights).context(device="emulator").close()
    data = engine.file_data(made.record)
    stride(data)
    plan = recorded(data)
    with pytest.raises(EngineError, match=r"steps\[\d+\].args"):
        Engine(plan, made.weights).context(device="emulator")


def test_checking_takes_little():
    """Of the time that a network's plan takes to read, what no file should feel: under 3 ms per layer on a busy core."""
    data = crafted.bases()[JOINED][1]
    layers = len(read(data).plan.layers)
    began = time.process_time()
    read(data)
    assert time.process_time() - began < 0.02 + 0.003 * layers


# ---- what is built is accepted


def test_a_model_that_would_not_load_is_refused_when_it_is_built(tmp_path):
    weights = {"w": np.ones((8, 8, 1, 1), np.float32)}
    proto = model([node("Conv", "x w", "y", dilations=(1 << 62, 1 << 62))], {"x": (1, 8, 5, 5)}, "y", weights)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match="expected .* at most"):
        pipeline.build(tmp_path / "m.onnx", device="h200")


def test_what_reading_refuses_is_not_sealed():
    plan, arena = crafted.opened(crafted.bases()[JOINED][1])
    engine.seal(recorded(plan), np.frombuffer(bytes(arena), np.uint8))
    stride(plan)
    with pytest.raises(ValueError, match=r"could not be loaded again: in its plan, steps\[\d+\].args"):
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
    "lists": b"[" + b"[]," * 20_000_000 + b"0]", "records": b'{"a":' + b"[" + b"{}," * 20_000_000 + b"0]}",
    "blanks": b"{" + b" " * 63_000_000 + b"}", "zeros": b'{"a":[' + b"0," * 30_000_000 + b"0]}",
    "a long text": b'{"__metadata__":{"plan":"' + b"x" * 63_000_000 + b'"}}', "depth": b"[" * 60_000_000,
}  # fmt: skip


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
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
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
        row |= {"layer": row["layer"] + EVIL, "reason": row["reason"] + EVIL}
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
