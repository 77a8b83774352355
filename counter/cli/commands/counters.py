"""Run ``counter add``, ``cancel``, ``get``, ``list``, ``clear``, ``delete`` and ``recount``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Annotated, Any, Final, Literal, TypeVar, cast

from cyclopts import Parameter

from counter.cli.add_stream import add_lines
from counter.cli.client import (
    DEFAULT_SERVICE,
    EXIT_NOT_DONE,
    EXIT_UNKNOWN,
    NO_BOUND_FLAGS,
    Attempts,
    BoundFlags,
    ServiceFlags,
    credential_of,
    delta_of,
    duration_us,
    exit_codes,
    explain,
    fail,
    fields_of,
    finishing,
    open_client,
    options_of,
    report_unfinished,
    why_unknown,
)
from counter.cli.terminal import (
    EXIT_INTERRUPTED,
    From,
    JsonLines,
    Moment,
    TimeZone,
    To,
    exiting,
    flag,
    json_line,
    print_answer,
    print_error,
    print_out,
    remark,
    span_of,
    table,
)
from counter.errors import StartupError
from counter.limits import BATCH_ITEMS_MAX
from counter.quantities import plural
from counter_client import Added, AddedCount, CounterClient, Key, Token, UnknownOutcomeError
from counter_client.errors import CounterError, TokenTooOldError
from counter_client.failures import Unfinished
from counter_client.tokens import Add, Credential, checked_name

_T = TypeVar("_T")
Name = Annotated[str, flag("The counter; after -- if it begins with a dash")]
_Delta = Annotated[str, flag("How much to add; may be negative", allow_leading_hyphen=True)]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CredentialFlags:
    """The token or the key of a write."""

    token: Annotated[
        str | None, flag("An earlier attempt's token, to finish it [a new one]", "TOKEN")
    ] = None
    key: Annotated[
        str | None, flag("An existing id, such as order-123, instead of a token", "KEY")
    ] = None

    def credential(self) -> Credential | None:
        """Return the one that is given. Raises StartupError, and InvalidParameterError."""
        if self.token is not None and self.key is not None:
            raise StartupError(
                "--token and --key are both given: give one, because each identifies another add"
            )
        if self.key is not None:
            return Key.of(self.key)
        return None if self.token is None else credential_of(self.token)


#: No token and no key.
NO_CREDENTIAL: Final = CredentialFlags()


def add(
    name: Name | None = None,
    delta: _Delta | None = None,
    /,
    service: ServiceFlags = DEFAULT_SERVICE,
    bounds: BoundFlags = NO_BOUND_FLAGS,
    *,
    stream: Annotated[bool, flag("Add each line of a pipe: NAME, or NAME DELTA")] = False,
    get: Annotated[bool, flag("Print the count with it")] = False,
    which: CredentialFlags = NO_CREDENTIAL,
    json: JsonLines = False,
) -> None:
    """Add, once."""
    with exit_codes(service):
        if stream:
            if name is not None or get or which != NO_CREDENTIAL or json:
                raise StartupError("--stream: it takes no NAME, --get, --token, --key or --json")
            add_lines(service, bounds.bounds)
            return
        if name is None:
            raise StartupError("NAME is missing: give the name of a counter, or --stream")
        number = delta_of("1" if delta is None else delta)
        given = which.credential()
        operation = "add-and-get" if get else "add"

        def send(client: CounterClient, chosen: Credential) -> Added:
            call = client.add_and_get if get else client.add
            return call(name, number, **bounds.bounds._asdict(), token=chosen)

        asked = Add(name, number, bounds.bounds)
        chosen, added = send_once(service, operation, asked, given, send, json=json)
        if json:
            print_out(json_line({"namespace": service.namespace, **asdict(added), "token": chosen}))
        elif isinstance(added, AddedCount):
            print_out(str(added.count))
            if added.replayed:
                remark(f"{number} was counted before, and is not again")
        elif added.replayed:
            print_out(f"{name}: {number} was counted before, and is not again")
        else:
            print_out(f"{name}: {number} added")
        _warn(added, service)


def clear(
    name: Name,
    /,
    service: ServiceFlags = DEFAULT_SERVICE,
    *,
    which: CredentialFlags = NO_CREDENTIAL,
    json: JsonLines = False,
) -> None:
    """Set to 0, once."""
    with exit_codes(service):
        _end(service, "clear", name, which.credential(), "cleared", json=json)


def delete(
    name: Name,
    /,
    service: ServiceFlags = DEFAULT_SERVICE,
    *,
    yes: Annotated[bool, flag("Do not ask")] = False,
    which: CredentialFlags = NO_CREDENTIAL,
    json: JsonLines = False,
) -> None:
    """Delete, once."""
    with exit_codes(service):
        given = which.credential()
        checked_name(name)
        # A shell may have closed it.
        if not yes and sys.stdin is not None and sys.stdin.isatty():
            print_error(f"{name} is set to 0, and listed no more. To go on, y: ", end="")
            if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                fail("nothing was deleted", EXIT_NOT_DONE)
        _end(service, "delete", name, given, "deleted", json=json)


def _end(
    service: ServiceFlags,
    operation: str,
    name: str,
    given: Credential | None,
    done: str,
    *,
    json: bool,
) -> None:
    """Clear or delete a counter, and print that it is *done*."""
    chosen, answer = send_once(
        service,
        operation,
        Add(name, 0),
        given,
        lambda client, chosen: getattr(client, operation)(name, token=chosen),
        json=json,
    )
    if json:
        print_out(json_line({"namespace": service.namespace, **asdict(answer), "token": chosen}))
    else:
        print_out(f"{name}: {f'was {done} before' if answer.replayed else done}")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SentFlags:
    """What a token that is cancelled was sent with."""

    operation: Annotated[
        Literal["add", "clear", "delete", "hold"], flag("What the token was sent with")
    ] = "add"
    expires_in: Annotated[str | None, flag("That of the hold", "DURATION")] = None

    def number(self, delta: str | None) -> int:
        """Return the delta, or the amount of a hold, of the words that are given. Raises
        StartupError."""
        if self.operation in ("clear", "delete") and delta is not None:
            raise StartupError(f"DELTA: a {self.operation} has none: leave it out")
        is_hold = self.operation == "hold"
        if is_hold and (delta is None or self.expires_in is None):
            raise StartupError(
                "a hold has an amount and --expires-in: give both, as they were sent"
            )
        if not is_hold and self.expires_in is not None:
            raise StartupError("--expires-in: only a hold has it: add --operation hold")
        return delta_of("1" if delta is None else delta)


_AN_ADD: Final = SentFlags()


def cancel(
    name: Name,
    delta: Annotated[
        str | None,
        flag("The delta of the add [1], or the amount of the hold", allow_leading_hyphen=True),
    ] = None,
    /,
    service: ServiceFlags = DEFAULT_SERVICE,
    bounds: BoundFlags = NO_BOUND_FLAGS,
    *,
    sent: SentFlags = _AN_ADD,
    token: Annotated[str | None, flag("The token to cancel", "TOKEN")] = None,
    key: Annotated[str | None, flag("Or the key, such as order-123", "KEY")] = None,
    json: JsonLines = False,
) -> None:
    """Cancel an add, a clear, a delete or a hold."""
    with exit_codes(service):
        given = CredentialFlags(token=token, key=key).credential()
        if given is None:
            raise StartupError("--token is missing: give the token or the --key of what to cancel")
        number, operation = sent.number(delta), sent.operation
        what = str(number) if operation == "add" else f"the {operation}"
        again = "send the same command again: a cancel may be repeated"
        own = bounds.bounds._asdict()
        with open_client(service) as client:
            try:
                if operation == "hold":
                    lasts = sent.expires_in or ""
                    answer = client.cancel_hold(name, number, expires_in=lasts, **own, token=given)
                else:
                    answer = client.cancel(name, number, operation=operation, **own, token=given)
            except UnknownOutcomeError as error:
                fail(
                    f"it is unknown whether it is cancelled: {why_unknown(error)}\n{again}",
                    EXIT_UNKNOWN,
                )
            except KeyboardInterrupt:
                fail(f"interrupted: it may be cancelled or not; {again}", EXIT_INTERRUPTED)
        was = "was" if answer.was_counted else "was not"
        done = "begun" if operation == "hold" else "counted"
        body = {
            "namespace": service.namespace,
            "counter": name,
            **asdict(answer),
            "token": str(given),
        }
        print_answer(f"{name}: {what} {was} {done}, and is cancelled", body, json=json)


def _warn(added: Added, service: ServiceFlags) -> None:
    """Warn if a token has no effect."""
    if not added.retry_safe:
        remark(
            f"namespace {service.namespace!r} is BEST_EFFORT: a retry counts again, and an add may"
            " be lost"
        )


def send_once(
    service: ServiceFlags,
    operation: str,
    asked: Add,
    given: Credential | None,
    send: Callable[[CounterClient, Credential], _T],
    expires_in: str | None = None,
    *,
    json: bool,
) -> tuple[str, _T]:
    """Send with *given*, or with a token that is made before anything is sent; return it and the
    answer.

    If the outcome is unknown, the command that determines it is printed. Only a hold *expires_in*.
    """
    checked_name(asked.counter)
    chosen: Credential = given or Token.new()

    def unfinished() -> Unfinished:
        return Unfinished.of(operation, service.namespace, [asked], str(chosen), expires_in)

    attempts = Attempts(service.timeout)
    with open_client(service, options_of(service, attempts)) as client:
        try:
            try:
                return str(chosen), send(client, chosen)
            except TokenTooOldError as error:
                if given is not None or error.applied is not False:
                    raise
                # The token was just made: so this clock is wrong.
                remark("this machine's clock is behind the service's: its time is taken instead")
                chosen = client.tokens()[0]
                return str(chosen), send(client, chosen)
        except UnknownOutcomeError as error:
            if given is None and not error.sent:
                cause = error.__cause__
                why = explain(cause, service) if isinstance(cause, CounterError) else error.detail
                fail(f"{why}\nnothing was sent: it is not counted", EXIT_NOT_DONE)
            report_unfinished(unfinished(), service, why=why_unknown(error))
            if json:
                with exiting(EXIT_UNKNOWN):
                    print_out(json_line(_unknown(unfinished(), service)))
            raise SystemExit(EXIT_UNKNOWN) from None
        except KeyboardInterrupt:
            if given is None and not attempts.may_be_sent:
                fail("interrupted; nothing was sent: it is not counted", EXIT_INTERRUPTED)
            report_unfinished(unfinished(), service, why="it was interrupted")
            raise SystemExit(EXIT_INTERRUPTED) from None


def _unknown(unfinished: Unfinished, service: ServiceFlags) -> dict[str, Any]:
    [(counter, delta, bounds)] = unfinished.adds
    return {
        "namespace": unfinished.namespace,
        "counter": counter,
        **_sent_with(unfinished, delta),
        **bounds.members(),
        "applied": None,
        "token": unfinished.token_text,
        "finish": finishing(unfinished, service),
    }


def _sent_with(unfinished: Unfinished, delta: int) -> dict[str, Any]:
    if unfinished.operation == "hold":
        return {"amount": delta, "expires_in": unfinished.expires_in}
    return {} if unfinished.operation in ("clear", "delete") else {"delta": delta}


#: Counters per request: the default limit of a service.
_AT_ONCE: Final = BATCH_ITEMS_MAX


def get(
    *names: Annotated[str, flag("The counters; after -- if one begins with a dash")],
    service: ServiceFlags = DEFAULT_SERVICE,
    max_staleness: Annotated[
        str | None, flag("How old a count may be: 5s; 0s for none [the namespace's]", "DURATION")
    ] = None,
    start: From = None,
    end: To = None,
    tz: TimeZone = None,
    json: JsonLines = False,
) -> None:
    """Print counts, or how much one changed in a span of time."""
    with exit_codes(service), open_client(service) as client:
        if not names:
            raise StartupError("NAME is missing: give the name of a counter, or of several")
        if start is not None or end is not None or tz is not None:
            if len(names) > 1 or start is None or max_staleness is not None:
                raise StartupError(
                    "--to, --tz: a span of time needs --from, one NAME, and no --max-staleness"
                )
            since, until = span_of(start, end, _window_us(client))
            change = client.between(names[0], cast(Moment, since), until, tz=tz)
            print_answer(
                str(change.delta), {"namespace": service.namespace, **asdict(change)}, json=json
            )
            return
        if len(names) == 1:
            counts = [client.get(names[0], max_staleness=max_staleness)]
        else:
            counts = []
            for at in range(0, len(names), _AT_ONCE):
                some = names[at : at + _AT_ONCE]
                counts += client.get_many(some, max_staleness=max_staleness)
        if json:
            for each in counts:
                print_out(json_line({"namespace": service.namespace, **fields_of(each)}))
        elif len(counts) == 1:
            print_out(str(counts[0].count))
            if held := " and ".join(
                str(each) for each in (counts[0].held, counts[0].held_down) if each
            ):
                remark(f"beside it, open holds reserve {held}")
        else:
            print_out(table(("COUNTER", "COUNT"), [(each.counter, each.count) for each in counts]))


def _window_us(client: CounterClient) -> int:
    """Return the length of the windows of the namespace: how long ago is rounded to their ends."""
    return duration_us("rollup_window", client.namespace()["rollup_window"])


def list_(
    prefix: Annotated[str | None, flag("What the names begin with", "PREFIX")] = None,
    /,
    service: ServiceFlags = DEFAULT_SERVICE,
    *,
    by: Annotated[str, flag("name; or count, the largest first", "name|count")] = "name",
    limit: Annotated[int, flag("At most so many counters; 0 for all", "NUMBER")] = 100,
    max_staleness: Annotated[
        str, flag("How old a count may be; a long time for what is rolled up", "DURATION")
    ] = "0s",
    total: Annotated[bool, flag("Print only the sum of all of them", name="--sum")] = False,
    json: JsonLines = False,
) -> None:
    """Print counters with their counts."""
    with exit_codes(service), open_client(service) as client:
        if total:
            summed = client.sum(prefix, max_staleness=max_staleness)
            print_answer(
                str(summed.count), {"namespace": service.namespace, **asdict(summed)}, json=json
            )
            return
        if by not in ("name", "count"):
            raise StartupError(f"--by: {by[:40]!r} is neither name nor count")
        if limit < 0:
            raise StartupError(f"--limit: it is {limit}; it must be 0, for all, or more")
        counts = client.counts(
            prefix,
            largest_first=by == "count",
            max_staleness=max_staleness,
            limit=limit + 1 if limit else None,
        )
        found = list(islice(counts, limit or None))
        if json:
            for each in found:
                print_out(json_line({"namespace": service.namespace, **fields_of(each)}))
        else:
            print_out(table(("COUNTER", "COUNT"), [(each.counter, each.count) for each in found]))
        if next(counts, None) is not None:
            remark(f"there are more than {limit}: --limit 0 for all of them")


def recount(
    name: Name,
    /,
    service: ServiceFlags = DEFAULT_SERVICE,
    *,
    json: JsonLines = False,
) -> None:
    """Recount a counter from its events."""
    with exit_codes(service), open_client(service) as client:
        windows = client.recount(name)
        text = f"nothing of {name!r} is rolled up: its count is the sum of its events already"
        if windows:
            text = (
                f"{plural(windows, 'window')} of {name!r} will be recounted from the events, when"
                " the current window is closed"
            )
        print_answer(text, {"counter": name, "windows": windows}, json=json)
