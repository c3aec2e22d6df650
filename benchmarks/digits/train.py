"""Train the digits network, dense and then 2:4 sparse, and write both as FP16 ONNX beside this file.

    python benchmarks/digits/train.py     (needs the extras `train` and `test`; a few minutes on 2 cores)

`network` spells the architecture once. `Torch` runs it for training, `Onnx` writes it down node by node;
BatchNormalization stays a node of its own in the file, so that whoever imports the file has to fold it.
"""

import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from cuda_kernels import extras

with extras.named():
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from torch import nn
    from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
SEED, HELDOUT, BATCH = 0, 360, 64
DENSE = {"epochs": 30, "rate": 0.05}
SPARSE = {"epochs": 20, "rate": 0.02}  # fine-tuning after pruning, with the zeros held fixed
EPSILON = 1e-5


def network(op, x):
    x = op.relu("stem/relu", op.conv("stem/conv", x, 1, 64, 3))
    x = basic(op, "block1", x, 64, 64)
    x = basic(op, "block2", x, 64, 128, stride=2)
    x = basic(op, "block3", x, 128, 128)
    x = bottleneck(op, "block4", x, 128, 128, 256)
    x = bottleneck(op, "block5", x, 256, 64, 256)
    return op.head("head", x, 256, 10)


def basic(op, name, x, c, k, stride=1):
    y = op.relu(f"{name}/relu1", op.conv(f"{name}/conv1", x, c, k, 3, stride))
    y = op.conv(f"{name}/conv2", y, k, k, 3)
    return op.relu(f"{name}/relu2", op.add(f"{name}/add", y, shortcut(op, name, x, c, k, stride)))


def bottleneck(op, name, x, c, middle, k):
    y = op.relu(f"{name}/relu1", op.conv(f"{name}/conv1", x, c, middle, 1))
    y = op.relu(f"{name}/relu2", op.conv(f"{name}/conv2", y, middle, middle, 3))
    y = op.conv(f"{name}/conv3", y, middle, k, 1)
    return op.relu(f"{name}/relu3", op.add(f"{name}/add", y, shortcut(op, name, x, c, k, 1)))


def shortcut(op, name, x, c, k, stride):
    return x if c == k and stride == 1 else op.conv(f"{name}/proj", x, c, k, 1, stride)


class Torch(nn.Module):
    """Runs `network`; a layer is made the first time its name is met. `conv` is convolution and BatchNormalization."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict()
        self(torch.zeros(2, 1, 8, 8))

    def forward(self, x):
        return network(self, x)

    def conv(self, name, x, c, k, r, stride=1):
        if name not in self.layers:
            conv = nn.Conv2d(c, k, r, stride, r // 2, bias=False)
            self.layers[name] = nn.Sequential(conv, nn.BatchNorm2d(k, EPSILON))
        return self.layers[name](x)

    def relu(self, name, x):
        return F.relu(x)

    def add(self, name, a, b):
        return a + b

    def head(self, name, x, c, k):
        if name not in self.layers:
            self.layers[name] = nn.Linear(c, k)
        return self.layers[name](x.mean((2, 3)))


class Onnx:
    """Writes `network` down as ONNX nodes with the weights of a trained `Torch`; tensors are named after their node."""

    def __init__(self, layers):
        self.layers, self.nodes, self.weights = layers, [], []

    def node(self, kind, name, inputs, output=None, **attributes):
        output = output or f"{name}_out"
        self.nodes.append(helper.make_node(kind, inputs, [output], name, **attributes))
        return output

    def half(self, name, tensor):
        self.weights.append(numpy_helper.from_array(tensor.detach().numpy().astype(np.float16), name))
        return name

    def conv(self, name, x, c, k, r, stride=1):
        conv, norm = self.layers[name]
        x = self.node(
            "Conv",
            name,
            [x, self.half(f"{name}.weight", conv.weight)],
            kernel_shape=[r, r],
            strides=[stride, stride],
            pads=[r // 2] * 4,
        )
        bn = name.replace("conv", "bn").replace("proj", "proj_bn")
        stored = {"scale": norm.weight, "bias": norm.bias, "mean": norm.running_mean, "var": norm.running_var}
        parameters = [self.half(f"{bn}.{key}", tensor) for key, tensor in stored.items()]
        return self.node("BatchNormalization", bn, [x, *parameters], epsilon=EPSILON)

    def relu(self, name, x):
        return self.node("Relu", name, [x])

    def add(self, name, a, b):
        return self.node("Add", name, [a, b])

    def head(self, name, x, c, k):
        x = self.node("GlobalAveragePool", f"{name}/pool", [x])
        x = self.node("Flatten", f"{name}/flatten", [x], axis=1)
        gemm = self.layers[name]
        inputs = [x, self.half(f"{name}/gemm.weight", gemm.weight), self.half(f"{name}/gemm.bias", gemm.bias)]
        return self.node("Gemm", f"{name}/gemm", inputs, transB=1)


def save_onnx(model, path):
    out = Onnx(model.layers)
    y = network(out, out.node("Cast", "input/cast", ["x"], to=TensorProto.FLOAT16))
    out.node("Cast", "output/cast", [y], "logits", to=TensorProto.FLOAT)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 1, 8, 8])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 10])
    graph = helper.make_graph(out.nodes, path.stem, [x], [logits], out.weights)
    opset = helper.make_opsetid("", 17)
    proto = helper.make_model(graph, opset_imports=[opset], ir_version=8, producer_name="benchmarks/digits/train.py")
    onnx.checker.check_model(proto, full_check=True)
    onnx.save(proto, path)


def masks_24(model):
    """Returns (weight, mask) of each layer with C % 4 == 0: the mask keeps the 2 largest magnitudes of 4 consecutive input
    channels.
    """
    found = []
    for weight in model.parameters():
        if weight.dim() in (2, 4) and weight.shape[1] % 4 == 0:
            groups = weight.detach().abs().unflatten(1, (-1, 4))
            order = groups.argsort(dim=2, descending=True, stable=True)  # stable: ties keep the lower index
            found.append((weight, (order.argsort(dim=2) < 2).flatten(1, 2).float()))
    return found


def shifted(x):
    """Returns each image moved by -1, 0 or 1 pixel along both axes; zeros fill the free rows and columns."""
    moves = torch.randint(-1, 2, (len(x), 2)).tolist()
    padded = F.pad(x, (1, 1, 1, 1))
    return torch.stack([image[:, 1 + i : 9 + i, 1 + j : 9 + j] for image, (i, j) in zip(padded, moves, strict=True)])


def train(model, x, y, epochs, rate, after_step=lambda: None):
    steps = -(-len(x) // BATCH)
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * steps, pct_start=0.2)
    model.train()
    for epoch in range(epochs):
        total = 0.0
        for batch in torch.randperm(len(x)).split(-(-len(x) // steps)):
            loss = F.cross_entropy(model(shifted(x[batch])), y[batch], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            after_step()
            total += loss.item() * len(batch)
        print(f"  epoch {epoch + 1:2}/{epochs}  loss {total / len(x):.4f}", flush=True)
    model.eval()


def accuracy(path, x, y):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return float((session.run(["logits"], {"x": x})[0].argmax(1) == y).mean())


def split():
    """(images to train on, held-out images, their classes, those of the held-out)."""
    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    classes = digits.target.astype(np.int64)
    return train_test_split(images, classes, test_size=HELDOUT, random_state=SEED, stratify=digits.target)


def main():
    start = time.monotonic()
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)
    x, heldout_x, y, heldout_y = split()
    np.savez_compressed(HERE / "heldout.npz", x=heldout_x, y=heldout_y)
    x, y = torch.from_numpy(x), torch.from_numpy(y)

    model = Torch()
    print(f"dense: {len(x)} images, {sum(p.numel() for p in model.parameters())} parameters")
    train(model, x, y, **DENSE)
    save_onnx(model, HERE / "digits_dense.onnx")

    masks = masks_24(model)

    @torch.no_grad()
    def hold():
        for weight, mask in masks:
            weight.mul_(mask)

    hold()
    print(f"sparse: {len(masks)} layers pruned 2:4")
    train(model, x, y, **SPARSE, after_step=hold)
    save_onnx(model, HERE / "digits_sparse.onnx")

    for name in ("digits_dense.onnx", "digits_sparse.onnx"):
        size = (HERE / name).stat().st_size
        print(f"{name}: {accuracy(HERE / name, heldout_x, heldout_y):.2%} of {HELDOUT} held-out images, {size} bytes")
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
