"""What the child process that measures does without a GPU; tests/driver/test_driver_measuring.py has the rest."""

import json
import subprocess
import sys

import numpy as np
import pytest

from cuda_kernels import device as devices
from tactics.candidates import candidates
from tactics.launches import pack_weights, packing_key
from tactics.measure import timing
from tactics.measure.timing import Cache, Time
from tactics.problems import codec
from tactics.problems.epilogue import AFFINE
from tactics.sampling import references, trial
from tactics.sampling.data import random_data, reference
from tactics.step import epilogue_values
from tests.problems import CONVS, PROBLEMS
from tests.tactics.measure.scripted import H200, PROBLEM, ROOT, tactics


def test_the_worker_says_why_it_cannot_measure_here():
    if devices.has_gpu():
        pytest.skip("there is a GPU")
    line = [sys.executable, "-m", "tactics.measure.worker"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "error" in json.loads(done.stdout.splitlines()[0])
    with pytest.raises(ValueError, match="nothing can be measured"):
        timing.Measured(H200, Cache("/nonexistent/times.jsonl"), compile_first=False)(PROBLEM, tactics(1))


BY_DEFINITION = "conv_asymmetric", "conv_residual_prelu", "conv_residual_after", "conv_clip", "conv_tail"


@pytest.mark.parametrize("name", BY_DEFINITION)
def test_naive_convolution_agrees_with_the_reference_under_the_emulator(name):
    launch, compiling = pytest.importorskip("cuda_kernels.launch"), pytest.importorskip("cuda_kernels.compile")
    pytest.importorskip("cuda_kernels.emulator")
    problem = CONVS[name]
    inputs, weights = random_data(problem)
    expected = reference(problem, inputs, weights)
    gpu = launch.Emulated(H200)
    arrays = {
        "x": inputs[0],
        "w": weights["w"].astype(np.float16),
        "b": weights.get("b"),
        "slope": weights.get("slope"),
        "residual": inputs[1] if problem.epilogue.residual else None,
        **{name: weights.get(name) for name in AFFINE},
    }
    at = {}
    for key, array in arrays.items():
        at[key] = 0 if array is None else gpu.allocate(array.nbytes)
        if at[key]:
            gpu.write(at[key], array)
    y = gpu.allocate(expected.nbytes)
    values = epilogue_values(problem)
    params = references.reference_params(problem, values, {**at, "weights": at["w"], "y": y})
    kernel = gpu.load(compiling.compile_kernel("reference_conv", values, "sm_90a"))
    gpu.launch(kernel, (-(-expected.size // 256), 1, 1), (256, 1, 1), 0, params)
    got = gpu.read(y, expected.nbytes).view(np.float32).reshape(expected.shape)
    assert trial.relative_error(got, expected) < 1e-4


@pytest.mark.parametrize("name", PROBLEMS)
def test_problems_survive_the_pipe(name):
    text = json.dumps(codec.to_json(PROBLEMS[name]))
    assert codec.from_json(json.loads(text)) == PROBLEMS[name]


@pytest.mark.parametrize("name", PROBLEMS)
def test_random_data_has_the_problem_s_shapes_and_a_reference_of_useful_range(name):
    problem = PROBLEMS[name]
    inputs, weights = random_data(problem)
    assert [x.shape for x in inputs] == list(problem.in_shapes) and all(x.dtype == np.float16 for x in inputs)
    expected = reference(problem, inputs, weights)
    assert expected.shape == problem.out_shape and np.isfinite(expected).all()
    assert expected.max() > expected.min() or expected.size == 1
    assert trial.relative_error(expected.astype(np.float16), expected) < 1e-3
    again, _ = random_data(problem)
    assert all((a == b).all() for a, b in zip(inputs, again, strict=True))


@pytest.mark.parametrize("name", PROBLEMS)
def test_inputs_like_a_relu_s_output_are_in_the_problem_s_domain(name):
    problem = PROBLEMS[name]
    inputs, weights = random_data(problem, zeros=[True] * len(problem.in_shapes))
    assert all(x.dtype == np.float16 and (x >= 0).all() for x in inputs)
    expected = reference(problem, inputs, weights)
    assert np.isfinite(expected).all() and trial.relative_error(expected.astype(np.float16), expected) < 1e-3


def test_only_the_inputs_behind_a_relu_have_zeros():
    problem = PROBLEMS["conv_residual_prelu"]
    (x, residual), weights = random_data(problem)
    (same, clipped), others = random_data(problem, zeros=[False, True])
    assert (same == x).all() and (clipped == np.maximum(residual, 0)).all() and 0.4 < (clipped == 0).mean() < 0.6
    assert all((others[name] == weights[name]).all() for name in weights)


def test_time_is_a_plain_record():
    assert Time(2.0, 1.0, 3.0) == Time(2.0, 1.0, 3.0)


@pytest.mark.slow
def test_tactics_that_share_packed_weights_pack_alike():
    """Of each kernel up to 12 tactics of each problem. A stem's taps follow its tile, squeeze-excite's rows its output."""
    found: dict[tuple, set[bytes]] = {}
    for name, problem in PROBLEMS.items():
        _, weights = random_data(problem)
        able = candidates(problem, H200)
        for kernel in {t.kernel for t in able}:
            of = [t for t in able if t.kernel == kernel]
            for tactic in of[:: -(-len(of) // 12)]:
                packed = b"".join(a.tobytes() for a in pack_weights(problem, tactic, weights).values())
                found.setdefault((name, packing_key(problem, tactic)), set()).add(packed)
    assert not [key[0] for key, packs in found.items() if len(packs) > 1]
    assert {kernel for (_, (kernel, *_)), _ in found.items()} >= {"conv_stem", "squeeze_excite", "conv_sparse24", "resize"}
    shared = [key for key in found if key[0] == "conv_stem"]
    assert len([key for key in shared if key[1][0] == "conv_stem"]) > 1, "tiles of a stem must not share their taps"
