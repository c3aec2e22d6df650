"""Pieces whose channels are no multiples of 8: all that is offered for them computes what onnxruntime does, in NumPy and by the
kernels, and leaves nothing that is not finite between pieces."""

import random
from dataclasses import replace

import numpy as np
import onnx
import pytest

from gpu_runtime.explain import reasons, wording
from gpu_runtime.network import Network
from gpu_runtime.padded_channels import padding
from gpu_runtime.planning.alternatives import alternatives
from tests.engines import build, judge
from tests.reference_run import choices, feeds_for, model, network, node, ort_run, relative_error, run

ACTIVATIONS = ("", "Relu", "Relu", "Sigmoid", "Tanh", "HardSigmoid", "Elu")
ACTS = ("Relu", "Sigmoid")
ODD = (3, 5, 8, 10, 13, 16, 26)


class Drawn:
    """A network of convolutions between Splits, Concats, sums and pools of pieces, from a seed."""

    def __init__(self, seed: int, side: int = 6) -> None:
        self.pick, self.rng = random.Random(f"grid {seed}"), np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}
        self.known = {"x": 8}
        for i in range(3):
            self.conv("x", self.pick.choice(ODD) * self.pick.choice((1, 2)), f"first{i}")
        steps = (self.split, self.split, self.concat, self.concat, self.add, self.part_of_sum, self.res2, self.one, self.more)
        for i in range(9):
            made = self.pick.choice(steps)(f"t{i}")
            if isinstance(made, str) and self.pick.random() < 0.3:
                self.part_of_sum(f"u{i}", made)  # another one behind it
        last = [t for t in self.known if not any(t in n.input for n in self.nodes)]
        self.conv(self.joined(last, "all"), 7, "y")
        outputs = ["y", *self.pick.sample(list(self.known), self.pick.choice((0, 0, 1)))]
        outputs = [*dict.fromkeys(t for t in outputs if t != "x")]
        self.model = model(self.nodes, {"x": (1, 8, side, side)}, " ".join(outputs), self.weights)

    def any(self) -> str:
        return self.pick.choice([t for t in self.known if t != "x"])

    def conv(self, x: str, k: int, y: str, act: str | None = None, groups: int = 1) -> str:
        size = self.pick.choice((1, 1, 3))
        c = self.known[x] // groups
        self.weights[f"{y}.w"] = (self.rng.standard_normal((k, c, size, size)) / (2 * size * c**0.5)).astype(np.float32)
        self.weights[f"{y}.b"] = self.rng.standard_normal(k).astype(np.float32) / 4
        act = self.pick.choice(ACTIVATIONS) if act is None else act
        out = f"{y}.conv" if act else y
        self.nodes.append(node("Conv", f"{x} {y}.w {y}.b", out, pads=(size // 2,) * 4, group=groups))
        if act:
            self.nodes.append(node(act, out, y))
        self.known[y] = k
        return y

    def split(self, y: str, x: str = "") -> list[str]:
        x = x or self.any()
        count = self.pick.choice((2, 3, 4))
        c = self.known[x]
        if c < count:
            return [x]
        cuts = sorted(self.pick.sample(range(1, c), count - 1))
        sizes = [b - a for a, b in zip((0, *cuts), (*cuts, c), strict=True)]
        return self.pieces(x, y, sizes)

    def pieces(self, x: str, y: str, sizes: list[int]) -> list[str]:
        names = [f"{y}.{i}" for i in range(len(sizes))]
        self.weights[f"{y}.sizes"] = np.array(sizes)
        self.nodes.append(node("Split", f"{x} {y}.sizes", " ".join(names), axis=1))
        self.known |= dict(zip(names, sizes, strict=True))
        return names

    def joined(self, pieces: list[str], y: str) -> str:
        self.nodes.append(node("Concat", " ".join(pieces), y, axis=1))
        self.known[y] = sum(self.known[t] for t in pieces)
        return y

    def concat(self, y: str) -> str:
        return self.joined([self.any() for _ in range(self.pick.choice((2, 3, 4)))], y)

    def like(self, x: str, y: str) -> str:
        """A tensor with the channels of x."""
        same = [t for t, c in self.known.items() if c == self.known[x] and t not in (x, "x")]
        if same and self.pick.random() < 0.6:
            return self.pick.choice(same)
        return self.conv(self.any(), self.known[x], f"{y}.like")

    def add(self, y: str) -> str:
        x = self.any()
        self.nodes.append(node(self.pick.choice(("Add", "Add", "Mul", "Sub", "Max")), f"{x} {self.like(x, y)}", y))
        self.known[y] = self.known[x]
        return y

    def part_of_sum(self, y: str, x: str = "") -> str:
        """Part of a convolution's channels is added to what was before; the rest is as it is."""
        x = x or self.any()
        c = self.known[x]
        own, rest = self._two(y, c)
        self.nodes.append(node("Add", f"{own} {x}" if self.pick.random() < 0.7 else f"{x} {own}", f"{y}.sum"))
        self.known[f"{y}.sum"] = c
        return self.joined([f"{y}.sum", rest], y)

    def _two(self, y: str, c: int) -> list[str]:
        more = self.pick.choice((1, 4, 11))
        return self.pieces(self.conv(self.any(), c + more, f"{y}.wide"), f"{y}.piece", [c, more])

    def res2(self, y: str) -> str:
        """Each piece of a tensor goes through a convolution, with what the one before gave added to it."""
        c = self.pick.choice((3, 6, 10))
        whole = self.conv(self.any(), c * 4, f"{y}.whole", self.pick.choice(("", "Relu", "Sigmoid")))
        pieces = self.pieces(whole, f"{y}.piece", [c] * 4)
        found, now = [], pieces[0]
        for i in range(3):
            found.append(self.conv(now, c, f"{y}.conv{i}", self.pick.choice(("", "Relu", "Relu", "Tanh", "Sigmoid"))))
            if i < 2:
                self.nodes.append(node("Add", f"{found[-1]} {pieces[i + 1]}", f"{y}.sum{i}"))
                now = f"{y}.sum{i}"
                self.known[now] = c
        if self.pick.random() < 0.3:
            return self.joined([*found, pieces[3]], y)
        self.joined([*found, pieces[3]], f"{y}.all")
        self.conv(f"{y}.all", self.pick.choice(ODD), y)
        del self.known[f"{y}.all"]
        return y

    def one(self, y: str) -> str:
        """What computes channel by channel; of zeros some make ones, infinity or NaN."""
        x = self.any()
        kind = self.pick.choice(("Exp", "Cos", "Reciprocal", "MaxPool", "AveragePool", "depthwise", "scale", "gate"))
        self.known[y] = self.known[x]
        if kind in ("Exp", "Cos"):
            self.nodes += [node("Tanh", x, f"{y}.t"), node("Exp", f"{y}.t", y)]
        elif kind == "Reciprocal":  # 1 / (x * x + 1 / 2), and of the constant per channel nothing else keeps it from infinity
            self.weights[f"{y}.c"] = np.full((1, self.known[x], 1, 1), 0.5, np.float32)
            self.nodes += [node("Mul", f"{x} {x}", f"{y}.s"), node("Add", f"{y}.s {y}.c", f"{y}.a")]
            self.nodes.append(node("Reciprocal", f"{y}.a", y))
        elif kind.endswith("Pool"):
            more = {"count_include_pad": 1} if kind == "AveragePool" else {}
            self.nodes.append(node(kind, x, y, kernel_shape=(3, 3), pads=(1, 1, 1, 1), **more))
        elif kind == "depthwise":
            self.conv(x, self.known[x], y, groups=self.known[x])
        elif kind == "scale":
            self.weights[f"{y}.c"] = self.rng.standard_normal((1, self.known[x], 1, 1)).astype(np.float32)
            self.nodes.append(node(self.pick.choice(("Mul", "Div")), f"{x} {y}.c", y))
        else:
            self.nodes.append(node("GlobalAveragePool", x, f"{y}.mean"))
            self.known[f"{y}.mean"] = self.known[x]
            self.nodes += [node("Sigmoid", f"{y}.mean", f"{y}.gate"), node("Mul", f"{x} {y}.gate", y)]
            del self.known[f"{y}.mean"]
        return y

    def more(self, y: str) -> str:
        return self.conv(self.any(), self.pick.choice(ODD), y)


def check(seed: int, rewrite, bound: float) -> Network:
    """Each choice of options gives what onnxruntime does: as near to it as the network itself is, whose weights are FP16."""
    proto = Drawn(seed).model
    before = network(proto)
    feeds = feeds_for(before)
    expected, plain, net = ort_run(proto, feeds), run(before, feeds), rewrite(before)
    assert all(relative_error(plain[name], y) < 5e-3 for name, y in expected.items())
    for choice in choices(net):
        got = run(net, feeds, choice)
        assert all(relative_error(got[name], y) < bound for name, y in plain.items()), choice
    return net


@pytest.mark.parametrize("seed", range(60))
def test_drawn_networks_compute_the_same_in_every_option(seed):
    check(seed, padding.offer, 1e-5)


@pytest.mark.slow
@pytest.mark.sample(60)
@pytest.mark.parametrize("seed", range(60, 400))
def test_more_drawn_networks(seed):
    check(seed, alternatives if seed % 3 == 0 else padding.offer, 1e-5 if seed % 3 else 2e-3)


OFFER = padding.offer


def changed(net: Network) -> Network:
    """The network with the last option of each group that grid offers, and no other."""
    more = OFFER(net)
    last = {group: options[-1] for group, options in more.groups if group.startswith(padding.TITLE)}
    ops = [
        replace(op, when=tuple(pair for pair in op.when if pair[0] not in last))
        for op in more.ops
        if all((group, last[group]) in op.when for group, _ in op.when if group in last)
    ]
    return replace(more, ops=tuple(ops), groups=tuple(g for g in more.groups if g[0] not in last)).pruned()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_kernels_compute_the_same_over_padded_pieces(seed, tmp_path, monkeypatch):
    monkeypatch.setattr(padding, "offer", changed)
    proto = Drawn(seed).model
    engine = build(tmp_path, proto)
    judge(engine, proto, {"x": np.random.default_rng(seed).uniform(-1, 1, (1, 8, 6, 6)).astype(np.float32)})


def block(side: int = 28, first: str = "Relu") -> onnx.ModelProto:
    """Res2Net's block: four pieces of 26 channels, all but the last through convolutions, each added to the next piece."""
    rng, nodes, c = np.random.default_rng(3), [], 26
    shapes = {"wa": (4 * c, 64, 1, 1), "w0": (c, c, 3, 3), "w1": (c, c, 3, 3), "w2": (c, c, 3, 3), "wz": (64, 4 * c, 1, 1)}
    weights = {name: (rng.standard_normal(s) / (s[1] * s[2] * s[3]) ** 0.5).astype(np.float16) for name, s in shapes.items()}
    weights = {name: w.astype(np.float32) for name, w in weights.items()} | {"sizes": np.array([c] * 4)}
    nodes += [node("Conv", "x wa", "a"), node(first, "a", "r"), node("Split", "r sizes", "p0 p1 p2 p3", axis=1)]
    for i in range(3):
        nodes.append(node("Conv", f"{'s' if i else 'p'}{i} w{i}", f"c{i}", pads=(1, 1, 1, 1)))
        nodes.append(node("Relu", f"c{i}", f"o{i}"))
        if i < 2:
            nodes.append(node("Add", f"o{i} p{i + 1}", f"s{i + 1}"))
    nodes += [node("Concat", "o0 o1 o2 p3", "k", axis=1), node("Conv", "k wz", "z"), node("Add", "z x", "t")]
    nodes.append(node("Relu", "t", "y"))
    return model(nodes, {"x": (1, 64, side, side)}, "y", weights)


@pytest.mark.slow
def test_a_block_of_res2net_is_five_launches_without_copies(tmp_path):
    engine = build(tmp_path, block(), input_formats="fp16:hwc8", output_formats="fp16:hwc8")
    assert [layer.type for layer in engine.plan.layers if layer.type != "noop"] == ["conv"] * 5 and len(engine.plan.steps) == 5
    x = np.random.default_rng(1).uniform(-1, 1, (1, 64, 28, 28)).astype(np.float16)
    judge(engine, block(), {"x": x.astype(np.float32)})


def test_rows_that_give_no_zeros_take_no_sums():
    """A sigmoid of zero is one half: beside a piece it would be added."""
    asked = {first: {o for _, options in padding.offer(network(block(first=first))).groups for o in options} for first in ACTS}
    assert padding.GRID in asked["Sigmoid"] and padding.SUMS not in asked["Sigmoid"] and padding.SUMS in asked["Relu"]


def test_a_form_that_loses_the_pattern_says_so(tmp_path):
    engine = build(tmp_path, block(), sparsity="force", input_formats="fp16:hwc8", output_formats="fp16:hwc8")
    row = next(r for r in engine.plan.sparsity.rows if r.layer == "z")
    assert row.pattern_share == 1 and row.verdict == "dense" and row.detail == reasons.OTHER_FORM
    assert reasons.OTHER_FORM in wording.sentence(row, engine.record)
