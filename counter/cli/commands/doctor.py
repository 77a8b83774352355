"""Run ``counter doctor``, which checks the environment and suggests fixes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Final

from counter import __version__
from counter.cli.flags import ServeFlags, given
from counter.cli.terminal import Json, exit_on_error, exiting, flag, print_answer
from counter.config.findings import Finding
from counter.config.report import load
from counter.errors import StartupError
from counter.ops.doctor import examine

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
    api_key_file: Annotated[
        Path | None,
        flag("A file with an API key for it [COUNTER_API_KEY in the environment]", "FILE"),
    ] = None,
    json: Json = False,
) -> None:
    """Check everything, and change nothing; see ``counter doctor --help``."""
    with exit_on_error():
        found: list[Finding] = []
        try:
            loaded = load(given(flags))
        except StartupError as error:
            do = "docs/configuration.md has each setting, and counter config check all of them"
            found += [Finding("settings", "wrong", line, do) for line in str(error).splitlines()]
        else:
            found += asyncio.run(examine(loaded, loaded.settings.kind.clock()))
        if url:
            found += _of_services(url, api_key_file)
        wrong = sum(each.state == "wrong" for each in found)
        warnings = sum(each.state == "warning" for each in found)
        checks = [asdict(each) for each in found]
        document = {"checks": checks, "wrong": wrong, "warnings": warnings}
        with exiting(EXIT_WRONG if wrong else 0):
            print_answer(_table(found, wrong, warnings), document, json=json, indent=2)


def _of_services(urls: str, api_key_file: Path | None) -> Iterator[Finding]:
    # Only this takes the client.
    from counter.cli.client import PlaceFlags, in_words, key_of
    from counter.ops.service_check import check_service

    api_key = key_of(PlaceFlags(api_key_file=api_key_file))
    for each in filter(None, urls.split(",")):
        for found in check_service(each.strip(), api_key, __version__):
            yield replace(found, detail=in_words(found.detail))


def _table(found: Sequence[Finding], wrong: int, warnings: int) -> str:
    width = max(len(each.part) for each in found)
    lines = []
    for each in found:
        lines.append(f"{each.state:<8}  {each.part:<{width}}  {each.detail}")
        if each.do:
            lines.append(f"{'':<8}  {'':<{width}}  -> {each.do}")
    end = f"{wrong} wrong" if wrong else "nothing is wrong"
    return "\n".join([*lines, f"{end}; warnings: {warnings}" if warnings else end])
