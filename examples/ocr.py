"""RapidOCR reads a picture twice: on onnxruntime, and on gpu_runtime's InferenceSession, for which each size of image is new.

It needs gpu_runtime with the extra `build` and one that runs engines (`cuda13`, or `emulator` without a GPU), and

    pip install rapidocr-onnxruntime==1.4.4

whose wheel holds PP-OCRv4's detector, classifier of direction, and recognizer. In the emulator it takes about a minute; times
are predicted. Exits with 1 if texts or boxes differ. With -o it writes the picture with its boxes, and beside it the layers of
the detector that would run sparse, pruned, on three GPUs.

    python examples/ocr.py -o ocr.png
"""

import argparse
import sys
from pathlib import Path

import numpy as np

import gpu_runtime as gr

try:
    import rapidocr_onnxruntime
    from PIL import Image, ImageDraw, ImageFont
    from rapidocr_onnxruntime.utils import infer_engine
except ModuleNotFoundError as e:
    raise SystemExit(f"{e.name} is not installed: pip install rapidocr-onnxruntime==1.4.4") from None

LINES = (("Sparse tensor cores", 34), ("2:4 weights on an L4", 28), ("0123456789", 30))
GPUS = ("a100", "rtx4090", "l4")
DETECTOR = Path(rapidocr_onnxruntime.__file__).parent / "models" / "ch_PP-OCRv4_det_infer.onnx"
SIZE = (1, 3, 736, 736)  # of the detector's input: RapidOCR makes the shorter side 736
APART = 3  # pixels by which a corner of a box may differ
SPARSE, DENSE, INK = "#2a7", "#bbb", "#223"


def drawn() -> Image.Image:
    picture = Image.new("RGB", (380, 190), "white")
    pen = ImageDraw.Draw(picture)
    for i, (text, size) in enumerate(LINES):
        pen.text((20, 18 + 56 * i), text, fill=INK, font=ImageFont.load_default(size))
    return picture


def read(picture: Image.Image, session: type) -> list[tuple[np.ndarray, str]]:
    """(box, text) of each line, with this class for onnxruntime's InferenceSession."""
    infer_engine.InferenceSession = session
    found, _ = rapidocr_onnxruntime.RapidOCR()(np.asarray(picture)[..., ::-1])
    return [(np.array(box), text) for box, text, _ in found or []]


def agree(ours: list, theirs: list) -> bool:
    same = [text for _, text in ours] == [text for _, text in theirs]
    return same and all(np.abs(a - b).max() <= APART for (a, _), (b, _) in zip(ours, theirs, strict=True))


def listed(found: list) -> str:
    return "\n".join(f"{text:24} {box.round().astype(int).tolist()}" for box, text in found)


def shown(picture: Image.Image, found: list, path: Path) -> None:
    """Writes the picture with its boxes, and below it a bar for each GPU: the detector's launches, as long as they take."""
    plans = gr.plan(DETECTOR, GPUS, sparsity="force", shapes={"x": SIZE})
    page = Image.new("RGB", (2 * picture.width, picture.height + 20), "white")
    page.paste(picture, (0, 0))
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(13)
    for box, text in found:
        pen.polygon([tuple(map(float, corner)) for corner in box], outline="#d33")
        pen.text((box[0][0], box[2][1] + 2), text, fill="#d33", font=font)
    left, width = picture.width + 10, picture.width - 30
    pen.text((left, 8), "PP-OCRv4's detector, pruned: sparse layers", fill=INK, font=font)
    for row, outlook in enumerate(plans):
        draw_bar(pen, outlook, (left, 34 + 54 * row), width, font)
    pen.text((left, picture.height - 6), "predicted times, layer by layer", fill=INK, font=font)
    page.quantize(32).save(path, optimize=True)


def draw_bar(pen: ImageDraw.ImageDraw, outlook, corner: tuple[int, int], width: int, font) -> None:
    """A bar of the layers with weights in their order, each as wide as its time; sparse ones are green."""
    rows, (left, top) = [row for row in outlook.sparsity.rows if row.us], corner
    total, at = sum(row.us for row in rows), 0.0
    sparse = sum(row.us for row in rows if row.verdict == "sparse")
    title = f"{outlook.device.name}: {len(outlook.sparsity.picked)} of {len(outlook.sparsity.layers)} sparse, "
    pen.text((left, top), f"{title}{sparse / total:.0%} of ~{total:.0f} us", fill=INK, font=font)
    for row in rows:
        ends = (left + at / total * width, left + (at + row.us) / total * width)
        colour = SPARSE if row.verdict == "sparse" else DENSE
        pen.rectangle((ends[0], top + 18, ends[1], top + 38), fill=colour, outline="white")
        at += row.us


def main() -> int:
    given = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    given.add_argument("-o", "--output", type=Path, help="write the picture here (PNG)")
    output = given.parse_args().output
    picture, theirs = drawn(), infer_engine.InferenceSession
    expected, found = read(picture, theirs), read(picture, gr.InferenceSession)
    print(listed(found))
    if not agree(found, expected):
        print(f"onnxruntime's differ:\n{listed(expected)}")
        return 1
    print(f"the same {len(found)} texts and boxes as on onnxruntime")
    if output is not None:
        shown(picture, found, output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
