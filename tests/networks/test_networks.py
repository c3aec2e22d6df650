"""Published networks on photographs: built dense and pruned, run by the kernels in the emulator, held to the FP16 budget."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from PIL import Image, ImageDraw, ImageFont

import gpu_runtime as gr
from cuda_kernels.device import DEFAULT_DEVICE
from cuda_kernels.emulator import Stats
from gpu_runtime.accuracy.rounding import in_fp32
from gpu_runtime.engine import Engine
from tests.conftest import DIGITS, MODELS, model_path
from tests.engines import SPARSE_DEVICE
from tests.ort_budget import budgets, run

pytestmark = pytest.mark.slow


# ---- inputs, as each network's authors prepare them, and the expected answers


def photo(name: str) -> Image.Image:
    path = MODELS / "images" / f"{name}.jpg"
    if not path.exists():
        pytest.skip(f"{path.name} not found in {path.parent}: set GPU_RUNTIME_MODELS to the folder of real networks")
    return Image.open(path).convert("RGB")


def middle(image: Image.Image, width: int, height: int) -> Image.Image:
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def square(image: Image.Image, size: int) -> Image.Image:
    side = min(image.size)
    return middle(image, side, side).resize((size, size), Image.Resampling.BILINEAR)


def nchw(image: Image.Image) -> np.ndarray:
    """[1,C,H,W] FP32 in [0, 1]."""
    a = np.asarray(image, np.float32) / 255
    return a[None, None] if a.ndim == 2 else a.transpose(2, 0, 1)[None]


def psnr(y: np.ndarray, truth: np.ndarray) -> float:
    return float(-10 * np.log10(np.mean((np.clip(y, 0, 1) - truth) ** 2)))


def cat_for_imagenet() -> np.ndarray:
    return (255 * nchw(square(photo("cat"), 224))[:, ::-1]).astype(np.float16)  # blue first


def expect_tabby(x: np.ndarray, y: np.ndarray) -> None:
    y = y.astype(np.float32).reshape(-1)
    assert y.argmax() == 281 and abs(y[281] - 0.75) < 0.05 and abs(y.sum() - 1) < 0.01, (y.argmax(), y.max(), y.sum())


def cat_and_airplanes_for_cifar() -> np.ndarray:
    mean, std = (np.float32(v).reshape(1, 3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return (np.concatenate([nchw(square(photo(name), 32)) for name in ("cat", "blueangels")]) - mean) / std


def expect_cat_and_airplane(x: np.ndarray, y: np.ndarray) -> None:
    assert y.argmax(1).tolist() == [3, 0]


def crop(name: str, mode: str, width: int, height: int) -> Image.Image:
    return middle(photo(name), width, height).convert(mode)


def shrunk(truth: Callable[[], Image.Image], scale: int, dtype: type) -> np.ndarray:
    image = truth()
    return nchw(image.resize((image.width // scale, image.height // scale), Image.Resampling.BICUBIC)).astype(dtype)


def expect_closer_than_nearest(truth: Callable[[], Image.Image], x: np.ndarray, y: np.ndarray) -> None:
    original = nchw(truth())
    scale = original.shape[2] // x.shape[2]
    nearest = x.astype(np.float32).repeat(scale, 2).repeat(scale, 3)
    assert psnr(y.astype(np.float32), original) > psnr(nearest, original) + 0.5


def portrait_for_matting() -> np.ndarray:
    return nchw(photo("grace_hopper").resize((256, 256), Image.Resampling.BILINEAR))


def expect_portrait(x: np.ndarray, y: np.ndarray) -> None:
    mask = y[0, 0] > 0.5
    assert mask[100:150, 110:146].mean() > 0.9 and not mask[:10, :20].any() and 0.3 < mask.mean() < 0.8, mask.mean()


def darkened() -> np.ndarray:
    return 0.2 * nchw(photo("blueangels").resize((320, 180), Image.Resampling.BICUBIC))


def expect_brighter(x: np.ndarray, y: np.ndarray) -> None:
    assert 2 * x.mean() < y.mean() < 1


def digit() -> np.ndarray:
    with np.load(DIGITS / "heldout.npz") as heldout:
        assert heldout["y"][0] == 7
        small = Image.fromarray((255 * heldout["x"][0, 0]).astype(np.uint8))
    page = Image.new("L", (28, 28))
    page.paste(small.resize((20, 20), Image.Resampling.BICUBIC), (4, 4))
    return 255 * nchw(page)


def expect_seven(x: np.ndarray, y: np.ndarray) -> None:
    assert y.argmax() == 7


def letterboxed(name: str, size: int = 416) -> np.ndarray:
    """The photograph in the upper left corner of a grey square, blue first, 0 to 255."""
    image = photo(name)
    scale = size / max(image.size)
    small = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
    page = Image.new("RGB", (size, size), (114, 114, 114))
    page.paste(small)
    return 255 * nchw(page)[:, ::-1]


def expect_person_with_tie(x: np.ndarray, y: np.ndarray) -> None:
    scores = (y[0, :, 4:5] * y[0, :, 5:]).max(0)  # COCO classes: objectness times class
    assert abs(scores[0] - 0.94) < 0.03 and abs(scores[27] - 0.83) < 0.05 and np.delete(scores, (0, 27)).max() < 0.3, scores


def expect_airplane_cells(x: np.ndarray, y: np.ndarray) -> None:
    scores = y[0, 0] ** 0.6 * y[0, 5:].max(0) ** 0.4  # objectness and the best COCO class, as its authors weigh them
    best = np.unravel_index(scores.argmax(), scores.shape)
    assert scores.max() > 0.6 and y[0, 5:, best[0], best[1]].argmax() == 4, (scores.max(), y[0, 5:, best[0], best[1]].argmax())


def airplanes_for_detection() -> np.ndarray:
    return nchw(photo("blueangels").resize((352, 352), Image.Resampling.BILINEAR))[:, ::-1]


def portrait_for_voc() -> np.ndarray:
    image = photo("grace_hopper").resize((257, 257), Image.Resampling.BILINEAR)
    return np.asarray(image, np.float32)[None] / 127.5 - 1  # NHWC


def expect_person(x: np.ndarray, y: np.ndarray) -> None:
    classes = y[0].argmax(-1)
    person = classes == 15
    assert person[128, 128] and 0.3 < person.mean() < 0.8 and not classes[:8].any(), np.bincount(classes.reshape(-1))


def portrait_for_faces() -> np.ndarray:
    return (255 * nchw(photo("grace_hopper").resize((320, 240), Image.Resampling.BILINEAR)) - 127) / 128


def expect_one_face(x: np.ndarray, scores: np.ndarray, boxes: np.ndarray) -> None:
    left, top, right, bottom = boxes[0, scores[0, :, 1].argmax()]
    assert scores[0, :, 1].max() > 0.98 and 0.2 < left < 0.5 < right < 0.8 and 0 < top < 0.3 < bottom < 0.7, boxes


def written(text: str, width: int, height: int, size: int, turned: bool = False) -> Image.Image:
    page = Image.new("RGB", (width, height), (255, 255, 255))
    ImageDraw.Draw(page).text((width // 2, height // 2), text, (0, 0, 0), ImageFont.load_default(size), anchor="mm")
    return page.rotate(180) if turned else page


def words_up_and_down() -> np.ndarray:
    return np.concatenate([2 * nchw(written("mow", 96, 48, 30, turned)) - 1 for turned in (False, True)])


def expect_second_turned(x: np.ndarray, y: np.ndarray) -> None:
    assert y.argmax(1).tolist() == [0, 1] and y.max(1).min() > 0.8, y


def page_for_detection() -> np.ndarray:
    mean, std = (np.float32(v).reshape(1, 3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return (nchw(written("WORDS", 160, 96, 32)) - mean) / std


def expect_words(x: np.ndarray, y: np.ndarray) -> None:
    found = y[0, 0] > 0.3
    assert found[44:52, 50:110].mean() > 0.8 and not found[:20].any() and not found[-20:].any(), found.mean()


@dataclass(frozen=True)
class Network:
    """`layers` with weights, of which `eligible` for sparsity once pruned; `expect(x, *y)` asserts what the answer must be."""

    input: str
    layers: int
    eligible: int
    x: Callable[[], np.ndarray]
    expect: Callable[..., None]


def upscaler(layers: int, eligible: int, scale: int, dtype: type, *original) -> Network:
    truth = functools.partial(crop, *original)
    x = functools.partial(shrunk, truth, scale, dtype)
    return Network("input", layers, eligible, x, functools.partial(expect_closer_than_nearest, truth))


NETWORKS = {
    "squeezenet11_fp16": Network("data_0", 26, 25, cat_for_imagenet, expect_tabby),
    "resnet20_cifar10": Network("input", 20, 19, cat_and_airplanes_for_cifar, expect_cat_and_airplane),
    "super_resolution_10": upscaler(4, 3, 3, np.float32, "blueangels", "L", 672, 672),
    "realesr_animevideov3": upscaler(18, 17, 4, np.float32, "grace_hopper", "RGB", 160, 128),
    "realesr_animevideov3_fp16": upscaler(18, 17, 4, np.float16, "grace_hopper", "RGB", 128, 96),
    "carn_m_x2": upscaler(44, 41, 2, np.float32, "grace_hopper", "RGB", 128, 96),  # 19 of them with 4 groups
    "sci_180x320": Network("input", 3, 0, darkened, expect_brighter),
    "ultraface_rfb320": Network("input", 52, 33, portrait_for_faces, expect_one_face),
    "ppocr_cls": Network("x", 54, 35, words_up_and_down, expect_second_turned),
    "ppocrv3_det_en": Network("x", 74, 54, page_for_detection, expect_words),
    "tbefn_180x320": Network("Placeholder", 42, 25, darkened, expect_brighter),
    "prisma_seg": Network("input_3", 102, 55, portrait_for_matting, expect_portrait),
    "yolox_nano": Network("images", 113, 83, functools.partial(letterboxed, "grace_hopper"), expect_person_with_tie),
    "fastestdet": Network("input.1", 70, 41, airplanes_for_detection, expect_airplane_cells),
    "deeplabv3_mnv2_257": Network("sub_7", 55, 37, portrait_for_voc, expect_person),
    "mnist8": Network("Input3", 3, 2, digit, expect_seven),  # a matrix behind a Reshape: 2:4 along its features
}
SPARSE_PAYS = ("super_resolution_10", "squeezenet11_fp16", "realesr_animevideov3")

# In `make test` each network is built, the small ones are run, and those of PRUNED are run pruned too.
PRUNED = ("squeezenet11_fp16", "resnet20_cifar10", "realesr_animevideov3_fp16", "sci_180x320", "mnist8")
LARGE = (
    "ultraface_rfb320",
    "ppocr_cls",
    "ppocrv3_det_en",
    "tbefn_180x320",
    "prisma_seg",
    "yolox_nano",
    "fastestdet",
    "deeplabv3_mnv2_257",
)
PRUNED_RUNS = [pytest.param(name, "force", marks=() if name in PRUNED else pytest.mark.full) for name in NETWORKS]
each_build = pytest.mark.parametrize("name, sparsity", [*((name, "disable") for name in NETWORKS), *PRUNED_RUNS])
DENSE_RUNS = [pytest.param(name, "disable", marks=pytest.mark.full if name in LARGE else ()) for name in NETWORKS]
each_run = pytest.mark.parametrize("name, sparsity", [*DENSE_RUNS, *PRUNED_RUNS])


# ---- building and running, once for all tests


@dataclass(frozen=True)
class Built:
    """`path`: the model that a reference must run."""

    path: Path
    engine: Engine
    feeds: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def build(tmp_path_factory) -> Callable[[str, str], Built]:
    folder = tmp_path_factory.mktemp("pruned")

    @functools.cache
    def build_once(name: str, sparsity: str) -> Built:
        path, network = model_path(name), NETWORKS[name]
        feeds = {network.input: network.x()}
        shapes = {network.input: feeds[network.input].shape}
        pruned = folder / f"{name}.onnx" if sparsity == "force" else None
        device = SPARSE_DEVICE if pruned else DEFAULT_DEVICE
        engine = gr.build(path, sparsity=sparsity, device=device, shapes=shapes, save_pruned=pruned)
        return Built(pruned or path, engine, feeds)

    return build_once


@pytest.fixture(scope="module")
def execute(build) -> Callable[[str, str], tuple[dict[str, np.ndarray], list[Stats]]]:
    """-> (outputs, one record per step of the plan) of a network that is built."""

    @functools.cache
    def run_once(name: str, sparsity: str) -> tuple[dict[str, np.ndarray], list[Stats]]:
        made = build(name, sparsity)
        with made.engine.context(device="emulator") as ctx:
            return ctx.run(made.feeds), ctx.gpu.stats

    return run_once


# ---- tests


@each_run
def test_error_is_that_of_fp16(build, execute, name, sparsity):
    made, (outputs, _) = build(name, sparsity), execute(name, sparsity)
    allowed = budgets(made.path, made.feeds)
    assert list(outputs) == list(allowed)
    for output, budget in allowed.items():
        budget.check(outputs[output], f"{name} --sparsity={sparsity}, output {output}")


@pytest.mark.parametrize("name", ["squeezenet11_fp16", "resnet20_cifar10", "mnist8"])
def test_the_budget_has_no_room_for_weights_of_8_bits(name):
    feeds = {NETWORKS[name].input: NETWORKS[name].x().astype(np.float32)}
    coarse = in_fp32(onnx.load(model_path(name)))
    for w in coarse.graph.initializer:
        if w.data_type == TensorProto.FLOAT:
            bits = numpy_helper.to_array(w).view(np.uint32)
            w.CopyFrom(numpy_helper.from_array(((bits + 0x8000) & 0xFFFF0000).view(np.float32), w.name))  # bfloat16
    y = run(coarse, feeds)
    for output, budget in budgets(model_path(name), feeds).items():
        with pytest.raises(AssertionError, match="FP16 storage alone makes"):
            budget.check(y[output], name)


@pytest.mark.parametrize("name, sparsity", DENSE_RUNS)
def test_answer(build, execute, name, sparsity):
    NETWORKS[name].expect(*build(name, sparsity).feeds.values(), *execute(name, sparsity)[0].values())


@each_build
def test_sparsity_record(build, name, sparsity):
    done, network = build(name, sparsity), NETWORKS[name]
    record = done.engine.sparsity
    weighted = [n for n in onnx.load(done.path).graph.node if n.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul")]
    rows = {row.layer: row for row in record.rows}
    layers = [name for row in record.rows for name in row.layers]  # siblings run as one are a row of their own
    assert len(weighted) == len(layers) == len(set(layers)) == network.layers and len(rows) == len(record.rows)
    nodes = {node for layer in done.engine.plan.layers for node in layer.nodes}  # layers have the names of modules
    assert {n.name for n in weighted if n.name} <= nodes
    assert len(record.eligible) == (network.eligible if sparsity == "force" else 0)
    assert set(record.picked) <= set(record.eligible) <= set(layers)
    for row in rows.values():
        assert (row.verdict == "sparse") == (row.reason == "picked") == (set(row.layers) <= set(record.picked)), row
        assert set(row.able) == set(row.layers) & set(record.eligible)
        assert row.pattern_share == 1 or not row.able or row.reason == "one_launch", row
    if sparsity == "force" and name in SPARSE_PAYS:
        assert record.picked


@each_run
def test_each_step_issues_the_plans_mma(build, execute, name, sparsity):
    engine, (_, records) = build(name, sparsity).engine, execute(name, sparsity)
    plan, picked = engine.plan, engine.sparsity.picked
    assert len(plan.steps) == len(records)
    sparse = set()
    for step, stats in zip(plan.steps, records, strict=True):
        layers = [plan.layers[i] for i in step.covers]
        for layer in layers:
            bands = step.kernel == "conv_depthwise" and layer.tactic.patch.mma  # filters as bands, on tensor cores
            multiplies = layer.type.startswith("conv") and (bands or step.kernel != "conv_depthwise")
            multiplies |= step.kernel == "squeeze_excite"
            assert (stats.mma + stats.mma_sp > 0) == multiplies, layer.name
            assert (stats.mma_sp > 0) == layer.is_sparse, layer.name
        sparse |= {layer.layer for layer in layers if layer.is_sparse}
    assert {name for row in engine.sparsity.rows if row.layer in sparse for name in row.layers} == set(picked)
    assert sparsity == "force" or not sparse


@pytest.mark.parametrize("name, sparsity", [("squeezenet11_fp16", "force"), ("resnet20_cifar10", "disable")])
def test_poison_late_copies_and_other_orders_change_nothing(build, execute, name, sparsity):
    made, (outputs, _) = build(name, sparsity), execute(name, sparsity)
    with made.engine.context(device="emulator", poison=True, async_mode="late", seed=3) as ctx:
        for output, y in ctx.run(made.feeds).items():
            assert np.array_equal(y, outputs[output]), output
