"""Small models that together have every kind of node, for mutations (mutants.py)."""

import numpy as np
import onnx

from tests.reference_run import model, node


def small_models() -> list[onnx.ModelProto]:
    rng = np.random.default_rng(5)

    def weights(*shape):
        return (rng.standard_normal(shape) / 4).astype(np.float32)

    w = {"w": weights(8, 4, 3, 3), "b": weights(8), "g": weights(5, 8), "s": weights(8), "v": abs(weights(8)) + 1}
    image = {"x": (1, 4, 9, 9)}
    ints = {"axes": np.array([2, 3]), "two": np.array([4, 4]), "starts": np.array([1, 0])}
    ints |= {"ends": np.array([8, 9]), "steps": np.array([2, 1]), "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1])}
    ints |= {
        "scales": np.array([1, 1, 2, 2], np.float32),
        "rows": np.array([0, 2, 1]),
        "low": np.float32(0),
        "high": np.float32(6),
    }
    ints |= {"repeats": np.array([1, 1, 1, 2]), "i1": np.array([1])}
    shared = w | {k: v.astype(np.int64) if v.dtype.kind == "i" else v for k, v in ints.items()}

    def used(nodes, inputs, outputs, opset=17, **more):
        read = {name for n in nodes for name in n.input}
        return model(nodes, inputs, outputs, {k: v for k, v in (shared | more).items() if k in read}, opset)

    return [
        used(
            [
                node("Conv", "x w b", "c", pads=(1, 1, 1, 1)),
                node("BatchNormalization", "c s b b v", "n"),
                node("Relu", "n", "r"),
                node("GlobalAveragePool", "r", "p"),
                node("Flatten", "p", "f"),
                node("Gemm", "f g", "y", transB=1),
            ],
            image,
            "y",
        ),
        used(
            [
                node("Conv", "x w _", "c", strides=(2, 2), dilations=(2, 2), auto_pad="SAME_UPPER"),
                node("Sigmoid", "c", "a"),
                node("Mul", "c a", "m"),
                node("MaxPool", "m", "y", kernel_shape=(3, 3), strides=(2, 2), ceil_mode=1),
            ],
            image,
            "y",
        ),
        used(
            [
                node("ConvTranspose", "x t", "c", strides=(2, 2), output_padding=(1, 1)),
                node("Concat", "c c", "d", axis=1),
                node("Split", "d two", "e f", axis=1),
                node("Add", "e f", "a"),
                node("AveragePool", "a", "y", kernel_shape=(2, 2)),
            ],
            image,
            "y",
            t=weights(4, 4, 3, 3),
        ),
        used(
            [
                node("Resize", "x _ scales", "c", mode="linear"),
                node("Slice", "c starts ends axes steps", "d"),
                node("Pad", "d pads", "e", mode="reflect"),
                node("Clip", "e low high", "y"),
            ],
            image,
            "y",
        ),
        used(
            [
                node("Shape", "x", "h"),
                node("Slice", "h i0 i1", "n"),
                node("Concat", "n minus", "z", axis=0),
                node("Reshape", "x z", "d"),
                node("Softmax", "d", "y", axis=1),
            ],
            image,
            "y",
            i0=np.array([0]),
            minus=np.array([-1]),
        ),
        used(
            [
                node("Reshape", "x sizes", "a"),
                node("Transpose", "a", "t", perm=(0, 2, 1, 3, 4)),
                node("Reshape", "t back", "c"),
                node("DepthToSpace", "c", "d", blocksize=2),
                node("SpaceToDepth", "d", "y", blocksize=2),
            ],
            {"x": (1, 8, 6, 6)},
            "y",
            sizes=np.array([1, 2, 4, 6, 6]),
            back=np.array([1, 8, 6, 6]),
        ),
        used(
            [
                node("ReduceMean", "x", "m", axes=(2, 3)),
                node("Sub", "x m", "d"),
                node("Pow", "d i2", "q"),
                node("ReduceMean", "q", "u", axes=(1,)),
                node("Sqrt", "u", "z"),
                node("Div", "d z", "y"),
            ],
            image,
            "y",
            i2=np.float32(2),
        ),
        used(
            [
                node("Gather", "x rows", "c", axis=1),
                node("Tile", "c repeats", "d"),
                node("Unsqueeze", "d i1", "e"),
                node("Squeeze", "e i1", "f"),
                node("Expand", "f shape", "y"),
            ],
            image,
            "y",
            shape=np.array([2, 3, 9, 18]),
        ),
        used(
            [
                node("MatMul", "x k", "c"),
                node("LayerNormalization", "c l", "d"),
                node("Erf", "d", "e"),
                node("PRelu", "e p", "f"),
                node("Max", "f x", "y"),
            ],
            image,
            "y",
            k=weights(9, 9),
            l=weights(9),
            p=weights(4, 1, 1),
        ),
        used(
            [
                node("Conv", "x w", "c", group=2),
                node("InstanceNormalization", "c s b", "d"),
                node("HardSwish", "d", "e"),
                node("Sum", "e e d", "f"),
                node("ReduceMax", "f", "y", keepdims=0, axes=(2,)),
            ],
            {"x": (1, 8, 5, 5)},
            "y",
        ),
        used(
            [node("Upsample", "x scales", "c", mode="nearest"), node("Conv", "c w", "d"), node("LeakyRelu", "d", "y")],
            image,
            "y",
            9,
        ),
        used(
            [
                node("Constant", "", "k", value=onnx.numpy_helper.from_array(w["w"])),
                node("Conv", "x k", "c"),
                node("Cast", "c", "h", to=onnx.TensorProto.FLOAT16),
                node("Dropout", "h", "e"),
                node("Cast", "e", "y", to=1),
            ],
            image,
            "y",
        ),
        used(
            [node("Range", "start limit i1s", "r"), node("ConstantOfShape", "r", "z"), node("Add", "x z", "y")],
            {"x": (1, 4, 2, 3)},
            "y",
            start=np.int64(2),
            limit=np.int64(4),
            i1s=np.int64(1),
        ),
        used([node("Conv", "x w1", "c", pads=(1, 1)), node("Elu", "c", "y")], {"x": (1, 4, 7)}, "y", w1=weights(8, 4, 3)),
        used(
            [
                node("Cast", "x", "f", to=1),
                node("Concat", "j f j", "c", axis=1),
                node("Pow", "c i2", "p"),
                node("MaxPool", "p", "y i", kernel_shape=(2, 2), strides=(2, 2), pads=(0, 1, 0, 1)),
                node("ReduceMax", "i", "m", axes=[-1], keepdims=0),
                node("Clip", "m i0 i5", "h"),
                node("Pow", "h i2", "q"),
                node("Split", "q parts", "k l", axis=1),
                node("ReduceSum", "k one", "o"),
                node("Sign", "l", "u"),
                node("Concat", "o u", "d", axis=1),
                node("Cast", "d", "z", to=1),
            ],
            image,
            "y z",
            j=weights(1, 2, 9, 9),
            i0=np.int64(0),
            i2=np.int64(2),
            i5=np.int64(99),
            parts=np.int64([5, 3]),
            one=np.int64([1]),
        ),
        used(
            [
                node("MatMul", "x left", "a"),
                node("MatMul", "a z", "d"),
                node("Add", "d mask", "c"),
                node("ReduceMean", "c", "m", axes=[0, 2, 4]),
                node("Resize", "m _ volume", "y", mode="linear"),
            ],
            {"x": (2, 3, 2, 4, 5), "z": (2, 3, 1, 6, 4)},
            "y",
            left=weights(2, 1, 1, 5, 6),
            mask=weights(3, 2, 1, 1),
            volume=np.float32([1, 1, 2, 1.5, 3]),
        ),
    ]
