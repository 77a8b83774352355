"""Run ``counter doctor``, which checks the environment and suggests fixes."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated, Final

from counter.cli.flags import ServeFlags, given
from counter.cli.terminal import Json, exit_on_error, exiting, flag, print_answer, printable
from counter.config.findings import Finding, wrong
from counter.config.report import load
from counter.errors import StartupError
from counter.ops.doctor import check_service, examine

#: The exit code if something is wrong.
EXIT_WRONG: Final = 1


def doctor(
    flags: ServeFlags | None = None,
    *,
    url: Annotated[
        str | None,
        flag(
            "A running service to check, too; several separated by commas",
            "URL",
            alias="-u",
            env_var="COUNTER_URL",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check everything, and change nothing; see ``counter doctor --help``."""
    with exit_on_error():
        try:
            loaded = load(given(flags))
            found = asyncio.run(examine(loaded, loaded.settings.kind.clock()))
        except StartupError as error:
            do = "docs/configuration.md has each setting, and counter config check all of them"
            found = [wrong("settings", line, do) for line in str(error).splitlines()]
        found += [check_service(each.strip()) for each in (url or "").split(",") if each.strip()]
        wrongs = sum(each.state == "wrong" for each in found)
        warnings = sum(each.state == "warning" for each in found)
        document = {"checks": list(map(asdict, found)), "wrong": wrongs, "warnings": warnings}
        end = f"{wrongs or 'nothing is'} wrong{f'; warnings: {warnings}' if warnings else ''}"
        with exiting(EXIT_WRONG if wrongs else 0):
            print_answer("\n".join([*map(_text, found), end]), document, json=json, indent=2)


def _text(found: Finding) -> str:
    text = f"{found.state:<8}  {found.part:<8}  {printable(found.detail)}"
    return f"{text}\n{'':<20}-> {found.do}" if found.do else text
