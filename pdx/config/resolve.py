"""Where values come from: defaults, then a TOML file, then `PDX_*`, then flags; the last one wins.

Pure but for reading the file; runs in the process of a command.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pdx.config.engine import EngineConfig
from pdx.config.node import (
    DrainConfig,
    FabricConfig,
    ModelChoice,
    OutputConfig,
    RecoveryConfig,
    RestartConfig,
    ServerConfig,
    TraceConfig,
)
from pdx.config.setting import SECTIONS, Kind, Setting, Value, settings_of
from pdx.errors import ConfigError

__all__ = ["Settings", "all_settings", "read_file", "resolve"]

Config = TypeVar("Config")
#: Where the origins of a printed file's values stand at most.
_COMMENT_COLUMN = 48


def all_settings() -> list[Setting]:
    """Every setting there is, by section; a file may hold any of them, whichever command reads
    it.
    """
    configs = (
        ModelChoice,
        EngineConfig,
        FabricConfig,
        RecoveryConfig,
        ServerConfig,
        DrainConfig,
        RestartConfig,
        TraceConfig,
        OutputConfig,
    )
    return [each for config in configs for each in settings_of(config)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A command's settings with their values, by field name."""

    declared: Sequence[Setting]
    values: Mapping[str, Value | None]
    #: What each value was set by: "default", a file's name, a variable or a flag.
    origins: Mapping[str, str]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def is_default(self, name: str) -> bool:
        """Nobody has set it."""
        return self.origins[name] == "default"

    def build(self, config: type[Config], **overrides: object) -> Config:
        """A configuration dataclass from those of its fields that the command has.

        Raises:
            ConfigError: the values do not go together.
        """
        known = {each.name for each in settings_of(config)}
        values = {name: value for name, value in self.values.items() if name in known}
        return config(**(values | overrides))

    def check_required(self) -> None:
        """Raise for what the command cannot run without.

        Raises:
            ConfigError: naming it and the ways to give it.
        """
        for each in self.declared:
            if each.required and self.values[each.name] in (None, ()):
                raise ConfigError(
                    f"{each.label} is missing: {each.doc}",
                    hint=f"give {each.label}, {each.env}, or {each.key} under [{each.section}] "
                    "in a --config file",
                )

    def to_env(self) -> dict[str, str | None]:
        """The same settings as environment variables, for a command that is started with them;
        None: the variable must not be set.
        """
        return {
            each.env: None if (value := self.values[each.name]) is None else each.format(value)
            for each in self.declared
        }

    def to_toml(self) -> str:
        """The settings as a configuration file, each with its origin. Secrets stay out."""
        lines: list[str] = []
        for section in SECTIONS:
            rows = [self._row(each) for each in self.declared if each.section == section]
            if not rows:
                continue
            width = min(max(len(assignment) for assignment, _ in rows), _COMMENT_COLUMN)
            lines += [*([""] if lines else []), f"[{section}]"]
            lines += [f"{assignment:<{width}}  # {comment}" for assignment, comment in rows]
        return "\n".join(lines) + "\n"

    def _row(self, each: Setting) -> tuple[str, str]:
        value, origin = self.values[each.name], self.origins[each.name]
        if value is None or value == ():
            return f"# {each.key} =", f"{origin}: {each.unset}" if each.unset else "not set"
        if each.secret:
            return f"# {each.key} = (hidden)", origin
        return f"{each.key} = {_toml(each, value)}", origin


def resolve(
    declared: Sequence[Setting],
    *,
    flags: Mapping[str, object],
    env: Mapping[str, str],
    file: Path | None,
) -> Settings:
    """Find each setting's value.

    Args:
        flags: what the command line gives, by field name; None: not given.
        file: a TOML file.

    Raises:
        ConfigError: a value is wrong, or the file is; the message names value and place.
    """
    from_file = {} if file is None else read_file(file)
    values: dict[str, Value | None] = {}
    origins: dict[str, str] = {}
    for each in declared:
        given = flags.get(each.name)
        if given is not None and given != ():
            take = each.parse if isinstance(given, str) else each.check
            checked = _checked(take, given, f"{each.label} {_shown(each, given)}")
            values[each.name], origins[each.name] = checked, each.label
        elif text := env.get(each.env):
            checked = _checked(each.parse, text, f"{each.env}={_shown(each, text)}")
            values[each.name], origins[each.name] = checked, each.env
        elif each.key in from_file:
            values[each.name], origins[each.name] = from_file[each.key], str(file)
        else:
            values[each.name], origins[each.name] = each.default, "default"
    return Settings(declared=declared, values=values, origins=origins)


def read_file(path: Path) -> dict[str, Value]:
    """The values of a configuration file, by key.

    Raises:
        ConfigError: it cannot be read, or holds what no setting is.
    """
    try:
        sections = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    known = {each.key: each for each in all_settings()}
    values: dict[str, Value] = {}
    for section, content in sections.items():
        if section not in SECTIONS or not isinstance(content, dict):
            raise _unknown(path, f"section or key {section!r}", section, SECTIONS)
        keys = [key for key, each in known.items() if each.section == section]
        for key, value in content.items():
            if key not in keys:
                raise _unknown(path, f"key {key!r} in [{section}]", key, keys)
            place = f"{path}: [{section}] {key} = {_shown(known[key], value)}"
            values[key] = _checked(known[key].check, value, place)
    return values


def _unknown(path: Path, what: str, word: str, known: Collection[str]) -> ConfigError:
    close = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
    return ConfigError(f"{path}: unknown {what}", hint=hint)


def _checked(take: Callable[[Any], Value], value: object, place: str) -> Value:
    try:
        return take(value)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error.message}", hint=error.hint) from None


def _shown(each: Setting, value: object) -> str:
    return "(hidden)" if each.secret else str(value)


def _toml(each: Setting, value: Value) -> str:
    """JSON's strings, numbers, booleans and arrays of strings are TOML's too."""
    if each.kind is Kind.SIZE:
        value = each.format(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
