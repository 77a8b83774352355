"""The command ``counter``. The one file here that may reach up to api and rollup, lazily."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Annotated, Final, NoReturn

from cyclopts import App, Parameter

from counter.config import Settings
from counter.config_report import Loaded, effective, load, toml_value
from counter.errors import CounterError, StartupError

#: What a command that cannot start, or whose settings are wrong, ends with.
EXIT_CANNOT_START: Final = 2
_LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"

app = App(
    name="counter",
    help="A distributed counter service: every acknowledged add counts exactly once.",
    help_format="plaintext",
    version=lambda: metadata.version("distributed-counter"),
)
schema = App(name="schema", help="The tables that Cassandra holds.")
config = App(name="config", help="The settings.")
plan = App(name="plan", help="How much of everything it takes: tokens, events, a cluster.")
app.command(schema)
app.command(config)
app.command(plan)
# Imported only when one of them is run, so what they do is told here.
_PLANNED: Final = (
    "\n\nExit codes: 0, with warnings too; 2 if a value cannot be read or is past its bound."
)
plan.command("counter.cli_plan:dedup", help=f"Plan what knows a repeated token again.{_PLANNED}")
plan.command("counter.cli_plan:storage", help=f"Plan how one counter's events are cut.{_PLANNED}")
plan.command("counter.cli_plan:cluster", help=f"Plan nodes, servers and processes.{_PLANNED}")


def _is(name: str) -> Parameter:
    """The flag of the setting *name*: what it is for, and its default where there is one."""
    field = Settings.model_fields[name]
    given = None if field.default_factory else field.default
    default = "" if given in (None, ()) else toml_value(name, given).strip('"')
    return Parameter(help=(field.description or "") + (f" [{default}]." if default else "."))


_Text = str | None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class StoreFlags:
    """Where counts are kept; a flag that is left out is read from elsewhere."""

    config: Annotated[_Text, _is("config")] = None
    log_level: Annotated[_Text, _is("log_level")] = None
    store: Annotated[_Text, _is("store")] = None
    data: Annotated[_Text, _is("data")] = None
    contact_points: Annotated[_Text, _is("contact_points")] = None
    local_datacenter: Annotated[_Text, _is("local_datacenter")] = None
    keyspace: Annotated[_Text, _is("keyspace")] = None
    cassandra_username: Annotated[_Text, _is("cassandra_username")] = None
    cassandra_password_file: Annotated[_Text, _is("cassandra_password_file")] = None
    tls_ca: Annotated[_Text, _is("tls_ca")] = None
    tls_cert: Annotated[_Text, _is("tls_cert")] = None
    tls_key: Annotated[_Text, _is("tls_key")] = None
    start_timeout: Annotated[_Text, _is("start_timeout")] = None
    retention: Annotated[_Text, _is("retention")] = None
    slice: Annotated[_Text, _is("slice")] = None
    write_timeout: Annotated[_Text, _is("write_timeout")] = None
    clock_skew_max: Annotated[_Text, _is("clock_skew_max")] = None
    time_bucket: Annotated[_Text, _is("time_bucket")] = None
    event_buckets: Annotated[_Text, _is("event_buckets")] = None
    replication: Annotated[_Text, _is("replication")] = None
    write_consistency: Annotated[_Text, _is("write_consistency")] = None
    read_consistency: Annotated[_Text, _is("read_consistency")] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RollupFlags(StoreFlags):
    """What every process that counts needs besides."""

    cache: Annotated[_Text, _is("cache")] = None
    cache_timeout: Annotated[_Text, _is("cache_timeout")] = None
    cache_entries_max: Annotated[_Text, _is("cache_entries_max")] = None
    host: Annotated[_Text, _is("host")] = None
    metrics_port: Annotated[_Text, _is("metrics_port")] = None
    lease_time: Annotated[_Text, _is("lease_time")] = None
    rollup_concurrency: Annotated[_Text, _is("rollup_concurrency")] = None
    drain_timeout: Annotated[_Text, _is("drain_timeout")] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServeFlags(RollupFlags):
    """What a process that serves needs besides."""

    port: Annotated[_Text, _is("port")] = None
    workers: Annotated[_Text, _is("workers")] = None
    rollup: Annotated[bool | None, _is("rollup")] = None
    rollup_window: Annotated[_Text, _is("rollup_window")] = None
    accept_limit: Annotated[_Text, _is("accept_limit")] = None
    shards: Annotated[_Text, _is("shards")] = None
    payload_check: Annotated[_Text, _is("payload_check")] = None
    body_bytes_max: Annotated[_Text, _is("body_bytes_max")] = None
    batch_items_max: Annotated[_Text, _is("batch_items_max")] = None
    request_timeout: Annotated[_Text, _is("request_timeout")] = None


@app.command
def serve(flags: ServeFlags | None = None) -> None:
    """Serve the REST API: with SQLite in one process, or over Cassandra in as many as you like.

    Settings come from these flags, else from the environment (COUNTER_PORT, COUNTER_DATA, ...),
    else from a TOML file (--config, or ./counter.toml). Exit codes: 0 after SIGTERM or SIGINT, 2 if
    it cannot start.
    """
    from api.serve import serve as run

    with told():
        run(_ready(flags).settings)


@app.command
def rollup(flags: RollupFlags | None = None) -> None:
    """Roll up what API processes wrote to Cassandra; any number of these share the work.

    Exit codes: 0 after SIGTERM or SIGINT, 1 if it could not end in order, 2 if it cannot start.
    """
    with told():
        settings = _ready(flags).settings
        if settings.store == "sqlite":
            raise StartupError(
                "store is sqlite, whose data directory one process holds: `counter serve` rolls up"
                " in its own; give --store cassandra"
            )
        from rollup.process import run

        raise SystemExit(run(settings))


@schema.command
def apply(flags: StoreFlags | None = None) -> None:
    """Create what Cassandra must hold, or bring it up to date; safe to repeat, many at once too.

    Exit codes: 0 if all is there, 2 if it cannot be done.
    """
    with told():
        settings = _ready(flags).settings
        if settings.store == "sqlite":
            print(f"SQLite needs no schema to be applied: {settings.data} is made at the start")
            return
        from counter.storage.cassandra.schema import apply_schema

        for line in asyncio.run(apply_schema(settings)):
            print(line)


@config.command
def check(flags: ServeFlags | None = None) -> None:
    """Print the settings that a process would have, in TOML, and where each comes from.

    Exit codes: 0 if they are right, 2 with every error if not.
    """
    with told():
        print(effective(load(_given(flags))), end="")


def _given(flags: StoreFlags | None) -> dict[str, str]:
    return {} if flags is None else {k: v for k, v in asdict(flags).items() if v is not None}


def _ready(flags: StoreFlags | None) -> Loaded:
    """The settings, with logging set up by them. Raises StartupError."""
    loaded = load(_given(flags))
    log_to_stderr(loaded.settings)
    for each in loaded.warnings:
        logging.getLogger("counter.config").warning("%s", each)
    return loaded


def log_to_stderr(settings: Settings) -> None:
    """Have what is logged written to standard error, from the level of *settings* on; of what
    libraries log, warnings."""
    logging.basicConfig(format=_LOG_FORMAT, level=logging.WARNING)
    logging.getLogger("counter").setLevel(settings.log_level.upper())


@contextmanager
def told() -> Iterator[None]:
    """End with EXIT_CANNOT_START where something cannot start, having said why."""
    try:
        yield
    except StartupError as error:
        _fail(str(error))
    except CounterError as error:
        _fail(error.detail)


def tell(text: str, warnings: Iterable[str] = ()) -> None:
    """Print *text*, and then *warnings* to standard error."""
    print(text, flush=True)
    for each in warnings:
        print(f"counter: warning: {each}", file=sys.stderr)


def _fail(message: str) -> NoReturn:
    for line in message.splitlines():
        print(f"counter: {line}", file=sys.stderr)
    raise SystemExit(EXIT_CANNOT_START)


def main() -> None:
    """The entry point of the command."""
    app()
