"""Parses PTX text to functions made of instructions, with scopes resolved and every instruction's PTX and source line kept.

The parser handles only structure; decode.py handles the meaning of opcodes. Difficulties: inline asm opens `{ }` scopes with
their own registers (whose names need no %) and labels, repeated per expansion; several statements share a line; `.loc` and a
few other directives end with the line, everything else with a semicolon.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field


class ParseError(Exception):
    """Raised for PTX that this parser does not understand; the message names the line."""


class Scope:
    """One `{ }`: its registers (name -> type), labels (name -> unique label key) and enclosing scope."""

    __slots__ = ("parent", "regs", "banks", "labels", "vars")

    def __init__(self, parent: Scope | None) -> None:
        self.parent = parent
        self.regs: dict[str, str] = {}
        self.banks: list[tuple[str, int, str]] = []  # %r<619> declares a bank: (prefix, count, type)
        self.labels: dict[str, Label] = {}
        self.vars: dict[str, Var] = {}

    def outwards(self) -> Iterator[Scope]:
        """Yields this scope, then each that encloses it."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent

    def find_reg(self, name: str) -> tuple[Scope, str] | None:
        """Returns (scope, type) of the innermost register of this name, or None."""
        scope: Scope | None = self
        while scope is not None:
            kind = scope.regs.get(name)
            if kind is None:
                for prefix, count, bank_kind in scope.banks:
                    tail = name[len(prefix) :]
                    if name.startswith(prefix) and tail.isdigit() and int(tail) < count:
                        kind = scope.regs[name] = bank_kind
                        break
            if kind is not None:
                return scope, kind
            scope = scope.parent
        return None

    def find_var(self, name: str) -> Var | None:
        return next((s.vars[name] for s in self.outwards() if name in s.vars), None)

    def find_label(self, name: str) -> Label | None:
        return next((s.labels[name] for s in self.outwards() if name in s.labels), None)


@dataclass
class Var:
    """A variable in memory: `space` is shared, local, global, const or param."""

    name: str
    space: str
    size: int
    align: int
    init: bytes | None = None
    extern: bool = False


@dataclass
class Instr:
    opcode: str
    operands: list[str]
    guard: str  # "", "p" or "!p"
    line: int  # in the PTX text
    loc: tuple[int, int]  # (file number, line) in the CUDA source
    scope: Scope


@dataclass
class Label:
    name: str
    scope: Scope


@dataclass
class Function:
    name: str
    entry: bool
    params: list[Var]
    returns: list[Var]
    line: int
    scope: Scope
    body: list[Instr | Label] = field(default_factory=list)  # in order
    maxntid: tuple[int, ...] | None = None
    limits: dict[str, int] = field(default_factory=dict)  # minnctapersm, maxnreg
    cluster: tuple[int, ...] = ()  # reqnctapercluster: x, y, z
    explicit_cluster: bool = False
    tables: dict[str, list[str]] = field(default_factory=dict)  # .branchtargets lists


@dataclass
class Module:
    functions: dict[str, Function]
    scope: Scope  # module-level variables
    files: dict[int, str]
    target: str


SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
LINE_DIRECTIVES = (".loc ", ".loc\t", ".file", ".version", ".target", ".address_size")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_LABEL = re.compile(r"\s*([A-Za-z_$%][\w$]*)\s*:(?!:)")
_GUARD = re.compile(r"@\s*(!?)\s*([\w$%]+)\s*")
_FUNCTION = re.compile(r"(\.\w+\s+)*\.(entry|func)\b")
_VAR = re.compile(r"\.([a-z]+\d+)\s+([\w$%]+)\s*((?:\[\s*\d*\s*\])*)\s*(?:=\s*(.*))?$", re.S)


def split_operands(text: str) -> list[str]:
    """Splits at top-level commas; braces, brackets and parentheses nest."""
    if not any(c in text for c in "{[("):
        return [p.strip() for p in text.split(",")] if text.strip() else []
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "{[(":
            depth += 1
        elif c in "}])":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def parse_var(text: str, line: int) -> Var:
    """Parses `.shared .align 4 .b8 name[132]`, also with an initialiser, and the parameters of functions."""
    words = text.split()
    space = next((w[1:] for w in words if w in (".shared", ".local", ".global", ".const", ".param")), "param")
    align_match = re.search(r"\.align\s+(\d+)", text)
    match = _VAR.search(re.sub(r"\.ptr(\s+\.(global|shared|const|local))?(\s+\.align\s+\d+)?", "", text))
    if not match:
        raise ParseError(f"PTX line {line}: cannot read the declaration '{text}'")
    kind, name, dims, init = match.groups()
    element = SIZES.get(re.sub(r"\D", "", kind))
    if element is None:
        raise ParseError(f"PTX line {line}: cannot read the declaration '{text}'")
    count, open_ended = 1, False
    for dim in re.findall(r"\[\s*(\d*)\s*\]", dims):
        open_ended |= dim == ""
        count *= int(dim or 0)
    data = None
    if init is not None:
        values = re.findall(r"[^\s{},]+", init)
        try:
            ints = [_int_literal(v, element) for v in values]
        except ValueError:
            raise ParseError(f"PTX line {line}: initialiser of '{name}' is not made of numbers: {init[:60]}") from None
        data = b"".join((v & ((1 << 8 * element) - 1)).to_bytes(element, "little") for v in ints)
        data = data.ljust(count * element, b"\0")
    align = int(align_match[1]) if align_match else element
    return Var(name, space, count * element, align, data, ".extern" in words or open_ended)


def _int_literal(text: str, size: int) -> int:
    if text[:2] in ("0f", "0F", "0d", "0D"):
        return int(text[2:], 16)
    return int(text.rstrip("U"), 0)


def parse(ptx: str) -> Module:
    """Parses a whole module."""
    return _Parser(ptx).run()


class _Parser:
    def __init__(self, ptx: str) -> None:
        self.lines = _COMMENT.sub(lambda m: "\n" * m[0].count("\n"), ptx).split("\n")
        self.module = Module({}, Scope(None), {}, "")
        self.scope = self.module.scope
        self.function: Function | None = None
        self.loc = (0, 0)
        self.skip_section = 0
        self.header = ""  # of a function, as far as it has been read
        self.pending, self.start = "", 0  # an unfinished statement, and its first line

    def run(self) -> Module:
        for number, line in enumerate(self.lines, 1):
            rest = line.strip()
            while rest:
                rest = self.take(rest, number)
        if self.pending or self.header or self.function:
            raise ParseError(f"PTX line {self.start}: statement or function never ends")
        return self.module

    def take(self, text: str, number: int) -> str:
        """Reads one item at the start of the rest of a line and returns the new rest."""
        if self.skip_section:
            return self.section(text)
        if self.header:
            return self.function_header(text)
        if not self.pending:
            self.start = number
            rest = self.between_statements(text, number)
            if rest is not None:
                return rest
        end = text.find(";")
        if end < 0:
            self.pending += text + " "
            return ""
        self.statement((self.pending + text[:end]).strip())
        self.pending = ""
        return text[end + 1 :].lstrip()

    def section(self, text: str) -> str:
        """Skips a line of debug data."""
        self.skip_section += text.count("{") - text.count("}")
        if self.skip_section == 1 and "}" in text:
            self.skip_section = 0
        return ""

    def between_statements(self, text: str, number: int) -> str | None:
        """Reads an item without a semicolon; returns the rest of the line, or None if a statement begins."""
        first = text[0]
        if first in "{};":
            if first == "{":
                self.scope = Scope(self.scope)
            elif first == "}":
                self.close(number)
            return text[1:].lstrip()
        if text.startswith(".section"):
            self.skip_section = 1 + text.count("{")
            return ""
        if text.startswith(LINE_DIRECTIVES):
            self.directive(text)
            return ""
        if self.function is None:
            return self.function_header(text) if _FUNCTION.match(text) else None
        label = _LABEL.match(text)
        if label:
            self.scope.labels[label[1]] = key = Label(label[1], self.scope)
            self.function.body.append(key)
            return text[label.end() :].lstrip()
        return None

    def function_header(self, text: str) -> str:
        """Reads this line's part of a function's header and returns the rest of the line."""
        stop = re.search(r"[{;]", text)
        if not stop:
            self.header += text + " "
            return ""
        if stop[0] == "{":
            self.open_function((self.header + text[: stop.start()]).strip(), self.start)
        self.header = ""
        return text[stop.end() :].lstrip()

    def directive(self, text: str) -> None:
        words = text.split()
        if words[0] == ".loc":
            line = int(words[2])
            if line:  # line 0 marks compiler-made code: the line before says more
                self.loc = (int(words[1]), line)
        elif words[0] == ".file":
            match = re.match(r'\.file\s+(\d+)\s+"([^"]*)"', text)
            if match:  # the folder in front is where the compiler ran, not where the file is
                self.module.files[int(match[1])] = re.split(r"[/\\]", match[2])[-1]
        elif words[0] == ".target":
            self.module.target = words[1].rstrip(",")

    def open_function(self, header: str, line: int) -> None:
        match = re.match(r"[\s\S]*?\.(entry|func)\s*(?:\(([^)]*)\))?\s*([\w$%]+)\s*(?:\(([\s\S]*?)\))?\s*(\.[\s\S]*)?$", header)
        if not match:
            raise ParseError(f"PTX line {line}: cannot read the function header '{header[:80]}'")
        kind, returns, name, params, tail = match.groups()

        def variables(text: str | None) -> list[Var]:
            return [parse_var(p, line) for p in split_operands(text or "")]

        limit = re.search(r"\.(?:maxntid|reqntid)\s+([\d,\s]+)", tail or "")
        self.scope = Scope(self.scope)
        self.function = Function(name, kind == "entry", variables(params), variables(returns), line, self.scope)
        if limit:
            self.function.maxntid = tuple(int(v) for v in limit[1].split(",") if v.strip())
        for limited, number in re.findall(r"\.(minnctapersm|maxnreg)\s+(\d+)", tail or ""):
            self.function.limits[limited] = int(number)
        if cluster := re.search(r"\.reqnctapercluster\s+([\d,\s]+)", tail or ""):
            self.function.cluster = (*(int(v) for v in cluster[1].split(",") if v.strip()), 1, 1)[:3]
        self.function.explicit_cluster = bool(cluster) or ".explicitcluster" in (tail or "")
        self.loc = (0, 0)

    def close(self, number: int) -> None:
        if self.scope.parent is None:
            raise ParseError(f"PTX line {number}: unmatched closing brace")
        self.scope = self.scope.parent
        if self.function and self.scope is self.module.scope:
            self.module.functions[self.function.name] = self.function
            self.function = None

    def statement(self, text: str) -> None:
        if not text:
            return
        if text[0] == ".":
            return self.declaration(text)
        if self.function is None:
            raise ParseError(f"PTX line {self.start}: '{text[:80]}' is outside a function")
        guard = ""
        if match := _GUARD.match(text):
            guard, text = match[1] + match[2], text[match.end() :]
        opcode, _, rest = text.replace("\t", " ").partition(" ")
        if "{" in opcode or "[" in opcode:  # no space before the operands
            cut = min(i for i in (opcode.find("{"), opcode.find("[")) if i >= 0)
            rest, opcode = opcode[cut:] + " " + rest, opcode[:cut]
        self.function.body.append(Instr(opcode, split_operands(rest), guard, self.start, self.loc, self.scope))
        return None

    def declaration(self, text: str) -> None:
        if text.startswith((".pragma", ".alias")):
            return
        if text.startswith(".reg"):
            self.registers(text)
        elif text.startswith(".branchtargets"):
            self.branch_table(text)
        elif re.search(r"\.(shared|local|global|const|param)\b", text):
            var = parse_var(text, self.start)
            self.scope.vars[var.name] = var
        else:
            raise ParseError(f"PTX line {self.start}: unknown directive '{text[:80]}'")

    def branch_table(self, text: str) -> None:
        """Reads a table of branch targets; the label before it is its name."""
        name = self.function.body.pop() if self.function and self.function.body else None
        if self.function is None or not isinstance(name, Label):
            raise ParseError(f"PTX line {self.start}: expected a label before '{text[:80]}'")
        self.function.tables[name.name] = split_operands(text[len(".branchtargets") :])
        del name.scope.labels[name.name]

    def registers(self, text: str) -> None:
        match = re.match(r"\.reg\s*\.([a-z]+\d*)\s+([\s\S]+)$", text)
        if not match:
            raise ParseError(f"PTX line {self.start}: cannot read '{text}'")
        for name in split_operands(match[2]):
            bank = re.match(r"([\w$%]+)<(\d+)>$", name)
            if bank:
                self.scope.banks.append((bank[1], int(bank[2]), match[1]))
            else:
                self.scope.regs[name] = match[1]
