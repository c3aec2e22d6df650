"""Wrong emulators, one fault each: a program runs as if one instruction meant something else, everywhere it stands.

The fault is made in the PTX, before it is decoded: an emulator that takes `mma` with two registers exchanged, and one that is
given them exchanged, compute the same. So nothing is compiled again, and any program can be asked whether it would notice.
"""

import re
from collections.abc import Callable, Iterator

from cuda_kernels.emulator import EmulatorError, load

LINE = re.compile(r"(?m)^(?P<guard>[ \t]*(?:@!?%[\w]+[ \t]+)?)(?P<opcode>[a-z][\w.:]*)(?P<rest>[ \t][^;]*)?;")
SIGNLESS = ("add.s", "add.u", "sub.s", "sub.u", "mul.lo.", "mad.lo.", "setp.eq.s", "setp.eq.u", "setp.ne.s", "setp.ne.u")
ORDERS = {"relaxed", "acquire", "release", "acq_rel", "gpu", "sys"}  # orders of atomics, which one run cannot show
STEERS = {"bra", "brx", "ret", "exit", "call", "trap"}  # a program that ends right has these right
HINTS = {"griddepcontrol.launch_dependents", "prefetch.global.L2"}  # these change times only: no result depends on them
# Words of an opcode that change nothing, and the scope of an mbarrier's order, which one run cannot show.
UNSAID = {
    "cp": {"tile"},
    "st": {"weak"},
    "barrier": {"release", "acquire"},
    "mbarrier": {"release", "acquire", "cluster", "shared"},
}
SAME_BITS = re.compile(r"\.[usf](?=(8|16|32|64|128)$)")


def form(opcode: str) -> str:
    """Returns an opcode without the words that no program can notice: hints of caches, and names of types that are the same
    bits.
    """
    stem, *mods = opcode.split(".")
    mods = [m for m in mods if not m.startswith(("L1::", "L2::")) and m not in ("aligned", "cta", "shared::cta")]
    if stem in ("atom", "red"):
        mods = [m for m in mods if m not in ORDERS]
    mods = [m for m in mods if m not in UNSAID.get(stem, ())]
    if stem == "stmatrix":  # CuTe names the shape behind the number and .trans
        mods.sort(key=lambda m: (m != "sync", m != "m8n8"))
    text = ".".join(["barrier" if stem == "bar" and "warp" not in mods else stem, *mods])
    if stem in ("ld", "st", "mov", "selp") or text.startswith(SIGNLESS):
        return SAME_BITS.sub(".b", text)
    return text.replace(".rn.f32", ".f32") if stem in ("add", "sub", "mul") else text


def operands(text: str) -> list[str]:
    """Splits at the commas that are in no brackets."""
    parts, depth = [""], 0
    for c in text.strip():
        depth += (c in "{[(") - (c in "}])")
        if c == "," and not depth:
            parts.append("")
        else:
            parts[-1] += c
    return [p.strip() for p in parts if p.strip()]


def forms(ptx: str) -> set[str]:
    text = re.sub(r"//[^\n]*", "", ptx)
    return {form(m["opcode"]) for m in LINE.finditer(text) if m["opcode"] not in ("reg", "param")}


def exchanged(group: str, i: int, j: int) -> str:
    names = operands(group.strip("{} "))
    if max(i, j) >= len(names):
        i, j = 0, len(names) - 1
    names[i], names[j] = names[j], names[i]
    return "{" + ", ".join(names) + "}"


# ---- the wrong meanings of an instruction, in the order in which they are tried, until one can be decoded


def meanings(opcode: str, ops: list[str]) -> Iterator[str]:
    stem, mods = opcode.split(".")[0], opcode.split(".")[1:]
    if stem == "mma":
        yield f"{opcode} {', '.join([ops[0], exchanged(ops[1], 1, 2), *ops[2:]])};"
    elif stem == "wgmma" and "mma_async" in mods:
        yield f"{opcode} {', '.join([ops[0], exchanged(ops[1], 1, 2) if ops[1][0] == '{' else ops[2], *ops[2:]])};"
    elif stem == "stmatrix":
        yield f"{opcode} {ops[0]}, {exchanged(ops[1], 0, 1)};"
    elif stem == "elect":
        yield f"setp.ne.u32 {ops[0].split('|')[-1]}, 0, 0;"
    elif stem == "ldmatrix":
        if "x1" not in mods:
            yield f"{opcode} {exchanged(ops[0], 0, 1)}, {ops[1]};"
        yield f"{opcode.replace('.trans', '') if 'trans' in mods else opcode.replace('.m8n8', '.m8n8.trans')} {', '.join(ops)};"
    elif stem == "movmatrix":
        yield f"mov.b32 {', '.join(ops)};"
    elif stem == "mapa":  # this block's, whichever is asked for
        yield f"mov.b{mods[-1][1:]} {ops[0]}, {ops[1]};"
    elif stem == "setmaxnreg":
        yield f"{opcode} {int(ops[0]) + 8};"
    elif opcode.startswith(("cp.async.ca.", "cp.async.cg.")):
        yield f"{opcode} {', '.join(ops[:3])}{', 0' if len(ops) == 3 else ''};"
    elif stem in ("bar", "barrier", "cp", "griddepcontrol", "membar", "fence", "mbarrier", "st", "red", "wgmma"):
        yield ""
    elif stem == "shfl":
        yield f"{opcode} {', '.join([*ops[:2], '0', '31', ops[4]])};"
    elif stem == "setp" or opcode == "mov.pred":
        yield f"{opcode} {', '.join(ops)}; not.pred {ops[0]}, {ops[0]};"
    else:
        yield from computed(opcode, ops)


def computed(opcode: str, ops: list[str]) -> Iterator[str]:
    """Yields wrong meanings of an arithmetic instruction: a vector in another order, a source exchanged for another, no
    instruction at all.
    """
    target, sources = ops[0], ops[1:]
    if target.startswith("{") and "," not in target:
        target = target.strip("{} ")
    if target.startswith("{"):
        yield f"{opcode} {', '.join([exchanged(target, 0, 1), *sources])};"
    elif len(sources) > 1 and not opcode.startswith("ld"):
        yield f"{opcode} {', '.join([target, *sources[:-1], sources[0]])};"
        yield f"{opcode} {', '.join([target, sources[1], *sources[1:]])};"
    yield from (f"mov.b{bits} {target}, 0;" for bits in (32, 64, 16))
    yield f"setp.ne.u32 {target}, 0, 0;"


def faulty(ptx: str, wanted: str, *entries: str) -> str:
    """Returns the PTX in which every instruction of that form has a wrong meaning with which all `entries` can be decoded.
    Raises ValueError if it has no such instruction, or if the emulator knows no other meaning for it.
    """
    found = False

    def version(number: int) -> Callable[[re.Match[str]], str]:
        def other(m: re.Match[str]) -> str:
            nonlocal found
            if form(m["opcode"]) != wanted:
                return m[0]
            found = True
            choices = [c for c in meanings(m["opcode"], operands(m["rest"] or "")) if c != m[0].strip()]
            guard, text = m["guard"], choices[min(number, len(choices) - 1)] if choices else m[0]
            return guard + text.replace("; ", f";\n{guard}") if text else ""

        return other

    for number in range(6):
        changed = LINE.sub(version(number), ptx)
        if not found:
            raise ValueError(f"there is no {wanted}")
        if changed == ptx:
            continue
        try:
            for entry in entries or (None,):
                load(changed, entry)
        except EmulatorError:
            continue
        return changed
    raise ValueError(f"no other meaning of {wanted} can be decoded")
