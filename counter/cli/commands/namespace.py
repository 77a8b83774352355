"""Run ``counter namespace ...``: settings as flags, checked by the service itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from counter.cli.client import EXIT_NO, PlaceFlags, ServiceFlags, ended, fail, opened
from counter.cli.terminal import (
    JsonLines,
    flag,
    json_line,
    print_answer,
    print_error,
    print_out,
    printable,
    remark,
    table,
)
from counter.errors import StartupError
from counter_client.errors import PreconditionFailedError

_Which = Annotated[str, flag("The namespace")]


@Parameter(name="*", group="Settings")
@dataclass(frozen=True, kw_only=True)
class ChangeFlags:
    """The changeable settings of a namespace; what is left out stays as it is."""

    accept_limit: Annotated[
        str | None, flag("How old a token may be before it is resolved: 5s")
    ] = None
    future_limit: Annotated[str | None, flag("How far ahead a token's time may be: 5s")] = None
    payload_check: Annotated[str | None, flag("off, guard or strict")] = None
    key_ttl: Annotated[str | None, flag("How long an arbitrary key is remembered: 1d")] = None
    cache_ttl: Annotated[str | None, flag("How long a count may come from the cache: 10s")] = None
    requests_per_s: Annotated[
        int | None, flag("Requests per second to each process; 0 for any number")
    ] = None
    adds_per_s: Annotated[int | None, flag("Adds per second, likewise")] = None


@Parameter(name="*", group="Settings")
@dataclass(frozen=True, kw_only=True)
class CreateFlags(ChangeFlags):
    """The same, and the settings that are fixed for its lifetime."""

    counter_type: Annotated[str, flag("ACCURATE, EVENTUAL or BEST_EFFORT; fixed, as the next are")]
    dataset: Annotated[str | None, flag("The dataset, whose retention it has")] = None
    rollup_window: Annotated[str | None, flag("The length of a rollup window: 10s")] = None
    shards: Annotated[int | None, flag("The shards that rollup workers share")] = None


def create(
    name: _Which,
    /,
    settings: CreateFlags,
    place: PlaceFlags | None = None,
    *,
    json: JsonLines = False,
) -> None:
    """Create a namespace."""
    service = _of(place, name)
    with ended(service), opened(service) as client:
        try:
            made = client.create_namespace(**_given(settings))
        except PreconditionFailedError:
            fail(
                f"namespace {name!r} exists already; counter namespace change changes its settings",
                EXIT_NO,
            )
        _show(made, json=json)


def change(
    name: _Which,
    /,
    settings: ChangeFlags | None = None,
    place: PlaceFlags | None = None,
    *,
    json: JsonLines = False,
) -> None:
    """Change a namespace's settings."""
    service = _of(place, name)
    with ended(service), opened(service) as client:
        given = _given(settings or ChangeFlags())
        if not given:
            raise StartupError("nothing to change: give a setting, such as --cache-ttl 5s")
        _show(client.change_namespace(**given), json=json)


def list_(place: PlaceFlags | None = None, *, json: JsonLines = False) -> None:
    """Show all namespaces that the caller may see."""
    service = _of(place, ServiceFlags.namespace)
    with ended(service), opened(service) as client:
        found = client.namespaces()
        if json:
            for each in found:
                print_out(json_line(each))
            return
        columns = ("namespace", "counter_type", "dataset", "accept_limit", "rollup_window")
        rows = [[each.get(column, "") for column in columns] for each in found]
        print_out(table([column.replace("_", " ").upper() for column in columns], rows))


def show(name: _Which, /, place: PlaceFlags | None = None, *, json: JsonLines = False) -> None:
    """Show a namespace's settings."""
    service = _of(place, name)
    with ended(service), opened(service) as client:
        _show(client.namespace(), json=json)


def delete(
    name: _Which,
    /,
    place: PlaceFlags | None = None,
    *,
    yes: Annotated[bool, flag("Do not ask")] = False,
    json: JsonLines = False,
) -> None:
    """Delete a namespace with all its data."""
    service = _of(place, name)
    with ended(service), opened(service) as client:
        client.namespace()
        if not yes:
            _ask(name)
        client.delete_namespace()
        print_answer(f"{name}: deleted", {"namespace": name, "deleted": True}, json=json)


def _ask(name: str) -> None:
    """Ask the user to repeat the name. Exits if it differs, or if standard input is not a
    terminal."""
    if not sys.stdin.isatty():
        raise StartupError("there is no terminal to confirm the name: give --yes to delete it")
    print_error(
        f"Namespace {name} is deleted with its counters, events and tokens, for ever.\n"
        "Its name, to go on: ",
        end="",
    )
    if sys.stdin.readline().strip() != name:
        fail("that is not its name; nothing was deleted", EXIT_NO)


def _of(place: PlaceFlags | None, name: str) -> ServiceFlags:
    return ServiceFlags(**asdict(place or PlaceFlags()), namespace=name)


def _given(settings: ChangeFlags) -> dict[str, Any]:
    """Return the given settings in the API's form."""
    return {k: v for k, v in asdict(settings).items() if v is not None}


def _show(settings: dict[str, Any], *, json: bool) -> None:
    warnings: Sequence[str] = settings.get("warnings", ())
    if json:
        print_out(json_line(settings))
    else:
        width = max(map(len, settings))
        shown = {k: v for k, v in settings.items() if k != "warnings"}
        print_out(
            "\n".join(
                f"{printable(name):<{width}}  {printable(str(value))}"
                for name, value in shown.items()
            )
        )
    for each in warnings:
        remark(f"warning: {each}")
