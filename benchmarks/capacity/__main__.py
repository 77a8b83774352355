"""The command line of ``scripts/capacity``: measures this machine, and prints its rates.

Exits with 1 if a count is wrong or no work was done, 2 if its flags are wrong, 130 if interrupted.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, cast

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from benchmarks.capacity.measure import COUNTERS, EMBEDDED, Figure, Run, measure
from benchmarks.harness import BenchError
from counter.cli.commands.backup import ending_in_order
from counter.cli.flags import STORE, StoreFlags, given
from counter.cli.terminal import EXIT_INTERRUPTED, exit_on_error, print_out, remark
from counter.clock import SystemClock, to_rfc3339
from counter.config.report import is_secret, load, toml_value
from counter.config.settings import Settings
from counter.errors import StartupError
from counter.storage.sqlite.settings import SqliteSettings

EXIT_WRONG: Final = 1
_SECONDS_MAX: Final = 3_600
_CONNECTIONS_MAX: Final = 1_024
_COUNTERS_MAX: Final = 1_000_000
_PREFIX: Final = "COUNTER_"
_NAMES: Final[Mapping[str, str]] = {
    "batch_adds": "adds, 1,000 a batch",
    "api_adds": "single adds",
    "api_gets": "gets of cached counts",
    "cache_keys": "keys of one memcached",
    "node_adds": "events a Cassandra node",
    "node_copies": "copies of events a Cassandra node",
    "worker_rollups": "counters rolled up by a worker",
    "event_bytes": "bytes of disk an event, in total",
}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class BenchFlags:
    """How long and how hard."""

    cache: Annotated[str | None, Parameter(help="As for counter serve.")] = None
    seconds: Annotated[float, Parameter(help="How long all loads take together.")] = 10.0
    connections: Annotated[int, Parameter(help="Connections of single adds and gets.")] = 64
    counters: Annotated[int, Parameter(help="How many counters are added to.")] = COUNTERS
    key_file: Annotated[
        Path | None, Parameter(help="A file with an API key of scope admin, where keys are asked.")
    ] = None
    json: Annotated[bool, Parameter(help="Print JSON.", negative="")] = False


def bench(flags: BenchFlags | None = None, store: StoreFlags | None = None) -> None:
    """Measure this machine; nothing is left behind."""
    flags = flags or BenchFlags()
    with exit_on_error(), ending_in_order():
        _check(flags)
        cache = {} if flags.cache is None else {"cache": flags.cache}
        settings = load(given(store) | cache).settings
        folder = _folder(settings)
        try:
            # A spinner, if standard error is a terminal.
            with Console(stderr=True).status("starting") as status:
                run = Run(
                    settings,
                    folder,
                    *_process(settings, folder),
                    seconds=flags.seconds,
                    connections=flags.connections,
                    counters=flags.counters,
                    api_key=_key(flags.key_file),
                    progress=lambda what: status.update(_NAMES.get(what, what)),
                )
                measure(run)
        except BenchError as error:
            remark(str(error))
            raise SystemExit(EXIT_WRONG) from None
        except KeyboardInterrupt:
            remark("interrupted; nothing is left")
            raise SystemExit(EXIT_INTERRUPTED) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print_out(json.dumps(_report(run)) if flags.json else _text(run))


def _check(flags: BenchFlags) -> None:
    """Raises StartupError with the first value past its bound."""
    for name, least, most in (
        ("seconds", 1, _SECONDS_MAX),
        ("connections", 1, _CONNECTIONS_MAX),
        ("counters", 1, _COUNTERS_MAX),
    ):
        value = getattr(flags, name)
        if not least <= value <= most:
            raise StartupError(f"--{name} is {value:g}; it must be from {least} to {most:,}")


def _folder(settings: Settings) -> Path:
    """A directory of our own beside the data, because a disk is part of the measurement."""
    is_sqlite = settings.store == "sqlite"
    beside = cast(SqliteSettings, settings).data.absolute().parent if is_sqlite else None
    try:
        return Path(tempfile.mkdtemp(prefix="counter-bench-", dir=beside))
    except OSError as error:
        raise StartupError(f"no temporary directory can be made: {error}; see --data") from error


def _process(settings: Settings, folder: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    """Environment and flags of the processes that are measured: of the settings those that say
    where the store is, and no others, such as limits of requests."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(_PREFIX)}
    if settings.store == "sqlite":
        return env, (*EMBEDDED, f"--data={folder / 'data'}")
    names = {*STORE} - {"config"} | {"cache"}
    lines = []
    for name in sorted(names & settings.model_fields_set):
        value = getattr(settings, name)
        if isinstance(value, Path):
            value = value.absolute()
        if value is not None:
            lines.append(f"{name} = {toml_value(name, value)}\n")
    config = folder / "bench.toml"
    config.write_text("".join(lines), encoding="utf-8")
    for name in filter(is_secret, settings.model_fields_set):
        env[f"{_PREFIX}{name.upper()}"] = getattr(settings, name).get_secret_value()
    return env, (f"--config={config}",)


def _key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError) as error:
        raise StartupError(f"--key-file: {str(path)!r} cannot be read: {error}") from error


def _report(run: Run) -> dict[str, Any]:
    """Return the figures, with their conditions."""
    return {
        "measured_at": f"{to_rfc3339(SystemClock().now_us())[:16]}Z",
        "command": "scripts/capacity",
        "store": run.settings.store,
        "cores": os.cpu_count(),
        "connections": run.connections,
        "counters": run.counters,
        "events": run.events,
        "figures": [_figure(each) for each in run.figures],
    }


def _figure(figure: Figure) -> dict[str, Any]:
    reported = asdict(figure)
    kept = {name: reported[name] for name in ("what", "value", "unit")}
    kept["value"] = round(figure.value) if figure.unit == "/s" else round(figure.value, 1)
    rest = {k: v for k, v in reported.items() if k not in kept and v not in (None, "")}
    return kept | {k: round(v, 3) if isinstance(v, float) else v for k, v in rest.items()}


def _text(run: Run) -> str:
    """The figures as a table."""
    table = Table(box=None, pad_edge=False)
    for name in ("", "a second", "p50 ms", "p99 ms", "its cores", "load's cores", "limited by"):
        table.add_column(name, justify="left" if name in ("", "limited by") else "right")
    for each in run.figures:
        numbers = (each.p50_ms, each.p99_ms, each.cores, each.load_cores)
        table.add_row(
            _NAMES[each.what],
            f"{each.value:,.0f}" + ("" if each.unit == "/s" else f" {each.unit}"),
            *("" if number is None else f"{number:.2f}" for number in numbers),
            each.limited_by,
        )
    console = Console(width=None if sys.stdout.isatty() else 140, no_color=not sys.stdout.isatty())
    with console.capture() as captured:
        console.print(table)
    what = "a cluster" if run.shared else "SQLite, durable, in a directory that is gone again"
    return (
        f"{captured.get().rstrip()}\n\n"
        f"All {run.events:,} adds are counted exactly once. Store: {what}."
    )


if __name__ == "__main__":
    App("scripts/capacity", default_command=bench, help_format="plaintext", version_flags=())()
