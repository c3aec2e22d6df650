"""What the opcodes mean that touch memory, move between lanes, use tensor cores or steer: as opcodes.py does it."""

from __future__ import annotations

import re

from cuda_kernels.emulator.opcodes import HALVES, cls, width

WIDE, SIGNED, NC, STRONG, ASYNC_ALL = 2, 4, 8, 32, 128
SYNC, ACQUIRE, RELEASE, UNCACHED = 1, 2, 4, 8  # interp.h's Order
CACHE = {
    "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "mmio",
    "cta", "cluster", "gpu", "sys", "v2", "v4", "v8", "L2::cache_hint", "L1::no_allocate", "L1::evict_first", "L1::evict_last",
    "L1::evict_normal", "L1::evict_unchanged", "L2::evict_first", "L2::evict_last", "L2::evict_normal", "L2::64B", "L2::128B",
    "L2::256B",
}  # fmt: skip
STATE_SPACES = {"global", "shared", "shared::cta", "local", "param", "const"}
ATOM_OPS = {name: i for i, name in enumerate("add min max and or xor exch cas inc dec".split())}
ATOM_TYPES = {name: i for i, name in enumerate("u32 s32 u64 s64 f32 f64 f16 f16x2 bf16 bf16x2".split())}


class Machine:
    """Mixed into Decoder beside Arithmetic."""

    # ---- memory

    def memory(self, mods, ops, store: bool) -> None:
        space = next((m for m in mods if m in STATE_SPACES), "generic").replace("::cta", "")
        flags, (t,) = self.split([m for m in mods if m not in STATE_SPACES], CACHE)
        target, values = (ops[0], ops[1]) if store else (ops[1], ops[0])
        if len(ops) > 2 and "L2::cache_hint" not in flags:
            self.fail(f"{len(ops)} operands")
        vec = next((int(f[1:]) for f in ("v2", "v4", "v8") if f in flags), 1)
        names = self.vector(values)
        if len(names) != vec:
            self.fail(f"{len(names)} values for a vector of {vec}")
        size = width(t) // 8
        if size * vec > 32:
            self.fail("access wider than 32 bytes")
        a, imm, wide, known = self.address(target)
        if space in ("param", "generic") and known:
            space = known
        bits = 0
        c = (
            "d"
            if any(self.is_wide(n, t) for n in names if n != "_" and self.register(n) is not None) or (store and size == 8)
            else "r"
        )
        if c == "d":
            bits |= WIDE
        if t[0] == "s" and not store:
            bits |= SIGNED
        rows = [self.src(n, c, t) for n in names] if store else [self.dst(n, c) for n in names]
        if space == "param" and not store and a <= -2 and not (set(rows) & {-1}):
            at = imm + self.const_value(a)
            if at % (size * vec) or at + size * vec > self.param_bytes:
                self.fail("parameter access is misaligned or outside the parameters")
            self.emit("LD_PARAM", rows, rows, imm=at, size=size, vec=vec, flags=bits)
            return
        if flags & {"volatile", "relaxed", "acquire", "release", "mmio"}:
            bits |= STRONG
        if "nc" in flags:
            bits |= NC
        if space in ("shared", "generic"):
            self.cell = min(self.cell, size)
        if space in ("global", "generic"):
            self.global_cell = min(self.global_cell, size * vec)
        kind = {"generic": 0, "global": 1, "const": 1, "shared": 2, "local": 3, "param": 4}[space]
        o = rows + [-1] * (8 - len(rows)) + [a]
        uses = (*rows, a) if store else (a,)
        self.emit(
            "ST" if store else "LD", o, () if store else rows, uses, imm=imm, space=kind, size=size, vec=vec,
            flags=bits | wide, order=self.order(flags, bool(bits & STRONG)),
        )  # fmt: skip

    def order(self, flags, strong: bool) -> int:
        """What an access does to the order between blocks (interp.h's Order)."""
        if strong and not flags & {"cta", "cluster"}:
            acquire, release = flags & {"acquire", "acq_rel"}, flags & {"release", "acq_rel"}
            return SYNC | (ACQUIRE if acquire else 0) | (RELEASE if release else 0)
        return UNCACHED if flags & {"cg", "cv"} else 0

    def const_value(self, operand: int) -> int:
        at = -2 - operand
        return int.from_bytes(self.consts[at : at + 8], "little")

    def op_ld(self, mods, ops):
        self.memory(mods, ops, False)

    def op_ldu(self, mods, ops):
        self.memory(mods, ops, False)

    def op_st(self, mods, ops):
        self.memory(mods, ops, True)

    def op_atom(self, mods, ops):
        self.atomic(mods, ops[0], ops[1:])

    def op_red(self, mods, ops):
        self.atomic(mods, "_", ops)

    def atomic(self, mods, d: str, ops) -> None:
        space = next((m for m in mods if m in STATE_SPACES), "generic").replace("::cta", "")
        op = next((m for m in mods if m in ATOM_OPS), None)
        rest = [m for m in mods if m not in STATE_SPACES and m != op]
        sem = {"relaxed", "acquire", "release", "acq_rel", "cta", "cluster", "gpu", "sys", "noftz", "L2::cache_hint"}
        flags, (t,) = self.split(rest, sem)
        if op is None or space not in ("global", "shared", "generic"):
            self.fail("form of atomic")
        if "L2::cache_hint" in flags:
            ops = ops[:-1]
        self.count(ops, 3 if op == "cas" else 2)
        kind = re.sub("^b(?=32|64)", "u", t) if t != "b16" else "f16"
        if kind not in ATOM_TYPES or (t[0] == "f" or t in HALVES) and op not in ("add", "exch"):
            self.fail("type of atomic")
        c = cls(t)
        a, imm, wide, known = self.address(ops[0])
        if space == "generic" and known:
            space = known
        b = self.src(ops[1], c, t)
        third = self.src(ops[2], c, t) if op == "cas" else b
        dest = self.dst(d, c)
        if space in ("shared", "generic"):
            self.cell = min(self.cell, width(t) // 8)
        if space in ("global", "generic"):
            self.global_cell = min(self.global_cell, width(t) // 8)
        self.emit("ATOM", [dest, a, b, third], (dest,), (a, b, third), imm=imm, flags=wide, size=width(t) // 8,
                  space={"generic": 0, "global": 1, "shared": 2}[space], sub=ATOM_OPS[op] | ATOM_TYPES[kind] << 8,
                  order=self.order(flags, True))  # fmt: skip

    def op_cp(self, mods, ops):
        if mods[:1] != ["async"]:
            self.fail(f"unknown opcode 'cp.{'.'.join(mods)}'")
        rest = mods[1:]
        if rest == ["commit_group"]:
            self.emit("CP_COMMIT", [])
        elif rest == ["wait_group"]:
            self.emit("CP_WAIT", [], imm=self.number(ops[0]))
        elif rest == ["wait_all"]:
            self.emit("CP_WAIT", [], flags=ASYNC_ALL)
        elif rest[:1] in (["ca"], ["cg"]) and len(rest) >= 3 and rest[1] in ("shared", "shared::cta") and rest[2] == "global":
            if set(rest[3:]) - {"L2::cache_hint", "L2::64B", "L2::128B", "L2::256B"}:
                self.fail(f"unknown modifier in 'cp.{'.'.join(mods)}'")
            if "L2::cache_hint" in rest:
                ops = ops[:-1]
            self.count(ops, 3, 4, 5)
            size = self.number(ops[2])
            if size not in (4, 8, 16) or (rest[0] == "cg" and size != 16):
                self.fail(f"cp-size {size}")
            dst, imm, wide, _ = self.address(ops[0])
            src, imm2, src_wide, _ = self.address(ops[1])
            if not src_wide:
                self.fail("the global address must have 64 bits")
            take = ignore = -1
            for extra in ops[3:]:
                name = extra.lstrip("!")
                v = self.register(name)
                if v is not None and self.classes[v] == "p":
                    ignore = self.pred_value(extra)
                else:
                    take = self.src(extra, "r")
            self.global_cell = min(self.global_cell, size)
            self.emit("CP_ASYNC", [dst, src, take, ignore], (), (dst, src, take, ignore), imm=imm, imm2=imm2, size=size,
                      flags=wide, order=UNCACHED if rest[0] == "cg" else 0)  # fmt: skip
        else:
            self.fail(f"unknown opcode 'cp.{'.'.join(mods)}'")

    def op_prefetch(self, mods, ops):
        self.address(ops[0])
        self.emit("NOP", [])

    op_prefetchu = op_prefetch

    def op_createpolicy(self, mods, ops):
        self.row("mov.b64", self.dst(ops[0], "d"), self.const(0, 64))

    # ---- matrices

    def op_ldmatrix(self, mods, ops):
        flags = [m for m in mods if m not in ("sync", "aligned", "shared", "shared::cta", "b16")]
        vec = next((int(m[1]) for m in flags if m in ("x1", "x2", "x4")), 0)
        if not vec or set(flags) - {"m8n8", "x1", "x2", "x4", "trans"} or "m8n8" not in flags:
            self.fail("form of ldmatrix")
        rows = [self.dst(r, "r") for r in self.vector(ops[0])]
        if len(rows) != vec or -1 in rows:
            self.fail(f"ldmatrix.x{vec} writes {vec} registers")
        a, imm, wide, _ = self.address(ops[1])
        shared = "shared" in mods or "shared::cta" in mods
        self.emit("LDMATRIX", rows + [-1] * (8 - vec) + [a], rows, (a,), imm=imm, vec=vec, sub=int("trans" in flags),
                  flags=wide, space=2 if shared else 0)  # fmt: skip

    def op_movmatrix(self, mods, ops):
        if mods != ["sync", "aligned", "m8n8", "trans", "b16"]:
            self.fail("form of movmatrix")
        d, s = self.dst(ops[0], "r"), self.src(ops[1], "r")
        self.emit("MOVMATRIX", [d, s], (d,), (s,))

    def op_mma(self, mods, ops):
        text = ".".join(mods)
        match = re.fullmatch(
            r"(sp::ordered_metadata\.)?sync\.aligned\.m16n8k(8|16|32)\.row\.col\.(f32|f16)\.(f16|bf16)\.(f16|bf16)\.(f32|f16)",
            text,
        )
        if not match:
            self.fail(f"unknown opcode 'mma.{text}'")
        sparse, k, d, a, b, c = match[1], int(match[2]), *match.groups()[2:]
        if a != b or d != c or (a == "bf16" and d == "f16") or k not in ((16, 32) if sparse else (8, 16)):
            self.fail("combination of mma types or shape")
        counts = [2 if d == "f16" else 4, k // 8 if sparse else k // 4, k // 8, 2 if d == "f16" else 4]
        self.count(ops, 6 if sparse else 4)
        groups = [self.vector(o) for o in ops[:4]]
        if [len(g) for g in groups] != counts:
            self.fail("register counts of mma")
        rows = [self.dst(r, "r") for r in groups[0]]
        sources = [
            self.src(r, "r", t)
            for g, t in zip(groups[1:], ("b32", "b32", "b32" if c == "f16" else "f32"), strict=True)
            for r in g
        ]
        sub = (1 if a == "bf16" else 0) | (2 if d == "f16" else 0)
        if not sparse:
            self.emit("MMA", rows + sources, rows, sources, size=k, sub=sub)
            return
        e, selector = self.src(ops[4], "r"), self.number(ops[5])
        if not 0 <= selector < (2 if k == 32 else 4):
            self.fail(f"sparsity selector {selector}")
        self.emit("MMA_SP", [*rows, *sources, e], rows, (*sources, e), size=k, sub=sub, imm=selector)

    # ---- warps and blocks

    def op_bar(self, mods, ops):
        if mods[:1] == ["warp"]:
            mask = self.src(ops[0], "r")
            self.emit("BAR_WARP", [-1, mask], (), (mask,))
            return
        mods = [m for m in mods if m not in ("cta", "aligned")]
        if mods == ["sync"] or mods == ["arrive"]:
            number = self.src(ops[0], "r")
            threads = self.src(ops[1], "r") if len(ops) > 1 else -1
            if mods == ["arrive"] and threads == -1:
                self.fail("bar.arrive needs a thread count")
            self.emit("BAR", [-1, number, threads], (), (number, threads), sub=int(mods == ["arrive"]))
        elif mods[:1] == ["red"] and mods[1:] in (["popc", "u32"], ["and", "pred"], ["or", "pred"]):
            code = {"popc": 2, "and": 3, "or": 4}[mods[1]]
            d = self.dst(ops[0], "r" if code == 2 else "p")
            number = self.src(ops[1], "r")
            threads = self.src(ops[2], "r") if len(ops) > 3 else -1
            p, negated = self.pred_src(ops[-1])
            self.emit("BAR", [d, number, threads, p], (d,), (number, threads, p), sub=code, flags=negated)
        else:
            self.fail(f"unknown opcode 'bar.{'.'.join(mods)}'")

    def op_barrier(self, mods, ops):
        if "cluster" in mods:
            self.fail(f"unknown opcode 'barrier.{'.'.join(mods)}'")
        self.op_bar(mods, ops)

    def member_mask(self, kind: str, d: int, p: int, sources, mask: int, **more) -> None:
        o = [d, p, *sources, *[-1] * (3 - len(sources)), mask]
        self.emit(kind, o, (d, p), (*sources, mask), **more)

    def op_shfl(self, mods, ops):
        modes = {"up": 0, "down": 1, "bfly": 2, "idx": 3}
        if len(mods) != 3 or mods[0] != "sync" or mods[1] not in modes or mods[2] != "b32":
            self.fail("form of shfl")
        d, _, p = (s.strip() for s in ops[0].partition("|"))
        self.member_mask("SHFL", self.dst(d, "r"), self.dst(p, "p") if p else -1, [self.src(o, "r") for o in ops[1:4]],
                         self.src(ops[4], "r"), sub=modes[mods[1]])  # fmt: skip

    def op_vote(self, mods, ops):
        modes = {"ballot": 0, "any": 1, "all": 2, "uni": 3}
        if len(mods) != 3 or mods[0] != "sync" or mods[1] not in modes:
            self.fail("form of vote")
        p, negated = self.pred_src(ops[1])
        d = self.dst(ops[0], "r" if mods[1] == "ballot" else "p")
        self.member_mask("VOTE", d, -1, [p], self.src(ops[2], "r"), sub=modes[mods[1]], flags=negated)

    def op_match(self, mods, ops):
        if len(mods) != 3 or mods[0] not in ("any", "all") or mods[1] != "sync" or mods[2] not in ("b32", "b64"):
            self.fail("form of match")
        d, _, p = (s.strip() for s in ops[0].partition("|"))
        self.member_mask("MATCH", self.dst(d, "r"), self.dst(p, "p") if p else -1, [self.src(ops[1], cls(mods[2]))],
                         self.src(ops[2], "r"), sub=int(mods[0] == "all"), size=width(mods[2]) // 8)  # fmt: skip

    def op_redux(self, mods, ops):
        if len(mods) != 3 or mods[0] != "sync" or mods[1] not in ATOM_OPS or mods[2] not in ("u32", "s32", "b32"):
            self.fail("form of redux")
        sub = ATOM_OPS[mods[1]] | ATOM_TYPES[mods[2].replace("b", "u")] << 8
        self.member_mask("REDUX", self.dst(ops[0], "r"), -1, [self.src(ops[1], "r")], self.src(ops[2], "r"), sub=sub)

    def op_activemask(self, mods, ops):
        d = self.dst(ops[0], "r")
        self.emit("ACTIVEMASK", [d], (d,))

    # ---- control

    def op_bra(self, mods, ops):
        if set(mods) - {"uni"}:
            self.fail("form of bra")
        self.emit("BRA", [], targets=[self.label_of(ops[0])], ends=self.guard is None)

    def op_brx(self, mods, ops):
        if mods[:1] != ["idx"] or set(mods[1:]) - {"uni"}:
            self.fail("form of brx")
        function = self.module.functions[self.calling[-1]]
        index = self.src(ops[0], "r")
        if ops[1] not in function.tables:
            self.fail(f"unknown branch table '{ops[1]}'")
        targets = [self.label_of(name) for name in function.tables[ops[1]]]
        self.emit("BRX", [-1, index], (), (index,), targets=targets, ends=self.guard is None)

    def op_ret(self, mods, ops):
        if len(self.calling) == 1:
            return self.op_exit(mods, ops)
        self.emit("BRA", [], targets=[(self.instance, 0)], ends=self.guard is None)
        return None

    def op_exit(self, mods, ops):
        self.emit("EXIT", [], ends=self.guard is None)

    def op_call(self, mods, ops):
        returns = self.names(ops.pop(0)) if ops and ops[0][0] == "(" else []
        name, given = ops[0], self.names(ops[1]) if len(ops) > 1 else []
        if name == "__assertfail":
            self.emit("TRAP", [], ends=True)
            return
        function = self.module.functions.get(name)
        if function is None or self.guard is not None:
            self.fail(f"call of '{name}', which this module does not define, or a call under a guard")
        frame = {}
        for formal, actual in zip([*function.returns, *function.params], [*returns, *given], strict=True):
            var = self.ins.scope.find("vars", actual)
            if var is None:
                self.fail(f"unknown parameter '{actual}'")
            frame[formal.name] = ("local", self.local_slot((self.instance, id(var)), var))
        ins = self.ins
        self.function(function, frame)
        self.ins = ins

    def names(self, text: str) -> list[str]:
        return [p.strip() for p in text.strip()[1:-1].split(",") if p.strip()]

    def op_trap(self, mods, ops):
        self.emit("TRAP", [], ends=self.guard is None)

    op_brkpt = op_trap

    def no_op(self, mods, ops):
        self.emit("NOP", [])

    op_nanosleep = no_op

    def op_griddepcontrol(self, mods, ops):
        if mods not in (["wait"], ["launch_dependents"]):
            self.fail(f"unknown opcode 'griddepcontrol.{'.'.join(mods)}'")
        self.emit("NOP" if mods == ["launch_dependents"] else "GRID_WAIT", [])

    def op_membar(self, mods, ops):
        if mods not in (["cta"], ["gl"], ["sys"]):
            self.fail(f"unknown opcode 'membar.{'.'.join(mods)}'")
        self.emit("NOP" if mods == ["cta"] else "FENCE", [])

    def op_fence(self, mods, ops):
        order, scope = (mods[0] if len(mods) > 1 else "acq_rel"), mods[-1]
        if len(mods) > 2 or order not in ("sc", "acq_rel") or scope not in ("cta", "cluster", "gpu", "sys"):
            self.fail(f"unknown opcode 'fence.{'.'.join(mods)}'")
        self.emit("FENCE" if scope in ("gpu", "sys") else "NOP", [])
