"""Writes docs/cli.md from the commands and their settings: python scripts/cli_reference.py"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from pdx.cli.main import app
from pdx.config.resolve import all_settings
from pdx.config.setting import SECTIONS, Setting

PATH = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
HEAD = """# The `pdx` command

Written by `scripts/cli_reference.py` from the commands themselves; a test keeps it true.

## Where settings come from

Defaults, then a TOML file (`--config FILE` or `PDX_CONFIG`), then `PDX_*` variables, then flags;
the last one wins. `pdx COMMAND --print-config` prints what comes out, each value with its origin,
as a file that `--config` takes. One file may serve all commands: each reads the settings that it
has. A key that no command knows is an error; a `PDX_*` variable that nothing reads is named in a
warning, with the one that it resembles.

```toml
[model]
dtype = "bfloat16"

[kv]
kv_memory = "8G"

[server]
http = "0.0.0.0:8000"
served_model_name = "small"
```

A decoder takes model, dtype and page size from its prefiller, unless they are set.

Keep `api_key` out of flags, which other users of the host can read: set `PDX_API_KEY`.

## What comes out, and how a command ends

Data goes to stdout, everything else to stderr. `--log-format json` makes every line on stderr an
object with time, level, role, process id and message. `NO_COLOR` is respected; progress bars appear
on terminals only. Tables keep within the terminal, or within `COLUMNS` where that is set.
`pdx --install-completion` completes commands and flags in your shell.

`pdx serve` shows how much of the weights its nodes have read, and then the URL: on stdout for
programs, with the model's name on stderr for people. A node that ends later is started again, at
the address that it had, after half a second and then twice as long each time; meanwhile the others
serve (a decoder prefills by itself). A node that ends `--restarts` times in a row, or before it has
served at all, ends all, and its last lines are the error. The one node of `--colocated` is not
started again.

What cannot be written to stdout (a full disk) ends a command with 1 and the reason; a reader that
has had enough ends it quietly, with 1. A trace that cannot be written is refused at the start; a
disk that fills up later cuts it short, which the node says once.

| exit code | meaning |
| --- | --- |
| 0 | done; or a server that was ended by Ctrl-C or SIGTERM |
| 1 | refused: by the environment, a peer, a server, a checkpoint |
| 2 | the command line, a variable or a configuration file is wrong |
| 70 | a bug in pdx |
| 130 | interrupted |

`--debug` (or `PDX_DEBUG=1`) shows the traceback of an error.
"""


def reference() -> str:
    """The whole page."""
    commands = dict(_commands(typer.main.get_command(app), "pdx"))
    parts = [HEAD, "## Commands\n"]
    parts += [_command(name, command) for name, command in commands.items()]
    parts.append("## Settings\n")
    for section, title in SECTIONS.items():
        rows = [_setting(each, commands) for each in all_settings() if each.section == section]
        parts.append(
            f"### {title}: `[{section}]`\n\n"
            "| flag | key | variable | default | what | commands |\n"
            "| --- | --- | --- | --- | --- | --- |\n" + "\n".join(rows) + "\n"
        )
    return "\n".join(parts)


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield name, command
        return
    for child_name, child in children.items():
        yield from _commands(child, f"{name} {child_name}")


def _command(name: str, command: Any) -> str:
    own = [p for p in command.params if not _is_setting(p) and p.name not in _EVERYWHERE]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join([name, *(p.metavar or str(p.name).upper() for p in arguments), "[OPTIONS]"])
    prose = [
        textwrap.fill(paragraph, 100, break_on_hyphens=False)
        for paragraph in command.help.split("\n\n")
    ]
    text = "\n\n".join([f"### `{usage}`", *prose]) + "\n"
    rows = [f"| {_label(p)} | {_default(p)} | {_cell(_text(p.help))} |" for p in own]
    if rows:
        text += "\n| | default | |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"
    sections = {str(p.rich_help_panel): None for p in command.params if _is_setting(p)}
    if len(sections) > 1:
        text += f"\nSettings: {', '.join(sections)}.\n"
    return text


#: Of every command; the head of the page tells them.
_EVERYWHERE = ("config", "print_config", "help")


def _is_setting(param: Any) -> bool:
    return getattr(param, "rich_help_panel", None) in SECTIONS.values()


def _label(param: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{param.metavar or param.name.upper()}`"
    metavar = f" {param.metavar}" if param.metavar else ""
    return ", ".join(f"`{flag}{metavar}`" for flag in (*param.opts, *param.secondary_opts))


def _default(param: Any) -> str:
    default = param.default
    if default is None or isinstance(default, bool):
        return "-"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _text(help_text: str | None) -> str:
    return (help_text or "").replace("\\[", "[")


def _setting(each: Setting, commands: dict[str, Any]) -> str:
    using = [
        name.removeprefix("pdx ")
        for name, command in commands.items()
        if any(p.name == each.name and _is_for(p, each) for p in command.params)
    ]
    short = f"`{each.short}`, " if each.short else ""
    everywhere = len(using) == len(commands)
    cells = [
        f"{short}`{each.flag}{' ' + each.metavar if each.metavar else ''}`",
        f"`{each.key}`",
        f"`{each.env}`",
        each.default_text or "-",
        each.doc,
        "all" if everywhere else ", ".join(using),
    ]
    return f"| {' | '.join(map(_cell, cells))} |"


def _is_for(param: Any, each: Setting) -> bool:
    """The parameter is the setting, as a flag or as the command's argument."""
    return _is_setting(param) or bool(
        param.param_type_name == "argument" and param.metavar == each.metavar
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PATH.write_text(reference(), "utf-8")
