"""Reads the parameter struct of a kernel from its source, and puts named arguments in its order.

    members("conv_dense", (("RES", 1),)) -> Member("nonfinite", "ptr"), ..., Member("beta", "f32"), Member("r_n", "i32"), ...

A base's members come first. A nested struct's are named behind a dot, an array's by index: `out.block`, `from[0].spread.n`.
Launch arguments have the same names. So a member that is added, renamed, moved or changed in type on one side only is an error
when the launch is made, before anything runs.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

from cuda_kernels.compile import Values, source_path, sources
from cuda_kernels.named_devices import MAX_BLOCK, MAX_GRID, MAX_THREADS

# Kinds as pack_params has them. A TensorMap (include/bulk.cuh) is opaque.
TYPES = {"int": "i32", "u32": "i32", "float": "f32", "long long": "i64", "TensorMap": "map"}
VALUES = frozenset(TYPES.values())  # all other kinds stand for an address
Argument = tuple[str, Any]  # (kind, value)


class Member(NamedTuple):
    """One parameter; `kind` is "ptr", "i32", "i64", "f32" or "map"."""

    name: str
    kind: str


class Declared(NamedTuple):
    """A member as a struct declares it: the macros that it depends on, its type without const ("*" for a pointer), name, array
    lengths.
    """

    when: tuple[str, ...]
    kind: str
    name: str
    lengths: tuple[str, ...]


class Source(NamedTuple):
    """Facts from a kernel's source: its parameter struct, nested structs, counts of digits (macro, base) by name, and the
    macros that select members, each with its default value."""

    params: str
    structs: Mapping[str, tuple[Declared, ...]]
    counts: Mapping[str, tuple[str, int]]
    deciding: tuple[tuple[str, int], ...]


class Order(NamedTuple):
    """The parameters of a kernel, a function that picks their values from a mapping, and their kinds."""

    members: tuple[Member, ...]
    pick: itemgetter[tuple[str, ...]]
    kinds: tuple[str, ...]


def members(kernel: str, values: Values) -> tuple[Member, ...]:
    """Returns the parameters of a kernel compiled with these values, in order. Raises ValueError for an unknown source form."""
    return _order(kernel, values).members


def _order(kernel: str, values: Values) -> Order:
    given = dict(values)
    return _order_under(kernel, tuple([int(given.get(name, n)) for name, n in _source(kernel).deciding]))


@lru_cache(maxsize=4096)
def _order_under(kernel: str, deciding: tuple[int, ...]) -> Order:
    source = _source(kernel)
    given = {name: n for (name, _), n in zip(source.deciding, deciding, strict=True)}
    found = tuple(_flat(source, given, source.params, ""))
    return Order(found, itemgetter(*(m.name for m in found)), tuple(m.kind for m in found))


def arrange(kernel: str, values: Values, named: Mapping[str, Argument]) -> tuple[Argument, ...]:
    """Puts named (kind, value) pairs in the order of the kernel's parameter struct.

    Every kind outside of VALUES stands for an address; ("i64", 0) is a null pointer. Raises ValueError that names missing
    arguments, unknown arguments and wrong types.
    """
    order = _order(kernel, values)
    try:
        arguments: tuple[Argument, ...] = order.pick(named)
    except KeyError:
        arguments = ()
    if len(arguments) == len(named) and all(k == a[0] or _fits(k, a) for k, a in zip(order.kinds, arguments, strict=True)):
        return arguments
    names = {m.name for m in order.members}
    faults = [f"'{m.name}' is missing" for m in order.members if m.name not in named]
    faults += [f"'{name}' is not a member" for name in named if name not in names]
    both = [(m, named[m.name]) for m in order.members if m.name in named]
    faults += [f"'{m.name}' is of type {m.kind}, got {value}" for m, value in both if not _fits(m.kind, value)]
    struct = _source(kernel).params
    raise ValueError(f"{kernel} {dict(values)}: expected arguments for the members of {struct}, but {'; '.join(faults)}")


def _fits(kind: str, argument: Argument) -> bool:
    got = argument[0]
    return got == kind or (kind == "ptr" and (got not in VALUES or argument == ("i64", 0)))


def _flat(source: Source, given: Mapping[str, int], struct: str, prefix: str) -> Iterator[Member]:
    for d in source.structs[struct]:
        if not all(given[macro] for macro in d.when):
            continue
        for name in _elements(prefix + d.name, [_length(source, given, text) for text in d.lengths]):
            if d.kind in source.structs:
                yield from _flat(source, given, d.kind, name + ".")
            elif d.kind == "TensorMap" and prefix:  # that struct would end at a multiple of 64, which pack_params does not know
                raise ValueError(f"struct {struct}: member '{d.name}': expected a TensorMap among the kernel's own parameters")
            elif d.kind == "*" or d.kind in TYPES:
                yield Member(name, TYPES.get(d.kind, "ptr"))
            else:
                known = f"a struct, a pointer, {', '.join(TYPES)}"
                raise ValueError(f"struct {struct}: member '{d.name}' is of type {d.kind}, expected {known}")


def _elements(name: str, lengths: list[int]) -> list[str]:
    names = [name]
    for length in lengths:
        names = [f"{n}[{i}]" for n in names for i in range(length)]
    return names


def _length(source: Source, given: Mapping[str, int], text: str) -> int:
    """Evaluates an array's length as the kernel's source writes it: a number, the name of a constant N = count(MACRO, base), or
    `N ? N : 1`. N is the number of digits of the macro's value, from `given`, in that base. Raises ValueError for others.
    """
    name, _, default = text.partition("?")
    name = name.strip()
    if text.isdigit():
        return int(text)
    if name not in source.counts or default.replace(" ", "") not in ("", f"{name}:1"):
        raise ValueError(f"array length '{text}': expected a number, or a name that is a count of digits")
    macro, base = source.counts[name]
    packed, length = given[macro], 0
    while packed:
        packed, length = packed // base, length + 1
    return length or int(bool(default))


# ---- reading


STRUCT = re.compile(r"^struct (\w+)(?: : (\w+))? \{\n(.*?)^\};", re.M | re.S)
KERNEL = re.compile(r"__global__[^;{]*?\bconst __grid_constant__ (\w+)")
MACRO = re.compile(r"^#define (\w+) (\d+)$", re.M)
COUNT = re.compile(r"(\w+) = count\((\w+), (\d+)\)")
BODY = re.compile(r"\{[^{}]*\}")
DECLARATION = re.compile(r"(?:const )?(unsigned \w+|long long|[\w:<>]+)\s*(.+)", re.S)
DECLARATOR = re.compile(r"(\*?)\s*(\w+)((?:\[[^\]]*\])*)(?: = .*)?", re.S)


@cache
def _source(kernel: str) -> Source:
    text = "\n".join(path.read_text() for path in sources(source_path(kernel)))
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r"[ \t]+$", "", text, flags=re.M)
    taken = KERNEL.findall(text)
    if len(taken) != 1:
        raise ValueError(f"kernel {kernel}: expected one __global__ function of a __grid_constant__ struct, got {taken}")
    found = STRUCT.findall(text)
    bodies = {name: body for name, _, body in found}
    structs = _reached(taken[0], {name: bodies.get(base, "") + body for name, base, body in found})
    counts = {name: (macro, int(base)) for name, macro, base in COUNT.findall(text)}
    macros = {name: int(value) for name, value in MACRO.findall(text)}
    used = {macro for declared in structs.values() for d in declared for macro in d.when}
    used |= {macro for macro, _ in counts.values()}
    return Source(taken[0], structs, counts, tuple((name, macros.get(name, 0)) for name in sorted(used)))


def _reached(params: str, bodies: Mapping[str, str]) -> dict[str, tuple[Declared, ...]]:
    """Returns the members of the parameter struct and of its members' structs, by struct."""
    found: dict[str, tuple[Declared, ...]] = {}
    names = [params]
    for name in names:
        found[name] = tuple(_declared(name, bodies[name]))
        names += [d.kind for d in found[name] if d.kind in bodies and d.kind not in names]
    return found


def _declared(struct: str, body: str) -> Iterator[Declared]:
    while BODY.search(body):  # methods: from the innermost braces outwards
        body = BODY.sub(";", body)
    when: list[str] = []
    for line in re.split(r"(^#.*$)", body, flags=re.M):
        if line.startswith("#if ") and line[4:].isidentifier():
            when.append(line[4:])
        elif line == "#endif":
            when.pop()
        elif line.startswith("#"):
            raise ValueError(f"struct {struct}: '{line}': expected #if of one macro, or #endif")
        else:
            for statement in (s.strip() for s in line.split(";")):
                if statement and "(" not in statement:
                    yield from _declarators(struct, tuple(when), statement)


def _declarators(struct: str, when: tuple[str, ...], statement: str) -> Iterator[Declared]:
    match = DECLARATION.fullmatch(statement)
    if not match:
        raise ValueError(f"struct {struct}: cannot read '{statement}'")
    for text in match[2].split(","):
        declarator = DECLARATOR.fullmatch(text.strip())
        if not declarator:
            raise ValueError(f"struct {struct}: cannot read '{text.strip()}' in '{statement}'")
        star, name, dimensions = declarator.groups()
        lengths = tuple(part.strip() for part in re.findall(r"\[([^\]]*)\]", dimensions))
        yield Declared(when, star or match[1], name, lengths)


# ---- the struct's bytes

# Argument kind -> (struct code, alignment in bytes). Pointers are addresses; a map is its 128 bytes.
KINDS = {"ptr": ("Q", 8), "i64": ("q", 8), "i32": ("i", 4), "f32": ("f", 4), "map": ("128s", 64)}


def pack_params(args: Iterable[tuple[str, Any]]) -> bytes:
    """Packs (kind, value) pairs as the C struct with these members in this order, each at its natural alignment.

    Kinds are the keys of KINDS: "ptr" (an address), "i32", "i64", "f32", and "map", the 128 bytes of a CUtensorMap. The
    struct ends at a multiple of its largest alignment, 8 bytes at least; with a "map" this is 64. Raises KeyError for
    another kind.
    """
    data, most = bytearray(), 8
    for kind, value in args:
        code, align = KINDS[kind]
        data += bytes(-len(data) % align) + struct.pack("<" + code, value)
        most = max(most, align)
    return bytes(data + bytes(-len(data) % most))


def offsets(args: Iterable[tuple[str, Any]]) -> list[int]:
    """Returns the first byte of each of these arguments in the struct of `pack_params`."""
    found, end = list[int](), 0
    for kind, _ in args:
        code, align = KINDS.get(kind, KINDS["ptr"])
        found.append(end + -end % align)
        end = found[-1] + struct.calcsize("<" + code)
    return found


def check_launch(name: str, grid: Sequence[int], block: Sequence[int], params: bytes, param_bytes: int) -> None:
    """Raises ValueError if the driver would refuse grid or block, or would read bytes outside `params`.

    `param_bytes`: the size of the kernel's parameters; the driver copies that many bytes from the given address, without
    knowing the size there. `params` may be longer by the padding to a struct's alignment.
    """
    for what, got, most in (("grid", grid, MAX_GRID), ("block", block, MAX_BLOCK)):
        if len(got) != 3 or any(not 1 <= n <= m for n, m in zip(got, most, strict=True)):
            raise ValueError(f"{name}: expected a {what} of 1 to {' x '.join(map(str, most))}, got {tuple(got)}")
    if math.prod(block) > MAX_THREADS:
        raise ValueError(f"{name}: expected at most {MAX_THREADS} threads per block, got {math.prod(block)}")
    if not param_bytes <= len(params) < param_bytes + 8:
        raise ValueError(f"{name}: {len(params)} bytes of parameters, the kernel takes {param_bytes}")
