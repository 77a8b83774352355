"""Generate the reference of the command line from the help of each command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from counter.cli.app import app
from counter.config.settings import settings_model

_SETTINGS: Final = frozenset(
    f"--{name.replace('_', '-')}" for name in settings_model().model_fields
)
_FLAG: Final = re.compile(r"^\* `(--[a-z0-9-]+)")
#: The flags of every command that asks a running service.
_GROUP: Final = re.compile(r"^\*\*Service\*\*:\n((?:\n|\* .*\n)+)", re.MULTILINE)
_NAMED: Final = "* [Flags that name the service](#service)\n\n"
_SERVICE: Final = """
## Flags that name the service {{ #service }}

Every command that calls a running service has these flags.

{flags}
"""
#: A usage line of our own, before which cyclopts writes the command once more.
_TWICE: Final = re.compile(r"^counter (.+?) \1 (?=\[OPTIONS\])", re.MULTILINE)
#: The heading of a panel with settings only.
_EMPTY: Final = re.compile(r"^\*\*[\w ]+\*\*:\n\n+(?!\n|\* `)", re.MULTILINE)
_EXAMPLES: Final = re.compile(r"^For example:\n((?:  .*\n)+)", re.MULTILINE)
_HEAD: Final = """# Every command

The help of each command, as `counter COMMAND --help` prints it. [The command line](../cli.md) shows
the daily ones in use. Settings are listed by name only: [every setting](settings.md) explains them,
and each can come from the environment or a file as well.
"""


def commands_page() -> str:
    """The page, in Markdown."""
    text = app.generate_docs(heading_level=1)
    # Omit the program's heading and the list, which the margin has already.
    _, _, commands = text.partition("## Table of Contents")
    _, _, commands = commands.partition("\n## ")
    service = _GROUP.search(commands)
    shared = _SERVICE.format(flags="" if service is None else service[1].strip())
    commands = _GROUP.sub(_NAMED, f"## {commands}").replace("**Parameters**:", "**Flags**:")
    commands = _TWICE.sub(r"counter \1 ", commands)
    # The usage line is not an example.
    commands = _EXAMPLES.sub(_fenced, commands).replace("```console\n", "```text\n")
    shortened = _EMPTY.sub("", "\n".join(_shortened(commands.splitlines())))
    return "\n".join([_HEAD, shortened, shared])


def _fenced(found: re.Match[str]) -> str:
    """Examples as a block."""
    lines = "\n".join(line.strip() for line in found[1].splitlines())
    return f"For example:\n\n```sh\n{lines}\n```\n"


def _shortened(lines: list[str]) -> Iterator[str]:
    """*lines* with the flags of each command that are settings made one line, and headings as
    code. A command without ``--config`` reads no settings: its flags only share their names."""
    for heading, rest in _by_heading(lines):
        flags = [(line, _FLAG.match(line)) for line in rest]
        named = [flag[1] for _, flag in flags if flag is not None]
        settings = [flag for flag in named if flag in _SETTINGS and "--config" in named]
        yield heading
        yield from (line for line, flag in flags if flag is None or flag[1] not in settings)
        if settings:
            links = [f"[`{flag}`](settings.md#{flag[2:].replace('-', '_')})" for flag in settings]
            yield from (f"* Settings: {', '.join(links)}", "")


def _by_heading(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each heading, as code with an anchor, and the lines below it."""
    heading, rest = "", list[str]()
    for line in lines:
        marks, _, name = line.partition(" ")
        if set(marks) == {"#"}:
            yield heading, rest
            heading, rest = f"{marks} `{name}` {{ #{name.replace(' ', '-')} }}", []
        else:
            rest.append(line)
    yield heading, rest
