"""Run ``counter token ...``: make and resolve tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

from counter.cli.client import (
    DEFAULT_SERVICE,
    EXIT_BOUND,
    EXIT_NO,
    EXIT_UNKNOWN,
    NO_BOUND_FLAGS,
    BoundFlags,
    ServiceFlags,
    credential_of,
    delta_of,
    exit_codes,
    fail,
    open_client,
)
from counter.cli.terminal import (
    JsonLines,
    exiting,
    flag,
    json_line,
    print_answer,
    print_error,
    print_out,
    printable,
    remark,
    signed,
)
from counter.errors import StartupError
from counter.limits import BATCH_ITEMS_MAX
from counter.tokens import format_nonce
from counter_client import CounterClient, Event, Key, Token, Unfinished
from counter_client.tokens import Add

#: What is done once its token is applied, if that is not a count.
_DONE: Final[Mapping[str, str]] = {"hold": "held", "settle": "settled", "release": "released"}
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
    bounds: BoundFlags = NO_BOUND_FLAGS,
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
                _report_open(
                    [*service.words(), *bounds.words()], token, name, credential, json=json
                )
            else:
                asked = Add(name, delta_of(delta), bounds.bounds)
                text = str(credential)
                _decide(client, Unfinished.of("add", service.namespace, [asked], text), json=json)


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
    """Report that the token is counted; exit if it was refused."""
    if refused := found[0].refused:
        remark(
            f"not counted: {signed(refused['delta'])} was refused because of a bound, for ever; the"
            f" count was {refused['count']}"
        )
        with exiting(EXIT_BOUND):
            if json:
                print_out(json_line({"applied": False, "counter": name, "refused": refused}))
    if hold := found[0].hold:
        body = {"applied": True, "counter": name, "hold": hold.id, "amount": hold.amount}
        text = f"held: {name} {signed(hold.amount)}, by {hold.id}"
        if hold.state != "begun":
            settled, held = signed(found[0].delta), signed(hold.amount)
            text = f"{hold.state}: {name} {settled}, by the end of a hold of {held}, {hold.id}"
        print_answer(text, body, json=json)
        return
    is_clear = found[0].clear
    delta = sum(each.delta for each in found)
    if json:
        whole: dict[str, Any] = {"applied": True, "counter": name}
        print_out(json_line({**whole, **({"clear": True} if is_clear else {"delta": delta})}))
    else:
        print_out(f"counted: {name} {'was cleared' if is_clear else signed(delta)}")


def _report_open(
    flags: list[str], token: str, name: str, credential: Token | Key, *, json: bool
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
    words = ["counter", "token", "resolve", *flags, *odd, token, name]
    print_error(f"{shlex.join(words)} DELTA")
    with exiting(EXIT_UNKNOWN):
        if json:
            print_out(json_line({"applied": None}))


def _decide(client: CounterClient, unfinished: Unfinished, *, json: bool) -> None:
    """Send the same request once more; return the service's answer."""
    resolved = client.resolve(unfinished)
    done = _DONE.get(unfinished.operation, "counted")
    if not resolved.applied:
        remark(f"not {done}, and it never will be: {printable(resolved.detail)}")
    with exiting(0 if resolved.applied else EXIT_NO):
        if json:
            print_out(json_line({"applied": resolved.applied}))
        elif resolved.applied:
            print_out(f"{done}: once, however often it was sent")


def _document(token: Token) -> dict[str, Any]:
    nonce, _, made = str(token).partition("@")
    return {"token": nonce, "generation_time": made, "text": str(token)}
