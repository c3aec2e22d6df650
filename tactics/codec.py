"""Frozen dataclasses as JSON and back, driven by their annotated fields; a misfit is refused with its place in the JSON.

A record is an object of its fields; a field with its default may be left out, an unknown one is refused. A Python keyword as a
name ends in an underscore, which JSON leaves out. A record whose metadata has `inlined`, the names of its fields in JSON, has
them in the object around it. In a union of records, the object has its `type` too. Tuples are lists; infinity, which JSON
lacks, is the text "inf" or "-inf". `Annotated` narrows a type (Check) or reads a value of another class (As).

No library does this: msgspec reads no unions of dataclasses and accepts their unknown keys, and a machine with a GPU must run
engines with the packages that it has.
"""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from operator import attrgetter
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
Reader = Callable[[object], Any]  # a JSON value -> a field's; raises Misfit
Writer = Callable[[Any], object]  # the inverse
DEEPEST = 4  # levels of lists in a value that may be anything
LONGEST = 16_384  # characters of a text: paragraphs and tables are longest
LARGEST = 2**31 - 1  # of whole numbers without a bound of their own
DERIVED = {"derived": True}  # metadata of a field that follows from others: it is neither written nor read
INFINITE = {"inf": math.inf, "-inf": -math.inf}
WORDS = {str: "a text", int: "a whole number of 31 bits", float: "a number", bool: "true or false"}


class Misfit(ValueError):
    """A JSON value that does not fit its type. `at`: its place in the data, such as layers[3].name."""

    def __init__(self, words: str, at: str = ""):
        super().__init__(words)
        self.words, self.at = words, at

    def __str__(self) -> str:
        return f"{self.at.removeprefix('.')}: {self.words}" if self.at else self.words


@dataclass(frozen=True, slots=True)
class Check:
    """Narrows a type to values for which `holds`; `words` describe them, as in "a text of at most 9 characters"."""

    words: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class As:
    """A value that JSON holds as the type `json`. `read` raises ValueError for invalid JSON; `write` is its inverse."""

    words: str
    read: Callable[[Any], Any]
    write: Callable[[Any], object]
    json: type = str  # its type in JSON


Text = Annotated[str, Check(f"a text of at most {LONGEST} characters", lambda v: len(v) <= LONGEST)]


def one_of(names: tuple[str, ...]) -> Check:
    """Narrows a type to one of these texts."""
    return Check(f"one of {', '.join(names)}", lambda v: v in names)


def whole_number(low: int, high: int) -> Check:
    """Narrows a type to whole numbers from `low` to `high`, both included."""
    return Check(f"a whole number from {low} to {high}", lambda v: low <= v <= high)


def to_json(kind: object, value: object, *, defaults: bool = False) -> Any:
    """Writes a value of type `kind` as plain data. `defaults`: also fields that have their default."""
    return _writer(kind, defaults)(value)


def from_json(kind: type[T], data: object) -> T:
    """Reads a value that to_json wrote; `kind` may also be a union. Raises Misfit, a ValueError, for data that does not fit."""
    value: T = _reader(cast(Hashable, kind))(data)
    return value


def json_fields(kind: type) -> dict[str, tuple[str, Field[Any], Any]]:
    """Returns, for each field of a record that is not DERIVED: name in JSON -> (attribute, field, type)."""
    found: dict[str, tuple[str, Field[Any], Any]] = {}
    types = get_type_hints(kind, include_extras=True)
    for f in fields(kind):
        if names := f.metadata.get("inlined"):
            parts = json_fields(types[f.name])
            found |= {name: (f"{f.name}.{part}", *parts[part][1:]) for part, name in names.items()}
        elif f.metadata != DERIVED:
            found[f.name.removesuffix("_")] = f.name, f, types[f.name]
    return found


def words(hint: object) -> str:
    """Describes in words the JSON values of a type, for a document."""
    args = get_args(hint)
    if (narrowed := _narrowed(hint)) is not None:
        return narrowed.words
    if is_dataclass(hint) and isinstance(hint, type):
        return hint.__name__
    if get_origin(hint) is Literal:
        return f"one of {', '.join(args)}"
    if get_origin(hint) in (Union, UnionType):
        return " or ".join("null" if kind is NoneType else words(kind) for kind in args)
    if get_origin(hint) is tuple:
        return f"[{words(args[0])}, ...]" if args[-1] is Ellipsis else f"[{', '.join(map(words, args))}]"
    if get_origin(hint) is Mapping:
        return f"{{name: {words(args[1])}}}"
    return WORDS[hint] if isinstance(hint, type) and hint in WORDS else "a text, number, truth value, null, or a list of them"


def plain(value: object) -> Any:
    """Returns a value of any type as JSON has it: tuples become lists, infinity a text."""
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _narrowed(hint: object) -> Check | As | None:
    found = [m for m in get_args(hint)[1:] if isinstance(m, (Check, As))] if get_origin(hint) is Annotated else []
    return found[0] if found else None


def _expected(what: str, value: object) -> Misfit:
    return Misfit(f"expected {what}, got {str(value)[:60]}")


# ---- reading


@cache
def _reader(hint: object) -> Reader:
    args = get_args(hint)
    if (narrowed := _narrowed(hint)) is not None:
        return _narrowed_reader(args[0], narrowed)
    if is_dataclass(hint) and isinstance(hint, type):
        return _record_reader(hint)
    if get_origin(hint) is Literal:
        return _narrowed_reader(str, one_of(args))
    if get_origin(hint) in (Union, UnionType):
        return _union_reader(args)
    if get_origin(hint) is tuple:
        return _list_reader(tuple(_reader(kind) for kind in args if kind is not Ellipsis), args[-1] is Ellipsis)
    if get_origin(hint) is Mapping:
        return _mapping_reader(_reader(args[0]), _reader(args[1]))
    if hint is object:
        return lambda v: _anything(v, DEEPEST)
    if isinstance(hint, type) and hint in WORDS:
        return _plain_reader(hint)
    raise TypeError(f"no JSON is defined for {hint}")


def _plain_reader(kind: type) -> Reader:
    def read(v: object) -> object:
        if kind is float and isinstance(v, str) and v in INFINITE:
            return INFINITE[v]
        if type(v) is not kind and not (kind is float and type(v) is int):
            raise _expected(WORDS[kind], v)
        if type(v) is int and abs(v) > LARGEST:
            raise _expected("a whole number of at most 31 bits" if kind is int else "a number of at most 31 bits", v)
        return v

    return read


def _narrowed_reader(kind: object, narrowed: Check | As) -> Reader:
    if isinstance(narrowed, As):
        convert = narrowed.read

        def read_as(v: object) -> object:
            if type(v) is not narrowed.json:
                raise _expected(narrowed.words, v)
            try:
                return convert(v)
            except (ValueError, TypeError):
                raise _expected(narrowed.words, v) from None

        return read_as
    types, holds = ((float, int) if kind is float else (kind,)), narrowed.holds

    def read_checked(v: object) -> object:
        if type(v) in types and holds(v):
            return v
        raise _expected(narrowed.words, v)

    return read_checked


def _list_reader(items: tuple[Reader, ...], many: bool) -> Reader:
    """Reads a list: of any number of items[0] if `many`, else of one value for each of `items`."""

    def read(v: object) -> object:
        if type(v) is not list or not (many or len(v) == len(items)):
            raise _expected("a list" if many else f"a list of {len(items)}", v)
        found: list[object] = []
        try:
            found.extend(map(items[0], v) if many else (item(x) for item, x in zip(items, v, strict=True)))
        except Misfit as e:
            e.at = f"[{len(found)}]{e.at}"
            raise
        return tuple(found)

    return read


def _mapping_reader(name: Reader, item: Reader) -> Reader:
    def read(v: object) -> object:
        if type(v) is not dict:
            raise _expected("a record", v)
        found = {}
        for key, x in v.items():
            try:
                found[name(key)] = item(x)
            except Misfit as e:
                e.at = f".{key[:40]}{e.at}"
                raise
        return found

    return read


def _union_reader(kinds: tuple[object, ...]) -> Reader:
    """Reads null or one of several records, chosen by `type`. If null is allowed, the one other kind may be any type."""
    others = [kind for kind in kinds if kind is not NoneType]
    records = {kind.__name__: kind for kind in others if isinstance(kind, type) and is_dataclass(kind)}
    if len(others) == 1:
        inner = _reader(others[0])
    elif len(records) == len(others):

        def inner(v: object) -> object:
            kind = records.get(v.get("type", "")) if type(v) is dict and isinstance(v.get("type", ""), str) else None
            if kind is None:
                raise _expected(f"a record with a type, one of {', '.join(records)}", v)
            return _reader(kind)({key: x for key, x in v.items() if key != "type"})  # type: ignore[attr-defined]
    else:
        raise TypeError(f"no JSON is defined for the union of {others}")
    return (lambda v: None if v is None else inner(v)) if len(others) < len(kinds) else inner


def _record_reader(kind: type) -> Reader:
    named = json_fields(kind)
    by_name = {name: (at, _reader(hint)) for name, (at, _, hint) in named.items()}
    needed = [name for name, (_, f, _) in named.items() if f.default is MISSING and f.default_factory is MISSING]
    types = get_type_hints(kind)
    records = {f.name: (types[f.name], f.metadata["inlined"]) for f in fields(kind) if "inlined" in f.metadata}

    def read(v: object) -> object:
        if type(v) is not dict:
            raise _expected("a record", v)
        found = {}
        for name, x in v.items():
            if name not in by_name:
                raise Misfit(f"has an unknown {name[:40]!r}, expected only {', '.join(by_name)}")
            field, item = by_name[name]
            try:
                found[field] = item(x)
            except Misfit as e:
                e.at = f".{name}{e.at}"
                raise
        for name in needed:
            if name not in v:
                raise Misfit(f"has no '{name}'")
        for field, (inner, parts) in records.items():
            found[field] = inner(**{part: found.pop(at) for part in parts if (at := f"{field}.{part}") in found})
        try:
            return kind(**found)
        except (ValueError, ArithmeticError) as e:  # ArithmeticError: a stride or a number of groups is 0
            raise Misfit(f"{kind.__name__}: its values make no sense: {e}") from None

    return read


def _anything(value: object, deep: int) -> object:
    """Reads a text, number, truth value or null, or lists of them up to `deep` levels."""
    if isinstance(value, list) and deep:
        return tuple(_anything(v, deep - 1) for v in value)
    if isinstance(value, (str, bool, float, type(None))) or (type(value) is int and abs(value) < 2**63):
        return INFINITE.get(value, value) if isinstance(value, str) else value
    raise _expected("a text, number, truth value or null, or a list of them", value)


# ---- writing


@cache
def _writer(hint: object, defaults: bool) -> Writer:
    args = get_args(hint)
    if (narrowed := _narrowed(hint)) is not None:
        return narrowed.write if isinstance(narrowed, As) else _writer(args[0], defaults)
    if is_dataclass(hint) and isinstance(hint, type):
        return _record_writer(hint, defaults)
    if get_origin(hint) in (Union, UnionType):
        return _union_writer(args, defaults)
    if get_origin(hint) is tuple:
        items = [_writer(kind, defaults) for kind in args if kind is not Ellipsis]
        if all(item is _same for item in items):
            return list
        if args[-1] is Ellipsis:
            return lambda v: [*map(items[0], v)]
        return lambda v: [item(x) for item, x in zip(items, v, strict=True)]
    if get_origin(hint) is Mapping:
        value = _writer(args[1], defaults)
        return lambda v: {key: value(x) for key, x in v.items()}
    return _same if hint in (str, int, bool) or get_origin(hint) is Literal else plain


def _same(value: object) -> object:
    return value


def _record_writer(kind: type, defaults: bool) -> Writer:
    rows = []
    for name, (at, f, hint) in json_fields(kind).items():
        default = f.default if f.default_factory is MISSING else f.default_factory()
        rows.append((name, attrgetter(at), _writer(hint, defaults), MISSING if defaults else default))

    def write(v: object) -> object:
        given = ((name, value(v), item, default) for name, value, item, default in rows)
        return {name: item(x) for name, x, item, default in given if default is MISSING or x != default}

    return write


def _union_writer(kinds: tuple[object, ...], defaults: bool) -> Writer:
    others = [kind for kind in kinds if kind is not NoneType]
    if len(others) == 1:
        only = _writer(others[0], defaults)
        return lambda v: None if v is None else only(v)

    def write(v: object) -> object:
        written = None if v is None else _writer(cast(Hashable, type(v)), defaults)(v)
        return written if written is None else {"type": type(v).__name__} | written  # type: ignore[operator]

    return write
