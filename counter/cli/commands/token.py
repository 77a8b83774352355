"""Run ``counter token ...``: make, show, derive and resolve tokens."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from counter.cli.client import (
    DEFAULT_SERVICE,
    EXIT_NO,
    EXIT_UNKNOWN,
    ServiceFlags,
    credential_of,
    delta_of,
    duration_us,
    exit_codes,
    fail,
    in_words,
    open_client,
)
from counter.cli.terminal import (
    JsonLines,
    exiting,
    flag,
    json_line,
    print_error,
    print_out,
    remark,
    signed,
)
from counter.clock import to_us
from counter.durations import format_duration, parse_duration
from counter.errors import StartupError
from counter.limits import BATCH_ITEMS_MAX, SECOND
from counter.tokens import format_nonce
from counter_client import CounterClient, Event, Key, Token, Unfinished

_Text = Annotated[str, flag("The token: <UUID>@<time>, or a UUIDv7")]


def new(
    count: Annotated[int, flag("How many")] = 1,
    /,
    service: ServiceFlags = DEFAULT_SERVICE,
    *,
    served: Annotated[
        bool,
        flag("With the service's time, for a machine whose clock is wrong", name="--served"),
    ] = False,
    json: JsonLines = False,
) -> None:
    """Make tokens."""
    with exit_codes(service):
        if not 1 <= count <= BATCH_ITEMS_MAX:
            raise StartupError(f"COUNT: it is {count}; 1 to {BATCH_ITEMS_MAX} are made at a time")
        if served:
            with open_client(service) as client:
                made = client.tokens(count)
        else:
            made = [Token.new() for _ in range(count)]
        for each in made:
            print_out(json_line(_document(each)) if json else str(each))


def show(
    token: _Text,
    /,
    service: ServiceFlags = DEFAULT_SERVICE,
    *,
    accept_limit: Annotated[
        str | None, flag("How old it may be [asks the service for the namespace's]", "DURATION")
    ] = None,
    json: JsonLines = False,
) -> None:
    """Show a token's time and age, and whether it is still accepted."""
    with exit_codes(service):
        found = _token(token)
        if accept_limit is None:
            with open_client(service) as client:
                settings = client.namespace()
                now_us = client.tokens()[0].generation_time_us
            limit_us = parse_duration(settings["accept_limit"])
        else:
            limit_us = duration_us("accept-limit", accept_limit)
            now_us = to_us(datetime.now(UTC))
        age_us = now_us - found.generation_time_us
        is_in_time = age_us <= limit_us
        if json:
            body = {**_document(found), "age_seconds": age_us / SECOND, "in_time": is_in_time}
            print_out(json_line({**body, "accept_limit": format_duration(limit_us)}))
            return
        nonce, _, made = str(found).partition("@")
        age = _age(age_us)
        ends = (
            f"in time: younger than {format_duration(limit_us)}, an add with it is counted"
            if is_in_time
            else f"late: older than {format_duration(limit_us)}; the service reports its outcome"
            " and counts nothing new"
        )
        print_out(f"nonce  {nonce}\ntime   {made}\nage    {age}\n{ends}")


def derive(
    token: Annotated[str, flag("The token, or key:<key>, of the whole work")],
    label: Annotated[str, flag("The step's name: 1 to 256 characters")],
    /,
    *,
    json: JsonLines = False,
) -> None:
    """Print the token of a step."""
    with exit_codes():
        parent = Token.parse(token)
        made = parent.derive(label)
        if json:
            body = _document(made) if isinstance(made, Token) else {"text": str(made)}
            print_out(json_line({**body, "label": label}))
        else:
            print_out(str(made))


def resolve(
    token: Annotated[str, flag("The token; or the JSON of an unfinished add of the SDK")],
    name: Annotated[str | None, flag("The counter it was sent to")] = None,
    delta: Annotated[
        str | None,
        flag(
            "The delta that was sent, to decide it if no event is found",
            allow_leading_hyphen=True,
        ),
    ] = None,
    /,
    service: ServiceFlags = DEFAULT_SERVICE,
    *,
    json: JsonLines = False,
) -> None:
    """Find the outcome of a token."""
    with exit_codes(service):
        if token.startswith("{"):
            unfinished = Unfinished.parse(token)
            service = replace(service, namespace=unfinished.namespace)
            with open_client(service) as client:
                _refuse_best_effort(client)
                _decide(client, unfinished, json=json)
            return
        if name is None:
            raise StartupError("NAME: give the counter that the token was sent to")
        with open_client(service) as client:
            credential = credential_of(token)
            _refuse_best_effort(client)
            found = [] if isinstance(credential, Key) else _found(client, name, credential)
            if found:
                _report_found(name, found, json=json)
            elif delta is None:
                _report_open(service, token, name, credential, json=json)
            else:
                items = ((name, delta_of(delta)),)
                text = str(credential)
                _decide(client, Unfinished("add", service.namespace, items, text), json=json)


def _refuse_best_effort(client: CounterClient) -> None:
    """Exit with EXIT_NO in a BEST_EFFORT namespace, where a repeated add counts again."""
    namespace = client.namespace()
    if namespace["counter_type"] == "BEST_EFFORT":
        fail(
            f"namespace {namespace['namespace']!r} is BEST_EFFORT, which keeps no"
            " tokens: their outcomes are unknown, and an add that is sent again counts again;"
            " nothing was sent",
            EXIT_NO,
        )


def _found(client: CounterClient, name: str, token: Token) -> list[Event]:
    """Return the events of *token* in the counter; an atomic add may have several."""
    start = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=token.generation_time_us)
    nonce = format_nonce(token.nonce)
    events = client.events(name, start, start + timedelta(microseconds=1))
    return [each for each in events if (each.event_time, each.event_id) == (start, nonce)]


def _report_found(name: str, found: list[Event], *, json: bool) -> None:
    """Report that the token is counted."""
    is_clear = found[0].clear
    delta = sum(each.delta for each in found)
    if json:
        body: dict[str, Any] = {"applied": True, "counter": name}
        print_out(json_line({**body, **({"clear": True} if is_clear else {"delta": delta})}))
    else:
        print_out(f"counted: {name} {'was cleared' if is_clear else signed(delta)}")


def _report_open(
    service: ServiceFlags, token: str, name: str, credential: Token | Key, *, json: bool
) -> None:
    """Report that no event is found, and nothing is decided."""
    import shlex

    what = (
        "the outcome of a key is known only by sending the same add again"
        if isinstance(credential, Key)
        else f"nothing of it is in {name} now, and an attempt in flight may still be counted"
    )
    remark(f"{what}; with the DELTA that was sent, this decides it, and counts it at most once:")
    # A name that looks like a flag comes after all flags.
    odd = ["--"] if name.startswith("-") else []
    words = ["counter", "token", "resolve", *service.words(), *odd, token, name]
    print_error(f"{shlex.join(words)} DELTA")
    with exiting(EXIT_UNKNOWN):
        if json:
            print_out(json_line({"applied": None}))


def _decide(client: CounterClient, unfinished: Unfinished, *, json: bool) -> None:
    """Send the same request once more; return the service's answer."""
    resolved = client.resolve(unfinished)
    if not resolved.applied:
        remark(f"not counted, and it never will be: {in_words(resolved.detail)}")
    with exiting(0 if resolved.applied else EXIT_NO):
        if json:
            print_out(json_line({"applied": resolved.applied}))
        elif resolved.applied:
            print_out("counted: once, however often it was sent")


def _token(text: str) -> Token:
    """Parse a token. Raises StartupError if it is a key, which contains no time."""
    found = credential_of(text)
    if isinstance(found, Key):
        raise StartupError("a key contains no time: the service reserved one for it")
    return found


def _document(token: Token) -> dict[str, Any]:
    nonce, _, made = str(token).partition("@")
    return {"token": nonce, "generation_time": made, "text": str(token)}


def _age(age_us: int) -> str:
    """Format an age for people."""
    if age_us < 0:
        return f"{_age(-age_us)} ahead of the service"
    if age_us < 60 * SECOND:
        return f"{age_us / SECOND:.3g} s"
    return str(timedelta(seconds=age_us // SECOND))
