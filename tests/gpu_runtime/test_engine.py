"""The engine file: what is written is read back, every damaged byte is noticed, failures leave files be."""

import io
import json
import os
import re
import struct
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from cuda_kernels.device import Device
from gpu_runtime import engine as eng
from gpu_runtime import engine_header
from gpu_runtime.engine import Engine, EngineError
from gpu_runtime.runtime import compatibility
from tests.example_plan import example_plan, record

ROOT = Path(__file__).parents[2]


def small_plan():
    """The least that a plan must have, so that every byte of its file can be tried."""
    plan = {key: [] for key in ("inputs", "outputs", "layers", "sections")} | {"source_hash": "00"}
    plan |= {"solution": {"total_us": 1.5, "status": "", "method": ""}, "model": {"name": "m"}, "flags": {"sparsity": "s"}}
    plan |= {"device": asdict(Device("h", "H200", "sm_90a", 1, 1, 1, 1, 1, 1, 2, 1, 1, 1, 0.5, 0.5, ""))}
    plan |= {"timing": {"kind": "predicted", "label": "p"}, "memory": {"activation_bytes": 0, "largest_live_bytes": 0}}
    plan |= {"producer": {"version": "0", "nvrtc": "0"}}
    return plan | {"sparsity": {"mode": "enable", "eligible": [], "picked": [], "rows": []}}


def make(plan=None, cubins=None, sizes=(300, 256, 1)):
    rng = np.random.default_rng(0)
    arrays = {f"w{i}": rng.integers(1, 255, size, dtype=np.uint8) for i, size in enumerate(sizes)}
    weights, sections = eng.pack(arrays)
    return Engine(replace(record(plan or example_plan()), sections=sections), weights, cubins or {})


def decode(data, **options):
    return eng.decode(io.BytesIO(data), len(data), "x.engine", **options)


def reheaded(data, change):
    """The file with `change` applied to its plan, everything else (hashes too) made to fit again."""
    (length,) = struct.unpack("<Q", data[:8])
    plan = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["plan"])
    change(plan)
    plan["plan_sha256"] = engine_header.plan_sha256(plan)
    arena = data[8 + length :]
    header = engine_header.header_of(plan, len(arena))
    return struct.pack("<Q", len(header)) + header + arena


def python(script, *args, **env):
    """What a fresh process prints; it finds this file as the module test_engine."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"} | env
    run = [sys.executable, "-c", script, *args]
    return subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout


# ------------------------------------------------------------------------------------------------- writing and reading


def test_round_trip(tmp_path):
    path = tmp_path / "model.engine"
    before = make()
    before.save(path)
    after = eng.load(path)
    assert np.array_equal(after.weights, before.weights) and not after.weights.flags.writeable
    assert after.record == replace(before.record, sections=after.record.sections)
    assert [s.name for s in after.record.sections] == ["w0", "w1", "w2"] and all(s.sha256 for s in after.record.sections)
    assert after.cubins == {}
    after.save(tmp_path / "again.engine")
    assert (tmp_path / "again.engine").read_bytes() == path.read_bytes()
    assert sorted(p.name for p in path.parent.iterdir()) == ["again.engine", "model.engine"]


def test_the_record_s_shortcuts():
    engine = make()
    assert engine.sparsity.picked and engine.plan.inputs[0].name == "image" and engine.plan.outputs[0].name == "prob"
    assert engine.layer_info()["Bindings"] == ["image", "prob"]
    assert repr(engine) == (  # steps are derived as a file is read, and this one was made by hand
        "Engine('example.onnx' for H200 SXM 141GB: image 8x3x112x112 float32 -> prob 8x10 float32; 0 launches, 1 of 8 "
        "layers with weights sparse, 1.0 KiB of weights, ~123.00 us predicted(h200))"
    )


def test_file_is_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    path = tmp_path / "model.engine"
    engine = make(cubins={"conv": b"\x7fELF code"})
    engine.save(path)
    with safetensors.safe_open(path, "numpy") as file:
        assert list(file.keys()) == ["arena"] and list(file.metadata()) == ["plan"]
        plan, arena = json.loads(file.metadata()["plan"]), file.get_tensor("arena")
    assert plan["model"]["name"] == engine.record.model.name and plan["format_version"] == engine_header.FORMAT_VERSION
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    assert start % 256 == 0 and data[start:] == arena.tobytes()
    assert data[8:30] == b'{"__metadata__":{"plan'
    for s in plan["sections"]:
        assert s["offset"] % 256 == 0
    assert np.array_equal(arena[: engine.weights.size], engine.weights)


@pytest.mark.parametrize("sizes", [(), (0,), (0, 5, 0)])
def test_engines_with_few_weights(tmp_path, sizes):
    path = tmp_path / "model.engine"
    make(small_plan(), sizes=sizes).save(path)
    assert eng.load(path).weights.size == 256 * (5 in sizes)
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(path, "numpy") as file:
        assert file.get_tensor("arena").size == 256 * (5 in sizes)


def test_pack_keeps_bytes_of_any_array():
    arrays = {"half": np.arange(6, dtype=np.float16).reshape(2, 3).T, "scalar": np.float32(2.5).reshape(())}
    arena, rows = eng.pack(arrays)
    assert [(s.name, s.offset, s.nbytes) for s in rows] == [("half", 0, 12), ("scalar", 256, 4)]
    assert arena[:12].tobytes() == np.ascontiguousarray(arrays["half"]).tobytes() and arena.size == 512


@pytest.mark.slow
def test_same_engine_same_bytes_in_every_process():
    script = (
        "import hashlib, test_engine as t; data = t.eng.encode(t.make(cubins={'b': b'2', 'a': b'1'})); "
        "print(hashlib.sha256(data).hexdigest())"
    )
    assert len({python(script, PYTHONHASHSEED=seed) for seed in ("0", "1", "77")}) == 1
    other = make(cubins={"a": b"1", "b": b"2"})
    shuffled = {key: other.cubins[key] for key in reversed(other.cubins)}
    assert eng.encode(Engine(other.record, other.weights, shuffled)) == eng.encode(other)


def test_reading_needs_neither_onnx_nor_the_planner(tmp_path):
    make().save(tmp_path / "model.engine")
    script = (
        "import sys; from gpu_runtime import engine; e = engine.load(sys.argv[1]); e.layer_info(); "
        "print(*sorted(m for m in sys.modules if m.split('.')[0] in ('onnx', 'onnx_ir', 'onnxscript', 'scipy', 'cuda') "
        "or m in ('tactics.planner.plan', 'tactics.planner.eliminate', 'gpu_runtime.planning.tables')))"
    )
    assert python(script, str(tmp_path / "model.engine")).strip() == ""


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda p: p.update(from_the_future={"x": [1, None, "\u00e9\u001e\ud800"]}),
            "has an unknown 'from_the_future', expected",
        ),
        (
            lambda p: p["plans"][0]["layers"][0].update(colour="red"),
            r"plans\[0\].layers\[0\]: has an unknown 'colour', expected",
        ),
        (
            lambda p: p["plans"][0]["layers"][0].update(name=7),
            r"plans\[0\].layers\[0\].name: expected a text of at most .* got 7",
        ),
        (lambda p: p["plans"].append(p["plans"][0]), r"profiles: expected each of 2 plans in one profile, got \[\]"),
        (lambda p: p["plans"].clear(), "expected 1 to 16 plans, got 0"),
    ],
)
def test_what_no_record_has_is_refused(change, sentence):
    with pytest.raises(EngineError, match=f"in its plan, {sentence}.* build the engine again"):
        decode(reheaded(eng.encode(make()), change))


# --------------------------------------------------------------------------------------------------------- bad files


@pytest.mark.parametrize("cubins", [{}, {"k": b"machine code"}])
def test_every_flipped_byte_is_noticed(cubins):
    data = eng.encode(make(small_plan(), cubins))
    assert decode(data, allow_cubins=True).record.device.sm == "sm_90a"
    flips = {0x01, 0x20, 0x80, 0xFF}
    for i, byte in enumerate(data):
        # Next to a few bits, the bytes that a lenient reader of JSON would take for one another: blanks, digits, case.
        others = {byte ^ f for f in flips} | ({0x09, 0x0A, 0x0D, 0x00} if byte == 0x20 else set())
        for other in others - {byte}:
            bad = bytearray(data)
            bad[i] = other
            with pytest.raises(EngineError):
                decode(bytes(bad), allow_cubins=True)


def test_every_truncation_is_noticed():
    data = eng.encode(make(small_plan()))
    for length in range(len(data)):
        with pytest.raises(EngineError, match="truncated|not an engine"):
            decode(data[:length])


@pytest.mark.parametrize("tail", [b"\0", b" ", b"\0" * 256, b"x" * 1000])
def test_trailing_bytes_are_noticed(tail):
    with pytest.raises(EngineError, match="has extra bytes at its end: expected .* bytes of data, got"):
        decode(eng.encode(make(small_plan())) + tail)


def test_a_file_that_shrinks_while_it_is_read():
    data = eng.encode(make(small_plan()))
    with pytest.raises(EngineError, match="became shorter"):
        eng.decode(io.BytesIO(data[:-1]), len(data), "x.engine")


def test_each_failure_has_its_sentence():
    data = eng.encode(make(small_plan()))
    (length,) = struct.unpack("<Q", data[:8])
    arena = data[8 + length :]

    def rest(header):
        return struct.pack("<Q", len(header)) + header + arena

    bad_weights = bytearray(data)
    bad_weights[8 + length] ^= 1
    bad_padding = bytearray(data)
    bad_padding[8 + length + 300] ^= 1
    plain = b'{"arena":{"dtype":"U8","shape":[1024],"data_offsets":[0,1024]}}'
    cases = {
        "expected at least 8 bytes, got 3": data[:3],
        "header of at most 64000000 bytes": struct.pack("<Q", 1 << 40) + data[8:],
        "its header ends at byte": struct.pack("<Q", 1 << 20) + data[8:],
        "its header is not a JSON object": rest(b"\xff" * 64),
        "without a plan": rest(plain),
        "the plan in its header is not a JSON object": rest(b'{"__metadata__":{"plan":"[1]"}}'),
        "format_version to be a whole number, got None": rest(b'{"__metadata__":{"plan":"{}"}}'),
        "made by a newer gpu_runtime: format 9; this one reads 5. Update": reheaded(data, lambda p: p.update(format_version=9)),
        "made by an older gpu_runtime: format 2; this one reads 5. Build the engine again": reheaded(
            data, lambda p: p.update(format_version=2, min_reader=2)
        ),
        "made by an older gpu_runtime: format 3; this one reads 5. Build the engine again": reheaded(
            data, lambda p: (p.update(format_version=3), p["plans"][0].update(steps=[]))
        ),
        "no valid entry for the arena": rest(b'{"__metadata__":{"plan":"{\\"format_version\\":5}"}}'),
        "its header does not match its plan": data[: 8 + length - 1] + b"\n" + data[8 + length :],
        "sha256 of its plan differs": data.replace(b"1.5", b"2.5"),
        "in its plan, plans\\[0\\]: has no 'layers'": reheaded(data, lambda p: p["plans"][0].pop("layers")),
        "in its plan, plans\\[0\\]: has an unknown 'steps'": reheaded(data, lambda p: p["plans"][0].update(steps=[])),
        "in its plan, plans\\[0\\]: has an unknown 'frees'": reheaded(data, lambda p: p["plans"][0].update(frees=[])),
        "sections is wrong: the sections end at byte 768, the arena at 1024": reheaded(data, lambda p: p["sections"].pop()),
        "the sha256 of section 'w0' differs": bytes(bad_weights),
        "padding after section 'w0' is not zero": bytes(bad_padding),
    }
    for sentence, bad in cases.items():
        with pytest.raises(EngineError, match=sentence) as caught:
            decode(bad)
        assert str(caught.value).startswith("x.engine: ")
        assert re.search("build|Update|Build", str(caught.value)), "the message names the cure"


@pytest.mark.parametrize(
    "text",
    [b"[" * 100_000, b'{"a":' * 100_000, b"null", b"1", b'{"__metadata__":null}', b'{"__metadata__":{"plan":1}}', b""],
)
def test_odd_headers(text):
    with pytest.raises(EngineError):
        decode(struct.pack("<Q", len(text)) + text + b"\0" * 256)


@pytest.mark.parametrize("value", ["NaN", "1e999", "-Infinity", "1" * 5000])
def test_odd_numbers(value):
    plan = json.dumps({"format_version": 5}).replace("}", f', "x": {value}}}')
    header = json.dumps({"__metadata__": {"plan": plan}, "arena": {"shape": [0]}}).encode()
    with pytest.raises(EngineError):
        decode(struct.pack("<Q", len(header)) + header)


def sections_change(**changes):
    return lambda p: p["sections"][1].update(changes)


@pytest.mark.parametrize(
    "change",
    [
        sections_change(offset=0),
        sections_change(offset=-256),
        sections_change(nbytes=-1),
        sections_change(nbytes="9"),
        sections_change(nbytes=1 << 60),
        sections_change(name="w0"),
        sections_change(name=3),
        sections_change(kind="?"),
        sections_change(kind="cubin"),
        sections_change(sha256=None),
        lambda p: p["sections"].append(4),
        lambda p: p["sections"].append(p["sections"][0]),
        lambda p: p.update(sections={}),
        lambda p: p["plans"][0].update(layers=3),
    ],
)
def test_inconsistent_plans_with_right_hashes(change):
    with pytest.raises(EngineError):
        decode(reheaded(eng.encode(make(small_plan())), change), allow_cubins=True)


def test_verify_false_skips_only_the_arena():
    data = bytearray(eng.encode(make(small_plan())))
    data[-300] ^= 1
    with pytest.raises(EngineError):
        decode(bytes(data))
    decode(bytes(data), verify=False)
    data[20] ^= 1
    with pytest.raises(EngineError):
        decode(bytes(data), verify=False)


def test_machine_code_is_loaded_only_when_allowed():
    cubins = {"conv_dense -DX=1": b"\x7fELF" + bytes(300), "a": b"z"}
    data = eng.encode(make(cubins=cubins))
    with pytest.raises(EngineError, match="machine code for 2 kernels.*allow_cubins=True"):
        decode(data)
    engine = decode(data, allow_cubins=True)
    assert engine.cubins == cubins and np.array_equal(engine.weights, make().weights)
    assert eng.encode(engine) == data
    assert eng.encode(Engine(engine.record, engine.weights)) == eng.encode(make())


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(EngineError, match="no such file.*build-engine"):
        eng.load(tmp_path / "none.engine")
    with pytest.raises(EngineError, match="could not be read"):
        eng.load(tmp_path)
    (tmp_path / "onnx").write_bytes(b"\x08\x07\x12\x00 not an engine at all")
    with pytest.raises(EngineError, match="not an engine"):
        eng.load(tmp_path / "onnx")


def test_device_and_source():
    plan = make().record
    compatibility.check_device(plan.device, "sm_90a")
    compatibility.check_device(plan.device, "sm_90")
    with pytest.raises(EngineError, match=r"built for H200 SXM 141GB \(sm_90a\); this device is sm_80.*[Bb]uild"):
        compatibility.check_device(plan.device, "sm_80")
    compatibility.check_source(plan, "a" * 64)
    with pytest.raises(EngineError, match="other kernel sources: hash aaaaaaaaaaaa, here bbbbbbbbbbbb.*[Bb]uild"):
        compatibility.check_source(plan, "b" * 64)


# ----------------------------------------------------------------------------------------------------- failing to write


def test_target_in_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(EngineError, match="could not be written"):
        make().save(tmp_path / "file" / "model.engine")
    assert (tmp_path / "file").read_text() == "x"


def test_target_is_a_folder(tmp_path):
    (tmp_path / "model.engine").mkdir()
    with pytest.raises(EngineError, match="could not be written"):
        make().save(tmp_path / "model.engine")
    assert [p.name for p in tmp_path.iterdir()] == ["model.engine"]


def test_no_folder_is_made(tmp_path):
    """As by the command, which refuses a name whose folder is misspelt."""
    with pytest.raises(EngineError, match=r"none/x: the engine could not be written: .*none is no existing folder: create it"):
        make().save(tmp_path / "none" / "x")
    assert list(tmp_path.iterdir()) == []


def test_disk_full_leaves_the_old_engine(tmp_path, monkeypatch):
    path = tmp_path / "model.engine"
    make().save(path)
    before = path.read_bytes()

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EngineError, match="No space left on device; nothing was overwritten"):
        make(sizes=(5000,)).save(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["model.engine"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
def test_a_real_write_failure_leaves_the_old_engine(tmp_path):
    path = tmp_path / "model.engine"
    make().save(path)
    before = path.read_bytes()
    script = (
        "import resource, sys, test_engine as t\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: t.make(sizes=(50000,)).save(sys.argv[1])\n"
        "except t.EngineError as e: print(e)\n"
    )
    assert "could not be written: File too large" in python(script, str(path), PYTHONDONTWRITEBYTECODE="1")
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["model.engine"]


def test_what_is_not_json_is_refused_before_writing(tmp_path):
    engine = make()
    plan = replace(engine.plan, solution=replace(engine.plan.solution, total_us=float("nan")))
    with pytest.raises(ValueError):
        Engine(replace(engine.record, plans=(plan,)), engine.weights).save(tmp_path / "x.engine")
    bad = Engine(replace(engine.record, sections=engine.record.sections[:-1]), engine.weights)
    with pytest.raises(ValueError, match="sections: the sections end at"):
        bad.save(tmp_path / "x.engine")
    assert list(tmp_path.iterdir()) == []
