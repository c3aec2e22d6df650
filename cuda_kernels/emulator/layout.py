"""The addresses of a kernel's shared variables and parameters."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from cuda_kernels.emulator.parse import Function, Instr, Module, Var
from cuda_kernels.emulator.programs import SHARED_START


class Shared(NamedTuple):
    """Shared memory of a kernel: the address of each variable by its id(), the end of the static ones, the dynamic array's
    address.
    """

    addresses: dict[int, int]
    static_end: int
    dynamic_at: int


def shared_layout(module: Module, kernel: Function) -> Shared:
    """Lays out the static variables of every function, then the dynamic array at the least alignment it declares."""
    variables = _shared_variables(module, kernel)
    used = {o for i in _reachable(module, kernel) for text in i.operands for o in re.findall(r"[\w$%]+", text)}
    addresses: dict[int, int] = {}
    at = SHARED_START
    for var in variables:
        if var.name in used and not var.extern:
            addresses[id(var)] = at = -(-at // var.align) * var.align
            at += var.size
    dynamic = [var for var in variables if var.extern]
    align = max([16, *(v.align for v in dynamic if v.name in used)])
    start = -(-at // align) * align
    if align < 1024 and start % (2 * align) == 0:
        start += align
    return Shared(addresses | {id(var): start for var in dynamic}, at, start)


def _shared_variables(module: Module, kernel: Function) -> list[Var]:
    """Returns the variables of the module, then of the functions that the kernel may call, each once, in order of
    declaration.
    """
    scopes = [module.scope]
    for function in module.functions.values():
        if function is kernel or not function.entry:
            scopes += [scope for item in function.body for scope in item.scope.outwards()]
    once = {id(scope): scope for scope in scopes}.values()
    return [var for scope in once for var in scope.vars.values() if var.space == "shared"]


def _reachable(module: Module, kernel: Function) -> Iterator[Instr]:
    """Yields the instructions of the kernel and of the functions that it calls."""
    todo, seen = [kernel], set()
    while todo:
        function = todo.pop()
        if function.name in seen:
            continue
        seen.add(function.name)
        for item in function.body:
            if isinstance(item, Instr):
                yield item
                if item.opcode.startswith("call"):
                    todo += [module.functions[o] for o in item.operands if o in module.functions]


def thread_registers(kernel: Function) -> int:
    """Returns the most registers that a thread may start with, as its launch bounds leave them; 0 without any bounds.

    ptxas gives that many to a kernel with setmaxnreg: 168 to each of 384 threads.
    """
    limits = kernel.limits
    threads = -(-math.prod(kernel.maxntid or (0,)) // 32) * 32 * limits.get("minnctapersm", 1)
    by_threads = 65536 // threads // 8 * 8 if threads else 0
    known = [n for n in (by_threads, limits.get("maxnreg", 0) // 8 * 8) if n]
    return min([*known, 248]) if known else 0


def parameter_layout(kernel: Function) -> tuple[dict[str, int], int]:
    """Returns (offset of each parameter, bytes of all)."""
    offsets, at = {}, 0
    for p in kernel.params:
        offsets[p.name] = at = -(-at // p.align) * p.align
        at += p.size
    return offsets, at
