"""If and Loop whose conditions and trip counts follow from constants and sizes, against onnxruntime; and those that do not."""

import itertools

import numpy as np
import onnx
import pytest

from gpu_runtime.errors import ModelError
from gpu_runtime.frontend import importer
from tests.gpu_runtime.frontend.test_importer import refused, save, weights
from tests.reference_run import check_against_ort, feeds_for, network, ort_run, relative_error, run

HEAD = '<ir_version: 8, opset_import: ["" : {opset}]>\ng (float[{sizes}] x) => (float[] y)'


def parsed(body: str, sizes: str = "2,3,4,5", opset: int = 17, stored: dict | None = None) -> onnx.ModelProto:
    """A model of one input and one output; `stored`: its initializers."""
    proto = onnx.parser.parse_model(HEAD.format(opset=opset, sizes=sizes) + "{" + body + "}")
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in (stored or {}).items())
    return proto


SQUEEZE = """
    r = Relu(x)
    one = Constant <value = int64 {{1}}> ()
    s = Shape (r)
    d = Gather <axis = 0> (s, one)
    q = Equal (d, one)
    y = If (q) <
        then_branch = t () => (float[] a) {{ {squeeze} }},
        else_branch = e () => (float[] a) {{ a = Identity (r) }}
    >
"""


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("opset", [11, 13, 18, 22])
def test_squeeze_as_torch_scripts_it(channels, opset):
    squeeze = "a = Squeeze <axes = [1]> (r)" if opset < 13 else "k = Constant <value = int64[1] {1}> () a = Squeeze (r, k)"
    proto = parsed(SQUEEZE.format(squeeze=squeeze), "N,C,4,5", opset)
    net = check_against_ort(proto, shapes={"x": (2, channels, 4, 5)})
    assert net.outputs[0].shape == ((2, 4, 5) if channels == 1 else (2, 3, 4, 5))


@pytest.mark.parametrize("trips", ["3", "0", "1"])
@pytest.mark.parametrize("opset", [11, 13, 17, 22])
def test_loop_carries_and_stacks(trips, opset):
    body = f"""
        m = Constant <value = int64 {{{trips}}}> ()
        yes = Constant <value = bool {{1}}> ()
        last, rows = Loop (m, yes, x) <body = b (int64 i, bool c, float[2,3,4,5] v) => (bool k, float[] w, float[] row) {{
            k = Identity (c)
            f = Cast <to = 1> (i)
            z = Conv <pads = [1, 1, 1, 1]> (v, weight)
            w = Add (z, f)
            row = Tanh (w)
        }}>
        y = Concat <axis = 0> (last, last)
    """
    proto = parsed(body, opset=opset, stored={"weight": weights(3, 3, 3, 3) / 8})
    if trips != "0":
        proto.graph.output.add().CopyFrom(onnx.helper.make_tensor_value_info("rows", 1, None))
    net = check_against_ort(proto)
    assert [t.shape for t in net.outputs][1:] == ([] if trips == "0" else [(int(trips), 2, 3, 4, 5)])


@pytest.mark.parametrize("most", ["", "9223372036854775807"])
def test_loop_while_a_count_is_below_a_size(most):
    """As torch scripts `while n < x.shape[3]`, from 1 on in steps of 2."""
    body = """
        limit = Constant <value = int64 {0}> ()
        one = Constant <value = int64 {1}> ()
        three = Constant <value = int64 {3}> ()
        s = Shape (x)
        width = Gather <axis = 0> (s, three)
        first = Less (one, width)
        n, y = Loop (limit, first, one, x) <body = b (int64 i, bool c, int64 at, float[2,3,4,5] v)
        => (bool k, int64 to, float[] w) {
            two = Constant <value = int64 {2}> ()
            to = Add (at, two)
            w = Sigmoid (v)
            k = Less (to, width)
        }>
    """
    proto = parsed(body.replace("{0}", f"{{{most or 0}}}"))
    if not most:
        proto.graph.node[-1].input[0] = ""
    net = check_against_ort(proto)
    assert sum(len(op.problem.stages) for op in net.ops) == 2


def test_branches_have_weights_and_names_of_their_own(tmp_path):
    """Initializers in a branch, one name in both branches and outside, a branch that copies an outer tensor; 2:4 weights of a
    branch are known as such."""
    w = np.where(np.arange(8) % 4 < 2, weights(8, 8, 1, 1).T, 0).T.reshape(8, 8, 1, 1).transpose(1, 0, 2, 3)
    body = """
        c = Constant <value = bool {1}> ()
        a = Relu (x)
        b = If (c) <
            then_branch = t () => (float[] z) <float[8,8,1,1] w = {%s}> { n = Conv (a, w) z = Tanh (n) },
            else_branch = e () => (float[] z) { n = Exp (a) z = Neg (n) }
        >
        no = Not (c)
        d, a_0 = If (no) <
            then_branch = u () => (float[] z, float[] o) { n = Exp (b) z = Neg (n) o = Identity (z) },
            else_branch = f () => (float[] z, float[] o) { n = Sigmoid (b) z = Abs (n) o = Identity (a) }
        >
        y = Add (d, a_0)
    """
    proto = parsed(body % ", ".join(map(str, w.reshape(-1).tolist())), "2,8,4,5")
    path = save(tmp_path, proto)
    net = check_against_ort(path)
    imported = importer.read(path)
    conv = next(n for n in imported.model.graph if n.op_type == "Conv")
    assert conv.name == "If_2_Conv" and imported.loaded.stored[conv.name].fits and net.ops


def test_what_a_graph_inside_reads_is_read():
    """A weight that a loop's body multiplies is not pruned; pixels that it does not cast are no pixels."""
    body = """
        c = Conv (x, w)
        m = Constant <value = int64 {2}> ()
        y = Loop (m, , c) <body = b (int64 i, bool k, float[2,8,4,5] v) => (bool l, float[] u) {
            l = Identity (k)
            a = ReduceMax <keepdims = 0> (w)
            u = Mul (v, a)
        }>
    """
    w = {"w": weights(8, 8, 1, 1)}
    loaded = importer.load(importer.Source("m", parsed(body, "2,8,4,5", stored=w).SerializeToString()), prune=True)
    assert not loaded.pruned and loaded.not_pruned == (("w", "also read by Loop Loop_2"),)
    check_against_ort(parsed(body, "2,8,4,5", stored=w))


def test_a_mask_may_be_read_inside(tmp_path):
    mask = np.where(np.arange(100_000) % 3 == 0, -np.inf, 0).astype(np.float32)  # 400 kB
    body = """
        c = Constant <value = bool {{1}}> ()
        y = If (c) <
            then_branch = t () => (float[] p) {{ a = {0} (x, mask) p = Softmax (a) }},
            else_branch = e () => (float[] p) {{ p = Mul (x, mask) }}
        >
    """
    check_against_ort(parsed(body.format("Add"), "2,100000", stored={"mask": mask}))
    refused(tmp_path, parsed(body.format("Mul"), "2,100000", stored={"mask": mask}), "but Mul If_1_Mul reads it")


DATA = """
    s = ReduceSum <keepdims = 0> (x)
    zero = Constant <value = float {0}> ()
    %s
"""
OUTCOMES = {
    "If choose: its condition 'q' depends on values of inputs": """
        q = Greater (s, zero)
        [choose] y = If (q) <
            then_branch = t () => (float[] a) { a = Relu (x) }, else_branch = e () => (float[] a) { a = Exp (x) }>
    """,
    "Loop again: its trip count 'n' depends on values of inputs": """
        n = Cast <to = 7> (s)
        [again] y = Loop (n, , x) <body = b (int64 i, bool c, float[] v) => (bool c, float[] w) { w = Relu (v) }>
    """,
    "Loop while: its condition 'k.*' depends on values of inputs": """
        [while] y = Loop ( , , x) <body = b (int64 i, bool c, float[] v) => (bool k, float[] w) {
            w = Relu (v)
            t = ReduceSum <keepdims = 0> (w)
            k = Greater (t, zero)
        }>
    """,
    "Loop long: more than 10000 nodes run in the model's control flow": """
        n = Constant <value = int64 {9223372036854775807}> ()
        [long] y = Loop (n, , x) <body = b (int64 i, bool c, float[] v) => (bool c, float[] w) { w = Relu (v) }>
    """,
    "Loop odd: its body has 3 inputs and 1 outputs, expected 3 and 2 at least": """
        n = Constant <value = int64 {1}> ()
        [odd] y = Loop (n, , x) <body = b (int64 i, bool c, float[] v) => (bool c) { w = Relu (v) }>
    """,
}


@pytest.mark.parametrize("match", OUTCOMES)
def test_what_values_decide_is_refused_with_a_cure(match, tmp_path):
    message = refused(tmp_path, parsed(DATA % OUTCOMES[match]), match)
    assert "onnxsim" in message or "odd" in match


def test_operators_that_do_not_run_may_be_any(tmp_path):
    """What is not supported counts where it runs."""
    body = """
        q = Constant <value = bool {%d}> ()
        y = If (q) <then_branch = t () => (float[] a) { a = Det (x) }, else_branch = e () => (float[] a) { a = Exp (x) }>
    """
    check_against_ort(parsed(body % 0, "2,3,4,4"))
    refused(tmp_path, parsed(body % 1, "2,3,4,4"), "1 node has an operator that is not supported: Det ")


class Program:
    """A drawn graph of tensors of one shape, with If and Loop inside of each other; siblings' graphs share names."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.steps = itertools.count()

    def block(self, known: list[str], depth: int, at: int) -> tuple[str, list[str]]:
        """(nodes, the tensors they make); `known`: what they may read; names from t`at` on."""
        lines, made = [], []
        for _ in range(self.rng.integers(1, 4)):
            a, b = self.rng.choice([*known, *made], 2)
            out = f"t{at + len(lines)}"
            kinds = [f"{out} = Tanh ({a})", f"{out} = Add ({a}, {b})", f"{out} = Mul ({a}, {b})"]
            if depth:
                kinds = [self.branch(out, a, [*known, *made], depth), self.loop(out, a, [*known, *made], depth), kinds[1]]
            lines.append(str(self.rng.choice(kinds)))
            made.append(out)
        return "\n".join(lines), made

    def number(self, name: str, of: str) -> str:
        """Nodes for a number: a constant, or a size of a tensor."""
        at, constant = self.rng.integers(0, 4), self.rng.integers(1, 4)
        size = f"s{name} = Shape ({of}) k{name} = Constant <value = int64 {{{at}}}> () {name} = Gather (s{name}, k{name})"
        return str(self.rng.choice([f"{name} = Constant <value = int64 {{{constant}}}> ()", size]))

    def branch(self, out: str, a: str, known: list[str], depth: int) -> str:
        tag = f"{out}_{depth}"
        then, other = (self.block(known, depth - 1, 10 * (4 - depth)) for _ in range(2))
        return f"""{self.number(f"m{tag}", a)} {self.number(f"n{tag}", a)} q{tag} = Less (m{tag}, n{tag})
            {out} = If (q{tag}) <then_branch = t () => (float[] {then[1][-1]}) {{ {then[0]} }},
            else_branch = e () => (float[] {other[1][0]}) {{ {other[0]} }}>"""

    def loop(self, out: str, a: str, known: list[str], depth: int) -> str:
        tag = f"{out}_{depth}"
        inside, made = self.block([*known, f"v{tag}"], depth - 1, 10 * (4 - depth))
        return f"""{self.number(f"m{tag}", a)} {self.number(f"n{tag}", a)} axes{tag} = Constant <value = int64[1] {{0}}> ()
            last{tag}, all{tag} = Loop (m{tag}, , {a}) <body = b (int64 i{tag}, bool c{tag}, float[2,3,4,5] v{tag})
            => (bool d{tag}, float[] w{tag}, float[] o{tag}) {{
                {inside}
                d{tag} = Less (i{tag}, n{tag})
                w{tag} = Tanh ({made[-1]})
                o{tag} = Add ({made[0]}, v{tag})
            }}>
            sum{tag} = ReduceMean <axes = [0], keepdims = 0> (all{tag})
            {out} = Sub (last{tag}, sum{tag})"""


@pytest.mark.parametrize("seed", range(24))
def test_drawn_programs(seed):
    text, made = Program(seed).block(["x"], 2, 0)
    proto = parsed(f"{text} y = Tanh ({made[-1]})")
    net = network(proto)
    feeds = feeds_for(net)
    assert (
        relative_error(run(net, feeds)["y"], ort_run(proto, feeds, optimized=False)["y"]) < 1e-3
    )  # its optimizer fails at some


def test_hostile_graphs_inside_are_refused(tmp_path):
    """Names that are none, a loop that writes out loops, and weights that each iteration repeats."""
    text = "w = Relu (v0)"
    for level in range(1, 6):
        text = f"""w{level} = Loop (n, , v{level}) <body = b{level} (int64 i{level}, bool c{level}, float[] v{level - 1})
            => (bool c{level}, float[] {"w" if level == 1 else f"w{level - 1}"}) {{ {text} }}>"""
    body = f"n = Constant <value = int64 {{1000}}> () v5 = Relu (x) {text} y = Relu (w5)"
    refused(tmp_path, parsed(body), "more than 10000 nodes run in the model's control flow")
    branch = "{0}_branch = t () => (float[] zzz) {{ zzz = Abs (x) }}"
    both = ", ".join(branch.format(which) for which in ("then", "else"))
    named = parsed(f"c = Constant <value = bool {{1}}> () y = If (c) <{both}>")
    (tmp_path / "damaged.onnx").write_bytes(named.SerializeToString().replace(b"zzz", b"z\xffz"))
    with pytest.raises(ModelError, match="UTF-8|truncated"):
        importer.read(tmp_path / "damaged.onnx")
