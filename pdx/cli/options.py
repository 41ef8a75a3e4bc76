"""From declared settings to a command's flags, and from its flags to resolved settings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from pdx.cli.output import set_up_logging, status_line
from pdx.config.environment import DESCRIPTOR_VARIABLE, unknown_variables
from pdx.config.node import OutputConfig
from pdx.config.resolve import resolve
from pdx.config.setting import SECTIONS, Kind, Setting, settings_of

__all__ = ["HELP_STYLE", "CheckOption", "help_text", "with_settings"]

#: How help pages are drawn. Panels on a narrow terminal would cut flags and variables short.
HELP_STYLE: Literal["rich"] | None = "rich" if shutil.get_terminal_size().columns >= 80 else None

CheckOption = Annotated[
    bool,
    typer.Option(
        "--check", help="Say what the node would take, or why it would not start, and exit."
    ),
]
_CONFIG = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE", help="Read settings from a TOML file [PDX_CONFIG]."),
]
_PRINT = Annotated[
    bool,
    typer.Option(
        "--print-config", help="Print the settings as TOML, each with its origin, and exit."
    ),
]

#: Characters.
_LONG_FLAG = 20


def with_settings(
    declared: Sequence[Setting] = (), *, argument: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn ``body(settings, **own)`` into a command with a flag for each setting.

    The output's settings, `--config` and `--print-config` come along; logging is set up before the
    body runs.

    Args:
        argument: the setting that is the command's positional argument, by field name.
    """
    every = [
        dataclasses.replace(each, positional=each.name == argument)
        for each in (*declared, *settings_of(OutputConfig))
    ]

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        own = [
            each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, each in inspect.signature(body, eval_str=True).parameters.items()
            if name != "settings"
        ]

        @functools.wraps(body)
        def command(**given: Any) -> None:
            file = given.pop("config") or os.environ.get("PDX_CONFIG")
            print_only = given.pop("print_config")
            flags = {each.name: given.pop(each.name) for each in every}
            settings = resolve(
                every, flags=flags, env=os.environ, file=Path(file).expanduser() if file else None
            )
            if print_only:
                _warn_of_unknown()
                sys.stdout.write(settings.to_toml())
                return
            output = settings.build(OutputConfig)
            set_up_logging(body.__name__, output)
            _warn_of_unknown()
            settings.check_required()
            try:
                body(settings, **given)
            except Exception:
                if output.debug:
                    traceback.print_exc()
                raise

        # The terminal's width breaks the lines of a paragraph, not the source's.
        paragraphs = inspect.cleandoc(body.__doc__ or "").split("\n\n")
        command.__doc__ = "\n\n".join(" ".join(each.split()) for each in paragraphs)
        parameters = [
            *(p for p in own if not _has_default(p)),
            *(_parameter(each) for each in every if each.positional),
            *(p for p in own if _has_default(p)),
            _plain("config", _CONFIG, None),
            _plain("print_config", _PRINT, False),
            *(_parameter(each) for each in every if not each.positional),
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return decorate


def help_text(each: Setting) -> str:
    """One line: what it is, its choices, its default, its variable."""
    default = each.default_text
    notes = [
        f"one of {', '.join(each.choices)}" if each.choices else "",
        "required" if each.required else f"default: {default}" if default else "",
        each.env,
    ]
    return f"{each.doc} [{'; '.join(note for note in notes if note)}]"


def _warn_of_unknown() -> None:
    """Name variables that look like settings and are none. The nodes of a supervisor leave that to
    it.
    """
    if DESCRIPTOR_VARIABLE in os.environ:
        return
    for name, nearest in unknown_variables(os.environ).items():
        hint = f"; did you mean {nearest}?" if nearest else ", and none is like it"
        status_line(f"warning: no setting has the variable {name}{hint}")


def _has_default(parameter: inspect.Parameter) -> bool:
    return parameter.default is not inspect.Parameter.empty


def _plain(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=annotation)


def _parameter(each: Setting) -> inspect.Parameter:
    """The flag, as text: :func:`resolve` parses it, wherever it comes from."""
    shown: dict[str, Any] = {
        "help": help_text(each).replace("[", r"\[") if HELP_STYLE else help_text(each),
        "show_default": False,
        "autocompletion": (lambda: list(each.choices)) if each.choices else None,
    }
    if each.positional:
        argument = typer.Argument(metavar=each.metavar, **shown)
        return _plain(each.name, Annotated[str | None, argument], None)
    shown["rich_help_panel"] = SECTIONS[each.section]
    if each.kind is Kind.FLAG:
        # Both forms of a long flag would leave the help page no room for its text. What is off by
        # default needs no other form: a variable or a file that sets it can be changed.
        only_on = not each.default and len(each.flag) > _LONG_FLAG
        names = each.flag if only_on else f"{each.flag}/--no-{each.flag[2:]}"
        flag = typer.Option(names, **shown)
        return _plain(each.name, Annotated[bool | None, flag], None)
    flags = [each.flag, *([each.short] if each.short else [])]
    # The help text has the choices: a metavar is broken anywhere where the terminal is narrow.
    metavar = "CHOICE" if each.choices else each.metavar
    option = typer.Option(*flags, metavar=metavar, **shown)
    many = each.kind is Kind.TEXTS
    return _plain(each.name, Annotated[list[str] | None if many else str | None, option], None)
