"""Run ``counter namespace ...``: settings as flags, checked by the service itself."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from json import loads as json_of
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter

from counter.cli.client import (
    EXIT_NO,
    NO_BOUND_FLAGS,
    BoundFlags,
    PlaceFlags,
    ServiceFlags,
    exit_codes,
    fail,
    open_client,
)
from counter.cli.terminal import (
    JsonLines,
    flag,
    json_line,
    listing,
    print_answer,
    print_error,
    print_out,
    printable,
    remark,
    table,
)
from counter.errors import StartupError
from counter_client import CounterClient
from counter_client.errors import PreconditionFailedError

#: Attempts to change settings that others change at the same time.
_ATTEMPTS_MAX: Final = 5
_Which = Annotated[str, flag("The namespace")]


@Parameter(name="*", group="Settings")
@dataclass(frozen=True, kw_only=True)
class ChangeFlags:
    """The changeable settings of a namespace; one that is left out stays as it is."""

    accept_limit: Annotated[
        str | None, flag("How old a token may be before it is resolved: 5s", "DURATION")
    ] = None
    future_limit: Annotated[
        str | None, flag("How far ahead a token's time may be: 5s", "DURATION")
    ] = None
    payload_check: Annotated[str | None, flag("off, guard or strict", "off|guard|strict")] = None
    key_ttl: Annotated[
        str | None, flag("How long an arbitrary key is remembered: 1d", "DURATION")
    ] = None
    cache_ttl: Annotated[
        str | None, flag("How long a count may come from the cache: 10s", "DURATION")
    ] = None
    requests_per_s: Annotated[
        int | None, flag("Requests per second to each process; 0 for any number", "NUMBER")
    ] = None
    adds_per_s: Annotated[int | None, flag("Adds per second, likewise", "NUMBER")] = None
    event_rules: Annotated[
        Path | None, flag("A TOML or JSON file with event_rules, which count CloudEvents", "FILE")
    ] = None


@Parameter(name="*", group="Settings")
@dataclass(frozen=True, kw_only=True)
class CreateFlags(ChangeFlags):
    """The same, and the settings that are fixed for its lifetime."""

    counter_type: Annotated[
        str, flag("accurate, eventual or best_effort; fixed, as the next are", "TYPE")
    ] = "accurate"
    dataset: Annotated[str | None, flag("The dataset, whose retention it has", "NAME")] = None
    rollup_window: Annotated[str | None, flag("The length of a rollup window: 10s", "DURATION")] = (
        None
    )
    shards: Annotated[int | None, flag("The shards that rollup workers share", "NUMBER")] = None


def create(
    name: _Which,
    /,
    settings: CreateFlags | None = None,
    bounds: BoundFlags = NO_BOUND_FLAGS,
    place: PlaceFlags | None = None,
    *,
    json: JsonLines = False,
) -> None:
    """Create a namespace."""
    service = _of(place, name)
    with exit_codes(service), open_client(service) as client:
        try:
            made = client.create_namespace(**_given(settings or CreateFlags(), bounds))
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
    bounds: BoundFlags = NO_BOUND_FLAGS,
    place: PlaceFlags | None = None,
    *,
    no_bounds: Annotated[
        bool, flag("Take the bounds away, and set only those that are given", name="--no-bounds")
    ] = False,
    json: JsonLines = False,
) -> None:
    """Change a namespace's settings."""
    service = _of(place, name)
    with exit_codes(service), open_client(service) as client:
        given = _given(settings or ChangeFlags(), bounds)
        if no_bounds:
            given.setdefault("bounds", {})
        if not given:
            raise StartupError("nothing to change: give a setting, such as --cache-ttl 5s")
        merges = "bounds" in given and not no_bounds
        changed = _merged(client, given) if merges else client.change_namespace(**given)
        _show(changed, json=json)


def list_(place: PlaceFlags | None = None, *, json: JsonLines = False) -> None:
    """Show all namespaces that the caller may see."""
    service = _of(place, ServiceFlags.namespace)
    with exit_codes(service), open_client(service) as client:
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
    with exit_codes(service), open_client(service) as client:
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
    with exit_codes(service), open_client(service) as client:
        client.namespace()
        if not yes:
            _ask(name)
        client.delete_namespace()
        print_answer(f"{name}: deleted", {"namespace": name, "deleted": True}, json=json)


def _ask(name: str) -> None:
    """Ask the user to repeat the name. Exits if it differs, or if standard input is not a
    terminal."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise StartupError("there is no terminal to confirm the name: give --yes to delete it")
    print_error(
        f"Namespace {name} is deleted with its counters, events and tokens, for ever.\n"
        "Its name, to go on: ",
        end="",
    )
    if sys.stdin.readline().strip() != name:
        fail("that is not its name; nothing was deleted", EXIT_NO)


def _merged(client: CounterClient, given: dict[str, Any]) -> dict[str, Any]:
    """Change the *given* settings, and keep the bounds that are not given, also those that are set
    meanwhile. Raises PreconditionFailedError if the namespace changes during every attempt."""
    attempt = 0
    while True:
        attempt += 1
        found = client.namespace()
        bounds = found.get("bounds", {}) | given["bounds"]
        try:
            return client.change_namespace(found.etag, **given | {"bounds": bounds})
        except PreconditionFailedError:
            if attempt == _ATTEMPTS_MAX:
                raise


def _of(place: PlaceFlags | None, name: str) -> ServiceFlags:
    return ServiceFlags(**asdict(place or PlaceFlags()), namespace=name)


def _given(settings: ChangeFlags, bounds: BoundFlags) -> dict[str, Any]:
    """Return the given settings in the API's form."""
    given = {k: v for k, v in asdict(settings).items() if v is not None}
    if "counter_type" in given:
        given["counter_type"] = given["counter_type"].upper().replace("-", "_")
    if settings.event_rules is not None:
        given["event_rules"] = _rules_in(settings.event_rules)
    if bounds != NO_BOUND_FLAGS:
        given["bounds"] = bounds.bounds.members()
    return given


def _rules_in(path: Path) -> Any:
    """Return the rules of a file, which the service checks. Raises StartupError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        document = json_of(text) if path.suffix == ".json" else tomllib.loads(text)
        return document["event_rules"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = "it has no event_rules" if isinstance(error, KeyError | TypeError) else error
        raise StartupError(
            f"--event-rules {str(path)!r}: {why}; write [[event_rules]] in TOML, or"
            ' {"event_rules": [...]} in a file whose name ends in .json'
        ) from error


def _show(settings: dict[str, Any], *, json: bool) -> None:
    warnings: Sequence[str] = settings.get("warnings", ())
    if json:
        print_out(json_line(settings))
    else:
        print_out(
            listing(
                {
                    name: json_line(value) if isinstance(value, dict | list) else value
                    for name, value in settings.items()
                    if name != "warnings"
                }
            )
        )
    for each in warnings:
        remark(f"warning: {printable(each)}")
