"""Run ``counter hold``, ``holds``, ``settle``, ``release`` and ``extend``."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Annotated, Final, TypeVar

from counter.cli.client import (
    DEFAULT_SERVICE,
    EXIT_UNKNOWN,
    NO_BOUND_FLAGS,
    BoundFlags,
    ServiceFlags,
    delta_of,
    exit_codes,
    fail,
    fields_of,
    open_client,
    why_unknown,
)
from counter.cli.commands.counters import NO_CREDENTIAL, CredentialFlags, Name, send_once
from counter.cli.terminal import (
    EXIT_INTERRUPTED,
    JsonLines,
    flag,
    instant,
    json_line,
    print_answer,
    print_out,
    remark,
    second,
    table,
)
from counter.errors import StartupError
from counter_client import CounterClient, HoldState, UnknownOutcomeError
from counter_client.tokens import Add, Credential, HoldId

_T = TypeVar("_T")
_Id = Annotated[str, flag("The id that counter hold has printed")]
_Lasts = Annotated[str, flag("For how long from now: 15m", "DURATION")]
#: Ends and extensions may be sent again: the answer is the first one.
_AGAIN: Final = "send the same command again: it may be repeated"


def hold(
    name: Name,
    amount: Annotated[str, flag("How much; may be negative", allow_leading_hyphen=True)],
    /,
    service: ServiceFlags = DEFAULT_SERVICE,
    bounds: BoundFlags = NO_BOUND_FLAGS,
    *,
    expires_in: _Lasts,
    which: CredentialFlags = NO_CREDENTIAL,
    json: JsonLines = False,
) -> None:
    """Reserve an amount, once."""
    with exit_codes(service):
        number = delta_of(amount, "AMOUNT")

        def send(client: CounterClient, chosen: Credential) -> HoldState:
            own = bounds.bounds._asdict()
            return client.hold(name, number, expires_in=expires_in, **own, token=chosen).began

        asked = Add(name, number, bounds.bounds)
        chosen, began = send_once(
            service, "hold", asked, which.credential(), send, expires_in, json=json
        )
        print_answer(began.id, {**_document(service, began), "token": chosen}, json=json)


def holds(
    name: Name,
    /,
    service: ServiceFlags = DEFAULT_SERVICE,
    *,
    limit: Annotated[int, flag("At most so many; 0 for all", "NUMBER")] = 100,
    json: JsonLines = False,
) -> None:
    """Print the open holds of a counter."""
    with exit_codes(service), open_client(service) as client:
        if limit < 0:
            raise StartupError(f"--limit: it is {limit}; it must be 0, for all, or more")
        found = client.holds(name)
        shown = list(islice(found, limit or None))
        if json:
            for each in shown:
                print_out(json_line(_document(service, each)))
        else:
            rows = [(_expiry(each, second), each.amount, each.id) for each in shown]
            print_out(table(("EXPIRES", "AMOUNT", "HOLD"), rows))
        if next(found, None) is not None:
            remark(f"there are more than {limit}: --limit 0 for all of them")


def settle(
    hold: _Id,
    amount: Annotated[
        str, flag("What counts: 0, or with the sign of the hold", allow_leading_hyphen=True)
    ],
    /,
    service: ServiceFlags = DEFAULT_SERVICE,
    *,
    json: JsonLines = False,
) -> None:
    """Count what the work cost, and end the hold."""
    with exit_codes(service):
        number = delta_of(amount, "AMOUNT")
        ended = _sent(service, hold, lambda client: client.settle_hold(hold, number))
        if ended.over:
            remark("that is more than was held; it counts in full")
        text = f"{ended.counter}: {number} of {ended.amount} held is counted"
        print_answer(text, _document(service, ended), json=json)


def release(
    hold: _Id, /, service: ServiceFlags = DEFAULT_SERVICE, *, json: JsonLines = False
) -> None:
    """Give all of a hold back."""
    with exit_codes(service):
        ended = _sent(service, hold, lambda client: client.release_hold(hold))
        text = f"{ended.counter}: {ended.amount} is released"
        print_answer(text, _document(service, ended), json=json)


def extend(
    hold: _Id,
    /,
    service: ServiceFlags = DEFAULT_SERVICE,
    *,
    expires_in: _Lasts,
    json: JsonLines = False,
) -> None:
    """Let a hold expire later."""
    with exit_codes(service):
        found = _sent(service, hold, lambda client: client.extend_hold(hold, expires_in))
        text = f"{found.counter}: {found.amount} is held until {_expiry(found, instant)}"
        print_answer(text, _document(service, found), json=json)


def _sent(service: ServiceFlags, hold: str, send: Callable[[CounterClient], _T]) -> _T:
    """Send what may be sent again; exit if its outcome is unknown."""
    HoldId.parse(hold)
    with open_client(service) as client:
        try:
            return send(client)
        except UnknownOutcomeError as error:
            why = why_unknown(error)
            fail(f"it is unknown whether it is done: {why}\n{_AGAIN}", EXIT_UNKNOWN)
        except KeyboardInterrupt:
            fail(f"interrupted: it may be done or not; {_AGAIN}", EXIT_INTERRUPTED)


def _expiry(hold: HoldState, text_of: Callable[..., str]) -> str:
    return "" if hold.expires_at is None else text_of(hold.expires_at)


def _document(service: ServiceFlags, hold: HoldState) -> dict[str, object]:
    found = fields_of(hold)
    return {"namespace": service.namespace, "hold": found.pop("id"), **found}
