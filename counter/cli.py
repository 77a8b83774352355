"""The command ``counter``. The one file here that may reach up to api and rollup, lazily."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from pydantic import ValidationError

app = App(
    name="counter",
    help="A distributed counter service: every acknowledged add counts exactly once.",
    help_format="plaintext",
)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFlags:
    """Flags of ``counter serve``; one that is left out is read from the environment."""

    host: Annotated[str | None, Parameter(help="The address to listen on [127.0.0.1].")] = None
    port: Annotated[int | None, Parameter(help="The port; 0 for a free one [8080].")] = None
    data: Annotated[Path | None, Parameter(help="The data directory [./data].")] = None
    retention: Annotated[
        str | None,
        Parameter(
            help="How long events are kept, and so how late a retry may be;"
            " fixed at the first start [7d]."
        ),
    ] = None
    slice: Annotated[
        str | None, Parameter(help="The span of one event table; fixed at the first start [1d].")
    ] = None
    write_timeout: Annotated[
        str | None, Parameter(help="How long a write may take; fixed at the first start [1s].")
    ] = None
    rollup_window: Annotated[
        str | None, Parameter(help="The rollup window of new namespaces [10s].")
    ] = None
    accept_limit: Annotated[
        str | None,
        Parameter(
            help="How old a token may be when its add arrives; past it, it is resolved [5s]."
        ),
    ] = None
    body_bytes_max: Annotated[int | None, Parameter(help="The largest body [1048576].")] = None
    batch_items_max: Annotated[int | None, Parameter(help="The largest batch [1000].")] = None
    request_timeout: Annotated[
        str | None, Parameter(help="How long a request may take to arrive whole [10s].")
    ] = None


@app.command
def serve(flags: ServeFlags | None = None) -> None:
    """Serve the REST API with SQLite in one process, and roll up in the background.

    Settings come from these flags, else from the environment (COUNTER_PORT, COUNTER_DATA, ...).
    Exit codes: 0 after SIGTERM or SIGINT, 2 if it cannot start.
    """
    from api.serve import serve as run
    from counter.config import Settings
    from counter.errors import CounterError, StartupError

    given = asdict(flags or ServeFlags())
    values = {name: value for name, value in given.items() if value is not None}
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
