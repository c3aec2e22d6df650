"""The opcodes of Hopper whose effect comes later: mbarriers, wgmma, and the instructions that accompany them.

Opcodes whose meaning no independent program has shown are refused.
"""

import re
from functools import partial

from cuda_kernels.emulator import opcodes_memory, opcodes_warp
from cuda_kernels.emulator.decoder import Decoder, Opcode
from cuda_kernels.emulator.layout import thread_registers
from cuda_kernels.emulator.opcodes_memory import place, watch
from cuda_kernels.emulator.opcodes_warp import member_mask, with_predicate
from cuda_kernels.emulator.operands import ALIGNED, BY_STATE, SPACES, STRONG, WIDE, WINDOWS, Fields, cls


def shared_address(dec: Decoder, text: str) -> int:
    """Emits the computation of the 32-bit shared address that `[a+4]` names; returns the number of the register row that holds
    it."""
    _, operand, offset, wide = dec.address(text)
    if operand < 0:
        return dec.const(dec.const_value(operand) + offset, 32)
    low = operand
    if wide:
        low = dec.temp("r")
        dec.row("ext.u32.32.64", low, operand)
    if not offset:
        return low
    sum_ = dec.temp("r")
    dec.row("add.u32", sum_, low, dec.const(offset, 32))
    return sum_


# ---- one warp


def stmatrix(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    given = set(mods)
    number, shared = given & {"x1", "x2", "x4"}, given & {"shared", "shared::cta"}
    if given - number - shared - {"trans"} != {"sync", "aligned", "m8n8", "b16"} or len(number) != 1 or len(shared) > 1:
        dec.fail("form of stmatrix")
    vec, rows = int(number.pop()[1:]), [dec.src(r, "r") for r in dec.vector(ops[1])]
    if len(rows) != vec:
        dec.fail(f"stmatrix.x{vec} stores {vec} registers")
    _, a, imm, wide = dec.address(ops[0])
    space, trans = SPACES["shared"] if shared else 0, int("trans" in given)
    dec.emit(
        "STMATRIX", [*rows, *[-1] * (8 - vec), a], (), (*rows, a), Fields(imm=imm, vec=vec, sub=trans, flags=wide, space=space)
    )


def elect(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    if mods != ["sync"]:
        dec.fail("form of elect")
    d, p = with_predicate(dec, ops[0])
    if p < 0:
        dec.fail("elect.sync without a predicate")
    member_mask(dec, "ELECT", (d, p), [], dec.src(ops[1], "r"), Fields(sub=0))


def setmaxnreg(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    if len(mods) != 4 or mods[0] not in ("inc", "dec") or mods[1:] != ["sync", "aligned", "u32"]:
        dec.fail("form of setmaxnreg")
    number = dec.number(ops[0])
    if not 24 <= number <= 256 or number % 8:
        dec.fail(f"setmaxnreg to {number} registers: 24 to 256 in steps of 8 are possible")
    if not thread_registers(dec.kernel):
        dec.fail("setmaxnreg in a kernel without .maxntid or .maxnreg: nothing tells how many registers a thread starts with")
    dec.emit("SETMAXNREG", [], of=Fields(imm=number, sub=int(mods[0] == "inc"), flags=ALIGNED))


# ---- mbarriers

M_INIT, M_INVAL, M_ARRIVE, M_TRY, M_TEST = range(5)  # async.h's MBarrierOp
WAIT = re.compile(r"(try|test)_wait(\.parity)?(?:\.acquire)?(?:\.cta|\.cluster)?")


def mbarrier(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    shared = [m for m in mods if m in ("shared", "shared::cta", "shared::cluster")]
    form = ".".join(m for m in mods if m not in shared and m != "b64")
    if "b64" not in mods or not shared:
        dec.fail("an mbarrier's address must be of .shared::cta")
    watch(dec, "shared", 4, 16)
    if form in ("init", "inval"):
        dec.count(ops, 2 if form == "init" else 1)
        o = [-1, shared_address(dec, ops[0]), dec.src(ops[1], "r") if form == "init" else -1]
        return dec.emit("MBARRIER", o, (), o, Fields(sub=M_INIT if form == "init" else M_INVAL))
    if match := WAIT.fullmatch(form):
        return mbarrier_wait(dec, match[1] == "try", bool(match[2]), ops)
    form = re.sub(r"\.release|\.cta|\.cluster", "", form)
    if form not in ("arrive", "arrive.expect_tx", "expect_tx"):
        dec.fail(f"form of mbarrier '{form}'")
    if form == "expect_tx":
        ops = ["_", *ops]
    dec.count(ops, 2, 3) if form == "arrive" else dec.count(ops, 3)
    if shared == ["shared::cluster"] and ops[0] != "_":
        dec.fail("an arrival in .shared::cluster has no state")
    state, a = dec.dst(ops[0], "d"), shared_address(dec, ops[1])
    last = dec.src(ops[2], "r") if len(ops) > 2 else dec.const(1, 32)
    count = last if form == "arrive" else dec.const(1, 32) if form == "arrive.expect_tx" else -1
    o = [state, a, count, -1 if form == "arrive" else last]
    return dec.emit("MBARRIER", o, (state,), o[1:], Fields(sub=M_ARRIVE))


def mbarrier_wait(dec: Decoder, tries: bool, by_parity: bool, ops: list[str]) -> None:
    """Decodes operands [d, address, parity or state] and, of try_wait, an optional hint how long it may sleep."""
    dec.count(ops, 3, 4 if tries else 3)
    p, a = dec.dst(ops[0], "p"), shared_address(dec, ops[1])
    o = [p, a, dec.src(ops[2], "r" if by_parity else "d")]
    # It keeps no lane's old value: the interpreter writes all lanes that execute it.
    dec.emit("MBARRIER", o, (p,), o[1:], Fields(sub=M_TRY if tries else M_TEST, flags=0 if by_parity else BY_STATE))


# ---- wgmma

WGMMA = re.compile(r"mma_async\.(sp\.)?sync\.aligned\.m64n(\d+)k(16|32)\.(f32|f16)\.(f16|bf16)\.(f16|bf16)")
BF16, ACC16 = 1, 2  # mma.h's
A_ALONG_MN, B_ALONG_MN, NEGATE_A, NEGATE_B, A_IN_REGISTERS, SPARSE = 8, 16, 32, 64, 128, 256  # wgmma.h's


def wgmma(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    form = ".".join(mods)
    if form in ("fence.sync.aligned", "commit_group.sync.aligned"):
        return dec.emit(f"WGMMA_{mods[0].split('_')[0].upper()}", [], of=Fields(flags=ALIGNED))
    if form == "wait_group.sync.aligned":
        return dec.emit("WGMMA_WAIT", [], of=Fields(imm=dec.number(ops[0]), flags=ALIGNED))
    if match := WGMMA.fullmatch(form):
        return products(dec, match, ops)
    dec.fail(f"unknown opcode 'wgmma.{form}'")


def products(dec: Decoder, match: re.Match[str], ops: list[str]) -> None:
    sparse, n, k, d, a, b = bool(match[1]), int(match[2]), int(match[3]), *match.groups()[3:]
    if a != b or (a, d) == ("bf16", "f16") or k != (32 if sparse else 16) or n % 8 or not 8 <= n <= 256:
        dec.fail("shape or types of wgmma")
    sums = dec.vector(ops[0])
    in_registers = ops[1][0] == "{"
    a_regs = [dec.src(r, "r", "b32") for r in dec.vector(ops[1])] if in_registers else []
    if len(sums) != n // (2 if d == "f32" else 4) or len(a_regs) not in (0, 4):
        dec.fail("register counts of wgmma")
    rows, rest, e = [dec.dst(r, "r") for r in sums], ops[3:], -1
    if sparse:
        e, selector, rest = dec.src(rest[0], "r"), dec.number(rest[1]), rest[2:]
        if selector:
            dec.fail(f"sparsity selector {selector}: no program of others shows which lanes it reads")
    dec.count(rest, 4 if in_registers else 5)
    signs = [dec.number(x) for x in rest[1:3]]
    along = [0, *(dec.number(x) for x in rest[3:])][-2:]
    if not set(signs) <= {1, -1} or not set(along) <= {0, 1}:
        dec.fail("immediate operands of wgmma")
    o = [dec.pred_value(rest[0]), -1 if in_registers else dec.src(ops[1], "d"), dec.src(ops[2], "d"), e]
    sub = BF16 * (a == "bf16") | ACC16 * (d == "f16") | A_IN_REGISTERS * in_registers | SPARSE * sparse
    sub |= NEGATE_A * (signs[0] < 0) | NEGATE_B * (signs[1] < 0) | A_ALONG_MN * along[0] | B_ALONG_MN * along[1]
    uses, extra = (*rows, *a_regs, *o), [*rows, *a_regs]
    dec.emit("WGMMA", o, rows, uses, Fields(size=n // 8, vec=k, sub=sub, flags=ALIGNED, extra=extra))


# ---- bulk copies

LOAD = re.compile(
    r"(?:tensor\.([1-5])d\.)?shared::(?:cluster|cta)\.global(?:\.(tile|im2col))?\.mbarrier::complete_tx::bytes"
    r"(\.multicast::cluster)?(\.L2::cache_hint)?"
)
STORE = re.compile(r"(?:tensor\.([1-5])d\.)?global\.shared::cta(?:\.(tile|im2col_no_offs))?\.bulk_group()(\.L2::cache_hint)?")
BETWEEN_BLOCKS = "shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
BULK_STORE, BULK_TENSOR, BULK_IM2COL, BULK_SHARED, BULK_VALUES, BULK_READ = 1, 2, 4, 8, 16, STRONG  # bulk.h's
TENSOR = re.compile(r"\[\s*([^,{]+?)\s*,\s*\{(.*)\}\s*\]")


def cp(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    if mods[:2] != ["async", "bulk"]:
        return opcodes_memory.cp(dec, mods, ops)
    form = ".".join(mods[2:])
    if form == "commit_group":
        return dec.emit("BULK_COMMIT", [])
    if form in ("wait_group", "wait_group.read"):
        return dec.emit("BULK_WAIT", [], of=Fields(imm=dec.number(ops[0]), flags=BULK_READ if "read" in mods else 0))
    if mods[2] == "prefetch":
        return dec.emit("NOP", [])
    if form == BETWEEN_BLOCKS:
        return copy_between(dec, ops)
    found = LOAD.fullmatch(form) or STORE.fullmatch(form)
    if found is None:
        dec.fail(f"unknown opcode 'cp.{'.'.join(mods)}'")
    rank, kind, multicast, hint = found.groups()
    ops = ops[: -1 if hint else None]
    mask = dec.src(ops.pop(), "r") if multicast else -1
    return copy(dec, int(rank or 0), kind or "tile", found.re is STORE, ops, mask)


def copy(dec: Decoder, rank: int, kind: str, store: bool, ops: list[str], mask: int) -> None:
    """Decodes a bulk copy. Operands of a load: [shared], [global], bytes, [mbarrier]; of a store: [global], [shared], bytes.

    A tensor copy has a map and coordinates instead of the global address and bytes.
    """
    im2col = kind != "tile"
    if im2col and rank < 3:
        dec.fail("im2col has three to five dimensions")
    offsets = dec.vector(ops.pop()) if im2col and not store else []
    dec.count(ops, (2 if rank else 3) + (not store))
    outer, inner = (ops[0], ops[1]) if store else (ops[1], ops[0])
    coordinates = []
    if rank:
        match = TENSOR.fullmatch(outer)
        if not match:
            dec.fail(f"'{outer}' is not a tensor map with coordinates")
        outer, coordinates = f"[{match[1]}]", [dec.src(c.strip(), "r") for c in match[2].split(",")]
    if len(coordinates) != rank or len(offsets) != (rank - 2 if im2col and not store else 0):
        dec.fail("numbers of coordinates or offsets")
    a = place(dec, "", outer)
    operand = a.operand
    if a.space == "param":
        operand = dec.const(dec.const_value(a.operand) + WINDOWS["param"], 64)
    elif not a.wide:
        dec.fail("the global address must have 64 bits")
    size = -1 if rank else dec.src(ops[2], "r")
    barrier = -1 if store else shared_address(dec, ops[-1])
    o = [
        shared_address(dec, inner),
        operand,
        size,
        barrier,
        *coordinates,
        *[-1] * (5 - rank),
        *(dec.src(x, "r") for x in offsets),
        *[-1] * (3 - len(offsets)),
        mask,
    ]
    sub = BULK_STORE * store | BULK_TENSOR * bool(rank) | BULK_IM2COL * im2col
    watch(dec, "global", 16, 2 if rank else 16)
    dec.emit("BULK", o, (), o, Fields(imm2=a.offset, sub=sub, vec=rank))


def copy_between(dec: Decoder, ops: list[str]) -> None:
    """Decodes a copy between blocks: [shared of any block], [own shared], bytes, [mbarrier of the same block as the first]."""
    dec.count(ops, 4)
    to, of, size, barrier = (
        shared_address(dec, ops[0]),
        shared_address(dec, ops[1]),
        dec.src(ops[2], "r"),
        shared_address(dec, ops[3]),
    )
    o = [to, of, size, barrier]
    dec.emit("BULK", o, (), o, Fields(sub=BULK_SHARED))


def store_async(dec: Decoder, vec: int, ops: list[str]) -> None:
    """Decodes st.async: [shared of any block], values, [mbarrier of the same block]."""
    dec.count(ops, 3)
    values = [dec.src(x, "r") for x in (dec.vector(ops[1]) if vec > 1 else ops[1:2])]
    if len(values) != vec:
        dec.fail(f"{len(values)} values for a vector of {vec}")
    o = [shared_address(dec, ops[0]), -1, -1, shared_address(dec, ops[2]), *values]
    watch(dec, "shared", 4, 4 * vec)
    dec.emit("BULK", o, (), o, Fields(vec=vec, sub=BULK_VALUES))


# ---- clusters

MAP_ADDRESS, RANK_OF_ADDRESS = range(2)  # hopper.cpp's
RELAXED = STRONG  # clusters.h's


def mapped(sub: int, dec: Decoder, mods: list[str], ops: list[str]) -> None:
    """Decodes mapa (the address in another block) and getctarank (the block of an address): with .shared::cluster, else
    generic.
    """
    if mods not in (["u32"], ["u64"], ["shared::cluster", "u32"], ["shared::cluster", "u64"]):
        dec.fail(f"form of {dec.ins.opcode}")
    dec.count(ops, 3 if sub == MAP_ADDRESS else 2)
    generic, c = len(mods) == 1, cls(mods[-1])
    if generic and c == "r":
        dec.fail("generic addresses have 64 bits")
    a = dec.src(ops[1], c)
    if not generic and c == "d":
        dec.fail("a shared address has 32 bits here")
    d = dec.dst(ops[0], c if sub == MAP_ADDRESS else "r")
    o = [d, a, *([dec.src(ops[2], "r")] if sub == MAP_ADDRESS else [])]
    dec.emit("MAPA", o, (d,), o[1:], Fields(sub=sub, flags=WIDE if generic else 0))


CLUSTER_BARRIER = {  # modifiers of barrier.cluster but .aligned -> kind, flags
    "arrive": ("CLUSTER_ARRIVE", 0),
    "arrive.release": ("CLUSTER_ARRIVE", 0),
    "arrive.relaxed": ("CLUSTER_ARRIVE", RELAXED),
    "wait": ("CLUSTER_WAIT", 0),
    "wait.acquire": ("CLUSTER_WAIT", 0),
}


def barrier(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    if mods[:1] != ["cluster"]:
        return opcodes_warp.bar(dec, mods, ops)
    form = CLUSTER_BARRIER.get(".".join(m for m in mods[1:] if m != "aligned"))
    if form is None or ops:
        dec.fail(f"unknown opcode '{dec.ins.opcode}'")
    dec.emit(form[0], [], of=Fields(flags=form[1] | (ALIGNED if "aligned" in mods else 0)))


STORE_ASYNC = re.compile(r"async(?:\.weak)?\.shared::cluster\.mbarrier::complete_tx::bytes(\.v[24])?\.[busf]32")


def store(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    if "async" in mods:
        if dec.ins.opcode.startswith("red") or not (match := STORE_ASYNC.fullmatch(".".join(mods))):
            dec.fail(f"unknown opcode '{dec.ins.opcode}'")
        return store_async(dec, int((match[1] or ".v1")[2:]), ops)
    (opcodes_memory.red if dec.ins.opcode.startswith("red") else opcodes_memory.store)(dec, mods, ops)


OPCODES: dict[str, Opcode] = {
    "stmatrix": stmatrix,
    "elect": elect,
    "setmaxnreg": setmaxnreg,
    "mbarrier": mbarrier,
    "cp": cp,
    "wgmma": wgmma,
    "mapa": partial(mapped, MAP_ADDRESS),
    "getctarank": partial(mapped, RANK_OF_ADDRESS),
    "barrier": barrier,
    "st": store,
    "red": store,
}
