"""The command ``counter``: its commands, each imported when it is run, and how they speak.

It needs nothing of the server: what asks a running service starts without that.
"""

from __future__ import annotations

import json
import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final, NoReturn

from cyclopts import App

from counter.cli_commands import add_service_commands
from counter.cli_help import INTERRUPTED, helped
from counter.cli_moves import add_moving_commands
from counter.errors import CounterError, StartupError

#: What a command that cannot start, or whose settings are wrong, ends with.
EXIT_CANNOT_START: Final = 2
#: What a shell tells of a program that was interrupted.
EXIT_INTERRUPTED: Final = 130
#: What a shell tells of a program whose reader went away: what was to be printed was not.
EXIT_UNREAD: Final = 141
#: What may not be printed as it is; most texts have none of it.
_UNUSUAL: Final = re.compile(r"[^ -~]")
#: Joiners that emoji and some scripts need, which str.isprintable does not know.
_JOINERS: Final = "\u200c\u200d"


def _version() -> str:
    from importlib import metadata

    return metadata.version("distributed-counter")


app = App(
    name="counter",
    help="A distributed counter service: every acknowledged add counts exactly once.",
    help_format="plaintext",
    version=_version,
)
schema = App(name="schema", help="The tables that Cassandra holds.")
config = App(name="config", help="The settings.")
plan = App(name="plan", help="How much of everything it takes: tokens, events, a cluster.")
key = App(name="key", help="API keys: who may do what, and how much of it.")
app.command(schema)
app.command(config)
app.command(plan)
app.command(key)
# Imported only when one of them is run, so what they do is told here.
app.command(
    "counter.cli_serve:serve",
    help=helped(
        "Serve the REST API: with SQLite in one process, or over Cassandra in as many as you like.",
        """
        counter serve
        counter serve --port 9000 --data /srv/counter
        counter serve --store cassandra --contact-points db1,db2 --cache memcached://cache1
        """,
        "0 after SIGTERM or SIGINT, 2 if it cannot start.",
        "Settings come from these flags, else from the environment (COUNTER_PORT, COUNTER_DATA,"
        " ...), else from a TOML file (--config, or ./counter.toml).",
    ),
)
app.command(
    "counter.cli_serve:rollup",
    help=helped(
        "Roll up what API processes wrote to Cassandra; any number of these share the work.",
        "counter rollup --store cassandra --contact-points db1,db2 --cache memcached://cache1",
        "0 after SIGTERM or SIGINT, 1 if it could not end in order, 2 if it cannot start.",
    ),
)
schema.command(
    "counter.cli_serve:apply",
    help=helped(
        "Create what Cassandra must hold, or bring it up to date; safe to repeat, by many at once.",
        "counter schema apply --store cassandra --contact-points db1 --replication dc1:3",
        f"0 if all is there, 2 if it cannot be done; {INTERRUPTED}.",
    ),
)
config.command(
    "counter.cli_serve:check",
    help=helped(
        "Print the settings that a process would have, in TOML, and where each comes from.",
        """
        counter config check --config counter.toml
        counter config check --json
        """,
        "0 if they are right, 2 with every error if not.",
    ),
)
app.command(
    "counter.cli_audit:audit",
    help=helped(
        "Count anew from the events, and compare: checkpoints, what is settled, history.",
        """
        counter audit --all --data ./data
        counter audit --namespace videos --counter views --repair
        """,
        "0 if all is right; 1 if something is wrong, or cannot be told now; 3 if all that was wrong"
        f" is repaired; 2 if it cannot run; {INTERRUPTED}.",
        "Over Cassandra beside everything that runs; a data directory while no process serves it.",
    ),
)
app.command(
    "counter.cli_backup:backup",
    help=helped(
        "Copy the data directory to a new one of one moment, while it is served or not.",
        "counter backup /backups/monday --data ./data",
        "0 if the copy is whole, checked and on disk; 2, and nothing is left, if not;"
        f" {INTERRUPTED}, and nothing is left.",
    ),
)
app.command(
    "counter.cli_backup:restore",
    help=helped(
        "Make a backup an empty data directory, to be audited and served.",
        "counter restore /backups/monday --data ./data",
        "0 if it is there, whole; 2 if the backup is not, or the directory not empty;"
        f" {INTERRUPTED}. What is broken off leaves a directory that is not served: empty it.",
    ),
)
schema.command(
    "counter.cli_backup:restored",
    help=helped(
        "After keyspaces were restored from snapshots: give out no number a second time.",
        "counter schema restored --store cassandra --contact-points db1",
        f"0 if it is done, 2 if it cannot be; {INTERRUPTED}.",
    ),
)
_PLANNED: Final = "0, with warnings too; 2 if a value cannot be read or is past its bound."
plan.command(
    "counter.cli_plan:dedup",
    help=helped(
        "Plan what knows a repeated token again.",
        "counter plan dedup --rate 80/s --caller 10s --retry 90s --network 30s --clock 5s",
        _PLANNED,
    ),
)
plan.command(
    "counter.cli_plan:storage",
    help=helped(
        "Plan how one counter's events are cut.",
        "counter plan storage --events-per-day 43e6 --retention 7d",
        _PLANNED,
    ),
)
plan.command(
    "counter.cli_plan:cluster",
    help=helped(
        "Plan nodes, servers and processes.",
        """
        counter plan cluster --adds 20000/s --counters 1e6
        counter plan cluster --adds 20000/s --counters 1e6 --rates rates.json --json
        """,
        _PLANNED,
    ),
)
_KEYED: Final = (
    "0; 1 if there is no such key, or it cannot be done to this one; 2 if a value cannot be read or"
    f" is past its bound, or the keys cannot be reached; {INTERRUPTED}."
)
key.command(
    "counter.cli_key:create",
    help=helped(
        "Make a key, and print it this once.",
        """
        counter key create --namespace videos --scope write --label web
        counter key create --namespace '*' --scope admin --expires 90d
        """,
        _KEYED,
    ),
)
key.command(
    "counter.cli_key:list_keys",
    name="list",
    help=helped("Show all keys on record.", "counter key list --json", _KEYED),
)
key.command(
    "counter.cli_key:rotate",
    help=helped(
        "Make a key in place of another.", "counter key rotate pbay5xaap5pt --grace 1d", _KEYED
    ),
)
key.command(
    "counter.cli_key:revoke",
    help=helped("Have a key be refused, for ever.", "counter key revoke pbay5xaap5pt", _KEYED),
)

add_moving_commands(app)
add_service_commands(app)


@contextmanager
def told() -> Iterator[None]:
    """End with EXIT_CANNOT_START where something cannot start, having said why."""
    try:
        yield
    except StartupError as error:
        _fail(str(error))
    except CounterError as error:
        _fail(error.detail)


class OutputError(Exception):
    """Standard output does not take what is to be printed: a disk is full, perhaps."""


@contextmanager
def printing() -> Iterator[None]:
    """Raise OutputError where standard output does not take what is written to it: a file that a
    command writes may fail for the same reasons, and means something else."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"standard output: {error.strerror or error}") from error


def printable(text: str, *, lines: bool = False) -> str:
    """*text* without anything that controls a terminal, or that turns the direction of writing: it
    is escaped as in JSON. *lines* says whether ends of lines and tabs are kept.

    All that a command prints goes through here: names, problems and files may come from anybody.
    """
    return _UNUSUAL.sub(partial(_escaped, "\n\t" if lines else ""), text)


def _escaped(kept: str, found: re.Match[str]) -> str:
    char = found[0]
    if char in kept or char.isprintable() or char in _JOINERS:
        return char
    return char if unicodedata.category(char) == "Zs" else json.dumps(char)[1:-1]


def tell(text: str, warnings: Iterable[str] = ()) -> None:
    """Print *text*, and then *warnings* to standard error. Raises OutputError."""
    with printing():
        print(printable(text, lines=True), flush=True)
    for each in warnings:
        print(f"counter: warning: {printable(each)}", file=sys.stderr)


def remark(text: str) -> None:
    """Say *text* beside what is printed, on standard error."""
    for line in text.splitlines():
        print(f"counter: {printable(line)}", file=sys.stderr)


def print_error(text: str, end: str = "\n") -> None:
    """Print *text* on standard error with nothing before it: to be copied, or answered."""
    print(printable(text, lines=True), end=end, file=sys.stderr, flush=True)


def read_no_more() -> None:
    """Nobody reads standard output any more: what is left in it must not be told at the exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str) -> NoReturn:
    remark(message)
    raise SystemExit(EXIT_CANNOT_START)


def main() -> None:
    """The entry point of the command."""
    try:
        app()
    except BrokenPipeError:
        read_no_more()
        raise SystemExit(EXIT_UNREAD) from None
    except OutputError as error:
        read_no_more()
        remark(str(error))
        raise SystemExit(EXIT_UNREAD) from None
