"""Run ``counter watch`` and ``counter top``, which show how counts change now."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import asdict
from typing import Annotated, Final

from counter.cli.client import (
    DEFAULT_SERVICE,
    ServiceFlags,
    duration_us,
    exit_codes,
    key_of,
    open_client,
    options_of,
    urls_of,
)
from counter.cli.commands.counters import Name
from counter.cli.terminal import (
    JsonLines,
    flag,
    instant,
    json_line,
    print_out,
    printable,
    remark,
    second,
    signed,
    table,
)
from counter.errors import StartupError
from counter.limits import SECOND
from counter.quantities import format_number
from counter_client import AsyncCounterClient, Count, CounterError
from counter_client.errors import UnavailableError

_BUSY_MAX: Final = 100


def watch(
    name: Name,
    /,
    service: ServiceFlags = DEFAULT_SERVICE,
    *,
    lasting: Annotated[
        str | None, flag("The duration: 30s [until Ctrl-C]", "DURATION", name="--for")
    ] = None,
    count: Annotated[
        int | None, flag("The number of counts, including the first one [any]", "NUMBER")
    ] = None,
    json: JsonLines = False,
) -> None:
    """Print a line for each change of a count."""
    with exit_codes(service):
        lasting_s = None if lasting is None else duration_us("for", lasting) / SECOND
        if count is not None and count < 1:
            raise StartupError(f"--count: it is {count}; it must be 1 or more")
        with suppress(TimeoutError):
            asyncio.run(_print_changes(service, name, count, lasting_s, json=json))


async def _print_changes(
    service: ServiceFlags, name: str, left: int | None, lasting_s: float | None, *, json: bool
) -> None:
    """Print the first count, and each that differs from the one before, until *left* are printed.

    Raises TimeoutError after *lasting_s*, and the errors of :func:`_counts`.
    """
    before: int | None = None
    async with asyncio.timeout(lasting_s), aclosing(_counts(service, name)) as counts:
        async for each in counts:
            change = 0 if before is None else each.count - before
            if before is not None and not change:
                continue
            before = each.count
            if json:
                print_out(json_line({**asdict(each), "change": change}))
            else:
                print_out(f"{instant(each.as_of)}  {each.count}  {signed(change)}")
            if left is not None:
                left -= 1
                if left == 0:
                    return


async def _counts(service: ServiceFlags, name: str) -> AsyncGenerator[Count]:
    """Yield the counts of *name* as the service sends them; wait for the end of an outage after
    the first one.

    Raises the CounterError of a permanent failure, or if the service cannot be reached at first.
    """
    trouble = ""
    options, key = options_of(service), key_of(service)
    async with AsyncCounterClient(
        urls_of(service), service.namespace, api_key=key, options=options
    ) as client:
        is_begun = False
        while True:
            try:
                async with aclosing(client.live(name)) as stream:
                    async for update in stream:
                        if isinstance(update, CounterError):
                            trouble = _remarked(update, trouble)
                            continue
                        is_begun, trouble = True, ""
                        yield update
            except UnavailableError as error:
                # A permanent failure would be requested again at once.
                if not is_begun or error.retry == "never":
                    raise
                trouble = _remarked(error, trouble)


def _remarked(error: CounterError, known: str) -> str:
    """Report once why the count is unknown; return the current trouble."""
    if error.detail != known:
        remark(f"{printable(error.detail)}; still trying")
    return error.detail


def top(
    service: ServiceFlags = DEFAULT_SERVICE,
    *,
    limit: Annotated[int, flag("How many counters: 1 to 100", "NUMBER")] = 10,
    span: Annotated[str, flag("The span of time of the adds: 1s to 1m", "DURATION")] = "10s",
    json: JsonLines = False,
) -> None:
    """Show the counters with the most adds recently."""
    with exit_codes(service), open_client(service) as client:
        if not 1 <= limit <= _BUSY_MAX:
            raise StartupError(f"--limit: it is {limit}; it must be from 1 to {_BUSY_MAX}")
        found = client.busiest(limit, span=span)
        if json:
            print_out(json_line(asdict(found)))
            return
        span_s = format_number((found.as_of - found.since).total_seconds())
        period = f"{span_s} s until {second(found.as_of)}"
        rows = [(each.counter, f"{each.adds_per_s:.1f}", each.count) for each in found.counters]
        if rows:
            print_out(table(("COUNTER", "ADDS/S", "COUNT"), rows))
        print_out(f"adds a second, over {period}" if rows else f"nothing was added in the {period}")
        if not found.complete:
            remark("more counters changed than were examined: busier ones may be missing")
