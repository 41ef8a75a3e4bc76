"""How a setting is declared: once, as a field of one of this package's dataclasses.

The field carries name, type, default, unit, bounds and a line of text. From these come the flag
(`--kv-memory`), the environment variable (`PDX_KV_MEMORY`), the key in a configuration file
(`[kv] kv_memory`), the help pages and docs/cli.md. Pure; runs in the process of a command.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pdx.errors import ConfigError

__all__ = [
    "SECTIONS",
    "Kind",
    "Setting",
    "Value",
    "format_bytes",
    "parse_bytes",
    "pick",
    "setting",
    "settings_of",
]

Value: TypeAlias = str | int | float | bool | tuple[str, ...]

#: Sections of a configuration file, and the panels of the help pages that show them.
SECTIONS = {
    "model": "Model",
    "kv": "KV cache",
    "scheduler": "Scheduler",
    "fabric": "Fabric",
    "server": "Server",
    "output": "Output",
}


class Kind(enum.Enum):
    """What a setting's value is, by the annotation of its field."""

    INT = "int"
    FLOAT = "float"
    TEXT = "str"
    FLAG = "bool"
    TEXTS = "tuple[str, ...]"
    #: A number of bytes, written like 512M.
    SIZE = "size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting. ``name`` is the field's; ``key`` is what users write."""

    name: str
    key: str
    section: str
    doc: str
    kind: Kind
    #: None: nothing is set; ``unset`` says what that means.
    default: Value | None
    unset: str = ""
    #: What stands for the value in help pages: TOKENS, SECONDS, HOST:PORT.
    metavar: str
    minimum: float | None = None
    choices: tuple[str, ...] = ()
    #: A one-letter flag.
    short: str | None = None
    #: Never printed.
    secret: bool = False
    #: The command cannot run without it.
    required: bool = False
    #: The command takes it as an argument, not as a flag.
    positional: bool = False

    @property
    def label(self) -> str:
        """What it is called on the command line."""
        return self.metavar if self.positional else self.flag

    @property
    def flag(self) -> str:
        """The long flag."""
        return "--" + self.key.replace("_", "-")

    @property
    def env(self) -> str:
        """The environment variable."""
        return "PDX_" + self.key.upper()

    @property
    def default_text(self) -> str:
        """The default in words; empty where there is nothing to say."""
        if self.default is None or self.default == ():
            return self.unset
        if self.kind is Kind.FLAG:
            return "on" if self.default else "off"
        return self.format(self.default)

    def format(self, value: Value) -> str:
        """The value as a flag or an environment variable carries it; inverse of :meth:`parse`."""
        if isinstance(value, tuple):
            return ",".join(value)
        if self.kind is Kind.SIZE:
            return format_bytes(int(value))
        if self.kind is Kind.FLAG:
            return "1" if value else "0"
        return f"{value:g}" if isinstance(value, float) else str(value)

    def parse(self, text: str) -> Value:
        """The value of a flag or of an environment variable.

        Raises:
            ConfigError: it is not one.
        """
        match self.kind:
            case Kind.FLAG:
                return self.check(_parse_flag(text))
            case Kind.TEXTS:
                return self.check(tuple(part.strip() for part in text.split(",") if part.strip()))
            case Kind.TEXT | Kind.SIZE:
                return self.check(text)
            case Kind.INT | Kind.FLOAT:
                return self.check(_parse_number(text, self.kind))

    def check(self, value: object) -> Value:
        """The value, of the setting's own type and within its bounds.

        Raises:
            ConfigError: it is of another type, or out of bounds.
        """
        checked = _typed(value, self.kind)
        if self.choices and checked not in self.choices:
            raise ConfigError(f"use {' or '.join(self.choices)}")
        if isinstance(checked, int | float) and not isinstance(checked, bool):
            if not math.isfinite(checked):
                raise ConfigError("the number must be finite")
            if self.minimum is not None and checked < self.minimum:
                raise ConfigError(f"it must be at least {self.minimum:g}")
        return checked


def setting(
    default: Value | None,
    doc: str,
    *,
    key: str,
    section: str,
    metavar: str = "",
    unset: str = "",
    minimum: float | None = None,
    choices: tuple[str, ...] = (),
    short: str | None = None,
    secret: bool = False,
) -> Any:
    """A dataclass field that is a setting; see :class:`Setting`."""
    assert section in SECTIONS
    declared = {
        "default": default,
        "key": key,
        "section": section,
        "doc": doc,
        "metavar": metavar or "|".join(choices),
        "unset": unset,
        "minimum": minimum,
        "choices": choices,
        "short": short,
        "secret": secret,
    }
    return field(default=default, metadata=declared)


def settings_of(config: type[Any]) -> list[Setting]:
    """The settings that a dataclass declares, in its order."""
    return [
        Setting(
            name=each.name,
            kind=_kind_of(str(each.type), each.metadata["metavar"]),
            **each.metadata,
        )
        for each in dataclasses.fields(config)
        if each.metadata
    ]


def pick(
    config: type[Any], *names: str, without: Iterable[str] = (), required: Iterable[str] = ()
) -> list[Setting]:
    """Some settings of a dataclass by field name; without names all of them."""
    declared = settings_of(config)
    known = {each.name for each in declared}
    assert {*names, *without, *required} <= known, f"{config.__name__} declares {sorted(known)}"
    return [
        dataclasses.replace(each, required=each.name in required)
        for each in declared
        if (not names or each.name in names) and each.name not in without
    ]


def _kind_of(annotation: str, metavar: str) -> Kind:
    kind = Kind(annotation.removesuffix(" | None"))
    return Kind.SIZE if metavar == "SIZE" else kind


def _typed(value: object, kind: Kind) -> Value:
    match kind, value:
        case Kind.FLAG, bool():
            return value
        case Kind.TEXT, str():
            return value
        case Kind.TEXTS, list() | tuple() if all(isinstance(part, str) for part in value):
            return tuple(value)
        case Kind.SIZE, str():
            return parse_bytes(value)
        case Kind.INT | Kind.SIZE, int() if not isinstance(value, bool):
            return value
        case Kind.FLOAT, int() | float() if not isinstance(value, bool):
            return float(value)
    wanted = {
        Kind.FLAG: "true or false",
        Kind.TEXT: "text",
        Kind.TEXTS: "a list of texts",
        Kind.INT: "a whole number",
        Kind.FLOAT: "a number",
        Kind.SIZE: "a size such as 512M",
    }
    raise ConfigError(f"it must be {wanted[kind]}")


def _parse_flag(text: str) -> bool:
    lower = text.strip().lower()
    if lower in ("1", "true", "yes", "on"):
        return True
    if lower in ("0", "false", "no", "off"):
        return False
    raise ConfigError("it must be 1 or 0")


def _parse_number(text: str, kind: Kind) -> int | float | str:
    """The number, or the text itself, which no numeric setting takes."""
    try:
        return int(text) if kind is Kind.INT else float(text)
    except ValueError:
        return text


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(text: str) -> int:
    """Parse a size such as ``512M``, ``1.5G`` or ``1GiB`` (powers of two).

    Raises:
        ConfigError: the text is not a size.
    """
    cleaned = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = cleaned[-1:] if cleaned[-1:] in _UNITS else ""
    try:
        value = float(cleaned.removesuffix(unit) if unit else cleaned)
    except ValueError:
        value = -1.0
    if not 0 < value < math.inf:
        raise ConfigError(f"{text!r} is not a size", hint="write for example 512M or 4G")
    return int(value * _UNITS[unit])


def format_bytes(size: int) -> str:
    """The shortest exact form that :func:`parse_bytes` takes."""
    for unit, factor in reversed(_UNITS.items()):
        if size % factor == 0 and size >= factor:
            return f"{size // factor}{unit}"
    return str(size)
