"""The opcodes that use tensor cores, move between lanes, synchronise or branch."""

import re
from functools import partial

from cuda_kernels.emulator.decoder import Decoder, Opcode
from cuda_kernels.emulator.opcodes_memory import ATOM_OPS, ATOM_TYPES
from cuda_kernels.emulator.operands import SPACES, Fields, cls, width

LDMATRIX = {"sync", "aligned", "m8n8", "b16"}


def ldmatrix(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    """Decodes ldmatrix, whose modifiers come in any order: CUTLASS writes x4.trans.m8n8."""
    given = set(mods)
    number, shared = given & {"x1", "x2", "x4"}, given & {"shared", "shared::cta"}
    if given - number - shared - {"trans"} != LDMATRIX or len(number) != 1 or len(shared) > 1 or len(mods) != len(given):
        dec.fail("form of ldmatrix")
    vec, rows = int(number.pop()[1:]), [dec.dst(r, "r") for r in dec.vector(ops[0])]
    if len(rows) != vec or -1 in rows:
        dec.fail(f"ldmatrix.x{vec} writes {vec} registers")
    _, a, imm, wide = dec.address(ops[1])
    dec.emit(
        "LDMATRIX",
        [*rows, *[-1] * (8 - vec), a],
        rows,
        (a,),
        Fields(imm=imm, vec=vec, sub=int("trans" in given), flags=wide, space=SPACES["shared"] if shared else 0),
    )


def movmatrix(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    if mods != ["sync", "aligned", "m8n8", "trans", "b16"]:
        dec.fail("form of movmatrix")
    d, s = dec.dst(ops[0], "r"), dec.src(ops[1], "r")
    dec.emit("MOVMATRIX", [d, s], (d,), (s,))


MMA = re.compile(r"(sp::ordered_metadata\.)?sync\.aligned\.m16n8k(8|16|32)\.row\.col\.(f32|f16)\.(f16|bf16|tf32)\.\4\.\3")
MMA_TYPES = {("f32", "f16"): 0, ("f32", "bf16"): 1, ("f16", "f16"): 2, ("f32", "tf32"): 4}  # (D and C, A and B) -> sub


MMA_BYTES = re.compile(  # CUTLASS writes .satfinite last
    r"(sp::ordered_metadata\.)?sync\.aligned\.m16n8k(16|32|64)\.row\.col(\.satfinite)?\.s32\.([su]8)\.([su]8)\.s32(\.satfinite)?"
)
BYTES, UNSIGNED_A, UNSIGNED_B, SATURATE = 8, 16, 32, 64  # of mma_bytes.h


def mma_bytes(dec: Decoder, match: re.Match[str], ops: list[str]) -> None:
    """Decodes a product of bytes, of which a register holds four along K, with integer sums."""
    sparse, shape, first, a, b, last = match.groups()
    k = int(shape)
    if (k == 64) != bool(sparse) or (first and last):  # no independent program shows the layout of mma.sp.m16n8k32
        dec.fail("combination of mma types or shape")
    dec.count(ops, 6 if sparse else 4)
    groups = [dec.vector(o) for o in ops[:4]]
    if [len(g) for g in groups] != [4, k // 8 // (1 + bool(sparse)), k // 16, 4]:
        dec.fail("register counts of mma")
    rows = [dec.dst(r, "r") for r in groups[0]]
    sources = [dec.src(r, "r", "b32") for g in groups[1:] for r in g]
    sub = BYTES | UNSIGNED_A * (a == "u8") | UNSIGNED_B * (b == "u8") | SATURATE * bool(first or last)
    if not sparse:
        return dec.emit("MMA", [*rows, *sources], rows, sources, Fields(size=k, sub=sub))
    e, selector = dec.src(ops[4], "r"), dec.number(ops[5])
    if selector != 0:
        dec.fail(f"sparsity selector {selector}")
    return dec.emit("MMA_SP", [*rows, *sources, e], rows, (*sources, e), Fields(size=k, sub=sub))


def mma(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    if match := MMA_BYTES.fullmatch(".".join(mods)):
        return mma_bytes(dec, match, ops)
    match = MMA.fullmatch(".".join(mods))
    if not match:
        dec.fail(f"unknown opcode 'mma.{'.'.join(mods)}'")
    sparse, shape, d, a = match.groups()
    k = int(shape)
    # No independent program shows the layout of mma.sp.m16n8k16.
    if (d, a) not in MMA_TYPES or (k == 32) != bool(sparse) or (a == "tf32" and k != 8):
        dec.fail("combination of mma types or shape")
    dec.count(ops, 6 if sparse else 4)
    groups, accumulators, each = [dec.vector(o) for o in ops[:4]], 2 if d == "f16" else 4, 4 if a == "tf32" else 8
    if [len(g) for g in groups] != [accumulators, 2 * k // each // (1 + bool(sparse)), k // each, accumulators]:
        dec.fail("register counts of mma")
    rows = [dec.dst(r, "r") for r in groups[0]]
    kinds = ("b32", "b32", "b32" if d == "f16" else "f32")
    sources = [dec.src(r, "r", t) for g, t in zip(groups[1:], kinds, strict=True) for r in g]
    sub = MMA_TYPES[d, a]
    if not sparse:
        return dec.emit("MMA", [*rows, *sources], rows, sources, Fields(size=k, sub=sub))
    e, selector = dec.src(ops[4], "r"), dec.number(ops[5])
    if not 0 <= selector < 2:
        dec.fail(f"sparsity selector {selector}")
    return dec.emit("MMA_SP", [*rows, *sources, e], rows, (*sources, e), Fields(size=k, sub=sub, imm=selector))


# ---- warps and blocks


def bar(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    if mods[:1] == ["warp"]:
        mask = dec.src(ops[0], "r")
        return dec.emit("BAR_WARP", [-1, mask], (), (mask,))
    form = ".".join(m for m in mods if m not in ("cta", "aligned"))
    if form in ("sync", "arrive"):
        number = dec.src(ops[0], "r")
        threads = dec.src(ops[1], "r") if len(ops) > 1 else -1
        if form == "arrive" and threads == -1:
            dec.fail("bar.arrive needs a thread count")
        return dec.emit("BAR", [-1, number, threads], (), (number, threads), Fields(sub=int(form == "arrive")))
    code = {"red.popc.u32": 2, "red.and.pred": 3, "red.or.pred": 4}.get(form)
    if code is None:
        dec.fail(f"unknown opcode '{dec.ins.opcode}'")
    d, number = dec.dst(ops[0], "r" if code == 2 else "p"), dec.src(ops[1], "r")
    threads = dec.src(ops[2], "r") if len(ops) > 3 else -1
    p, negated = dec.pred_src(ops[-1])
    return dec.emit("BAR", [d, number, threads, p], (d,), (number, threads, p), Fields(sub=code, flags=negated))


def member_mask(dec: Decoder, kind: str, into: tuple[int, int], sources: list[int], mask: int, of: Fields) -> None:
    """Emits a record of `kind` for a collective operation (shfl, vote, match, ...): `into`: the destination register and
    predicate, -1 for none; up to three sources; `mask`: the row of the register with the participating lanes; `of`: other
    fields of the record."""
    o = [*into, *sources, *[-1] * (3 - len(sources)), mask]
    dec.emit(kind, o, into, (*sources, mask), of)


def with_predicate(dec: Decoder, text: str) -> tuple[int, int]:
    """Parses `d|p` or `d` to (register, predicate or -1)."""
    d, _, p = (s.strip() for s in text.partition("|"))
    return dec.dst(d, "r"), dec.dst(p, "p") if p else -1


SHUFFLES = {"sync.up.b32": 0, "sync.down.b32": 1, "sync.bfly.b32": 2, "sync.idx.b32": 3}
VOTES = {"sync.ballot.b32": 0, "sync.any.pred": 1, "sync.all.pred": 2, "sync.uni.pred": 3}


def shfl(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    mode = SHUFFLES.get(".".join(mods))
    if mode is None:
        dec.fail("form of shfl")
    into = with_predicate(dec, ops[0])
    member_mask(dec, "SHFL", into, [dec.src(o, "r") for o in ops[1:4]], dec.src(ops[4], "r"), Fields(sub=mode))


def vote(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    mode = VOTES.get(".".join(mods))
    if mode is None:
        dec.fail("form of vote")
    p, negated = dec.pred_src(ops[1])
    d = dec.dst(ops[0], "p" if mode else "r")
    member_mask(dec, "VOTE", (d, -1), [p], dec.src(ops[2], "r"), Fields(sub=mode, flags=negated))


def match(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    if len(mods) != 3 or mods[0] not in ("any", "all") or mods[1] != "sync" or mods[2] not in ("b32", "b64"):
        dec.fail("form of match")
    into = with_predicate(dec, ops[0])
    member_mask(
        dec,
        "MATCH",
        into,
        [dec.src(ops[1], cls(mods[2]))],
        dec.src(ops[2], "r"),
        Fields(sub=int(mods[0] == "all"), size=width(mods[2]) // 8),
    )


def redux(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    if len(mods) != 3 or mods[0] != "sync" or mods[1] not in ATOM_OPS or mods[2] not in ("u32", "s32", "b32"):
        dec.fail("form of redux")
    sub = ATOM_OPS[mods[1]] | ATOM_TYPES[mods[2].replace("b", "u")] << 8
    member_mask(dec, "REDUX", (dec.dst(ops[0], "r"), -1), [dec.src(ops[1], "r")], dec.src(ops[2], "r"), Fields(sub=sub))


def activemask(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    d = dec.dst(ops[0], "r")
    dec.emit("ACTIVEMASK", [d], (d,))


# ---- control


def bra(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    if set(mods) - {"uni"}:
        dec.fail("form of bra")
    dec.emit("BRA", [], of=Fields(labels=[dec.label_of(ops[0])], ends=True))


def brx(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    if mods[:1] != ["idx"] or set(mods[1:]) - {"uni"}:
        dec.fail("form of brx")
    tables, index = dec.module.functions[dec.calling[-1]].tables, dec.src(ops[0], "r")
    if ops[1] not in tables:
        dec.fail(f"unknown branch table '{ops[1]}'")
    dec.emit("BRX", [-1, index], (), (index,), Fields(labels=[dec.label_of(name) for name in tables[ops[1]]], ends=True))


def exit_(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    dec.emit("EXIT", [], of=Fields(ends=True))


def ret(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    if len(dec.calling) == 1:
        return exit_(dec, mods, ops)
    return dec.emit("BRA", [], of=Fields(labels=[(dec.instance, 0)], ends=True))


def trap(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    dec.emit("TRAP", [], of=Fields(ends=True))


def call(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    """Decodes `call (returned), name, (given)`; the lists may be absent."""
    returned, (name, *rest) = (names(ops[0]), ops[1:]) if ops[0][0] == "(" else ([], ops)
    if name == "__assertfail":
        return trap(dec, mods, ops)
    function = dec.module.functions.get(name)
    if function is None or dec.guard is not None:
        dec.fail(f"call of '{name}', which this module does not define, or a call under a guard")
    frame = {}
    given = names(rest[0]) if rest else []
    for formal, actual in zip([*function.returns, *function.params], [*returned, *given], strict=True):
        var = dec.ins.scope.find_var(actual)
        if var is None:
            dec.fail(f"unknown parameter '{actual}'")
        frame[formal.name] = ("local", dec.local_slot((dec.instance, id(var)), var))
    ins = dec.ins
    dec.function(function, frame)
    dec.ins = ins
    return None


def names(text: str) -> list[str]:
    return [p.strip() for p in text.strip()[1:-1].split(",") if p.strip()]


CLUSTER_FENCE = "FENCE of a cluster"  # a FENCE with `sub`, which reaches no further
# Opcodes without operands: modifiers -> kind of record.
FIXED = {
    "griddepcontrol": {"wait": "GRID_WAIT", "launch_dependents": "NOP"},
    "membar": {"cta": "NOP", "gl": "FENCE", "sys": "FENCE"},
    "fence": {
        f"{order}{scope}": kind
        for order in ("", "sc.", "acq_rel.")
        for scope, kind in (("cta", "NOP"), ("cluster", CLUSTER_FENCE), ("gpu", "FENCE"), ("sys", "FENCE"))
    }
    | {f"proxy.async{space}": "FENCE_PROXY" for space in ("", ".shared::cta", ".shared::cluster")}
    | {"proxy.async.global": "NOP", "mbarrier_init.release.cluster": "FENCE_INIT"},
}


def fixed(stem: str, dec: Decoder, mods: list[str], ops: list[str]) -> None:
    kind = FIXED[stem].get(".".join(mods))
    if kind is None:
        dec.fail(f"unknown opcode '{stem}.{'.'.join(mods)}'")
    dec.emit("FENCE", [], of=Fields(sub=1)) if kind == CLUSTER_FENCE else dec.emit(kind, [])


def nanosleep(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    dec.emit("NOP", [])


# fmt: off
OPCODES: dict[str, Opcode] = {
    "ldmatrix": ldmatrix, "movmatrix": movmatrix, "mma": mma, "bar": bar, "barrier": bar, "shfl": shfl, "vote": vote,
    "match": match, "redux": redux, "activemask": activemask, "bra": bra, "brx": brx, "ret": ret, "exit": exit_,
    "call": call, "trap": trap, "brkpt": trap, "nanosleep": nanosleep, **{stem: partial(fixed, stem) for stem in FIXED},
}
# fmt: on
