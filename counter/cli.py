"""The command ``counter``. The one file here that may reach up to api and rollup, lazily."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from pydantic import ValidationError

app = App(
    name="counter",
    help="A distributed counter service: every acknowledged add counts exactly once.",
    help_format="plaintext",
)


@app.command
def serve(
    *,
    host: str | None = None,
    port: int | None = None,
    data: Path | None = None,
    rollup: bool | None = None,
    retention: str | None = None,
    slice_: Annotated[str | None, Parameter(name="--slice")] = None,
    write_timeout: str | None = None,
    rollup_window: str | None = None,
    accept_limit: str | None = None,
    body_bytes_max: int | None = None,
    batch_items_max: int | None = None,
    request_timeout: str | None = None,
) -> None:
    """Serve the REST API with SQLite in one process, and roll up in the background.

    Settings come from these flags, else from the environment (COUNTER_PORT, COUNTER_DATA, ...).
    Exit codes: 0 after SIGTERM or SIGINT, 2 if it cannot start.

    Parameters
    ----------
    host
        The address to listen on [127.0.0.1].
    port
        The port to listen on, 0 for a free one [8080].
    data
        The data directory [./data].
    rollup
        Roll up in this process [yes].
    retention
        How long events are kept, and so how late a retry may be; fixed at the first start [7d].
    slice_
        The span of one event table; fixed at the first start [1d].
    write_timeout
        How long a write may take; fixed at the first start [1s].
    rollup_window
        The rollup window of the namespace "default" and of new ones [10s].
    accept_limit
        How old a token may be when its add arrives, before it is resolved instead [5s].
    body_bytes_max
        The largest body [1048576].
    batch_items_max
        The largest batch [1000].
    request_timeout
        How long a request may take to arrive whole [10s].
    """
    given = {
        "host": host,
        "port": port,
        "data": data,
        "rollup": rollup,
        "retention": retention,
        "slice": slice_,
        "write_timeout": write_timeout,
        "rollup_window": rollup_window,
        "accept_limit": accept_limit,
        "body_bytes_max": body_bytes_max,
        "batch_items_max": batch_items_max,
        "request_timeout": request_timeout,
    }
    from api.serve import serve as run  # noqa: PLC0415
    from counter.config import Settings  # noqa: PLC0415
    from counter.errors import CounterError, StartupError  # noqa: PLC0415

    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    try:
        run(Settings(**values))
    except ValidationError as error:
        _fail("; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()))
    except StartupError as error:
        _fail(str(error))
    except CounterError as error:
        _fail(error.detail)


def _fail(message: str) -> None:
    print(f"counter: {message}", file=sys.stderr)
    raise SystemExit(2)


def main() -> None:
    """The entry point of the command."""
    app()
