"""Define the command ``counter``: its commands, each imported when it is run, and their help texts.

It imports nothing of the server, so commands that call a running service start quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import cleandoc
from typing import Final

from cyclopts import App

from counter import __version__
from counter.cli.terminal import EXIT_UNREAD, OutputError, read_no_more, remark

_INTERRUPTED: Final = "130 if it was interrupted"
#: Exit codes that several commands have.
_CODES: Final[Mapping[str, str]] = {
    "interrupted": _INTERRUPTED,
    "reads": (
        "0; 1 if there is no such thing, or it may not be seen; 2 if a value cannot be read, or the"
        f" service cannot be reached or does not know now; {_INTERRUPTED}."
    ),
    "adds": (
        "0 if it is counted; 1 if it is not and never will be under this token; 2 if a value cannot"
        " be read, or nothing could be sent; 4 if it is unknown: a command that finds out, and"
        f" counts it at most once, is printed; {_INTERRUPTED}, likewise."
    ),
    "planned": "0, with warnings too; 2 if a value cannot be read or is past its bound.",
    "keyed": (
        "0; 1 if there is no such key, or it is not possible for this key; 2 if a value cannot be"
        f" read or is past its bound, or the keys cannot be reached; {_INTERRUPTED}."
    ),
}
_GROUPS: Final[Mapping[str, str]] = {
    "namespace": "Namespaces: sets of counters with their settings.",
    "token": "Tokens: they identify an add when it is sent again.",
    "key": "API keys: scopes, namespaces and rates.",
    "plan": "Capacity planning: tokens, events, a server, a cluster.",
    "schema": "The tables in Cassandra.",
    "config": "The settings.",
}
#: The commands of each group, by ``module:function`` in ``counter.cli.commands``: what each does,
#: indented examples, and its exit codes.
_COMMANDS: Final[Mapping[str, Mapping[str, str]]] = {
    "": {
        "counters:add": """
        Add to a counter, once.

        One token is made before anything is sent, and all attempts use it.
          counter add views
          counter add stock -3
          counter add views 5 --get
          counter add orders --key order-123
        {adds}
        """,
        "counters:get": """
        Print counts; for a single counter only the number.

        A counter that was never written reads 0.
          counter get views
          counter get views likes --max-staleness 5s
          counter get views --json
        {reads}
        """,
        "counters:clear": """
        Set a counter to 0, once: all earlier adds are erased.
          counter clear views
        {adds}
        """,
        "watch:watch": """
        Show a count as it changes, how fast, and the changes of the last 40 seconds.

        Without a terminal it prints a line for each change: time, count, change.
          counter watch views
          counter watch views --for 1m --json
          counter watch views --count 1
        0 where --for or --count ended it; 1 if there is no such thing, or it may not be seen; 2 if
        a value cannot be read, or the service cannot be reached or does not know now;
        {interrupted}.
        """,
        "top:top": """
        Show the counters that are added to the most just now, or the highest.

        By adds, the service reports the last seconds; if it could not read all counters that
        changed, a note says so. By count, every counter is read.
          counter top
          counter top --live --limit 20
          counter top --by count
        {reads}
        """,
        "history:history": """
        Print the count at the end of each step of time, and its change.

        Without --from it shows the last hour, as far as the rollup has come.
          counter history views
          counter history views --from 24h --step 1h --plot
          counter history views --from 2026-01-01T00:00:00Z --to 2026-02-01T00:00:00Z --csv
        {reads}
        """,
        "history:events": """
        Print the adds and clears of a counter, latest first, with their tokens.
          counter events views
          counter events views --from 1h --limit 0 --json
        {reads}
        """,
        "transfer:export": """
        Write the exact counts of a namespace to a file: NDJSON, with a checksum.

        Each count has the instant it is exact as of. If no client adds meanwhile, all counts are of
        the same moment.
          counter export counts.ndjson --namespace videos
          counter export - --prefix eu/ | gzip > counts.ndjson.gz
        0 if the file is whole; 1 if the service rejects it; 2 if it fails; {interrupted}: the
        same command goes on where it was.
        """,
        "transfer:import_": """
        Count the lines of a file, each exactly once, however often this is run.

        The file is what counter export wrote; or NDJSON of objects with counter and count; or CSV
        with these two columns.
          counter import counts.ndjson --namespace videos --verify
          counter import redis.csv --add
        0 if all lines are counted; 1 if it is refused, or --verify finds a difference; 2 if it
        cannot be done, and nothing is counted; 4 if it failed half-way, and {interrupted}: the same
        command goes on where it was.
        """,
        "recount:recount": """
        Recount a counter from its events, and report whether that changed its count.

        Counts normally need no recount. counter audit checks all of them.
          counter recount views
          counter recount views --json
        0 if the count was right; 1 if it was not, and now is, or if the service refuses; 2 if it
        cannot be done; 4 if the recount is not done yet; {interrupted}: what was asked for is done
        all the same.
        """,
        "doctor:doctor": """
        Check settings, clock, disk, store, cache and keys, and report problems with their fixes. It
        changes nothing.

        Give it the flags, the environment and the directory of the process that it is about. It may
        run beside it. With --url it looks at a running service as well.
          counter doctor --data ./data
          counter doctor --store cassandra --contact-points db1,db2 --json
          counter doctor --url http://127.0.0.1:8080
        0 if all is right, with warnings too; 1 if something is wrong; 2 if it cannot run;
        {interrupted}.
        """,
        "completion:completion": """
        Print a shell completion script.
          counter completion bash > ~/.local/share/bash-completion/completions/counter
          counter completion zsh > ~/.zfunc/_counter
          counter completion fish > ~/.config/fish/completions/counter.fish
        0; 2 if it knows no such shell.
        """,
        "serve:serve": """
        Serve the REST API: with SQLite in one process, or over Cassandra in as many as you like.

        Settings come from these flags, else from the environment (COUNTER_PORT, COUNTER_DATA, ...),
        else from a TOML file (--config, or ./counter.toml).
          counter serve
          counter serve --port 9000 --data /srv/counter
          counter serve --store cassandra --contact-points db1,db2 --cache memcached://cache1
        0 after SIGTERM or SIGINT, 2 if it cannot start.
        """,
        "serve:rollup": """
        Roll up what API processes wrote to Cassandra; any number of workers share the work.
          counter rollup --store cassandra --contact-points db1,db2 --cache memcached://cache1
        0 after SIGTERM or SIGINT, 1 if it could not end in order, 2 if it cannot start.
        """,
        "audit:audit": """
        Recompute counts from the event log and compare them with the stored totals.

        Cassandra may be in use meanwhile; a data directory must not be served by any process.
          counter audit --all --data ./data
          counter audit --namespace videos --counter views --repair
        0 if all is right; 1 if something is wrong, or cannot be judged now; 3 if all damage is
        repaired; 2 if it cannot run; {interrupted}.
        """,
        "backup:backup": """
        Copy the data directory to a new directory, as of one moment; it may be in use.
          counter backup /backups/monday --data ./data
        0 if the copy is whole, checked and on disk; 2, and nothing is left, if not; {interrupted},
        and nothing is left.
        """,
        "backup:restore": """
        Restore a backup into a new data directory.
          counter restore /backups/monday --data ./data
        0 if it is there, whole; 2 if the backup is not, or the directory not empty; {interrupted}.
        If it is interrupted, the directory cannot be served: empty it.
        """,
    },
    "namespace": {
        "namespace:create": """
        Create a namespace.

        Values that are left out follow the service's settings.
          counter namespace create videos --counter-type EVENTUAL
          counter namespace create orders --counter-type ACCURATE --accept-limit 1m
        0; 1 if there is one of the name already, or it may not be seen; 2 if a value cannot be
        read, or the service cannot be reached or does not know now; {interrupted}.
        """,
        "namespace:change": """
        Change the changeable settings of a namespace; others stay as they are.
          counter namespace change videos --cache-ttl 5s
        {reads}
        """,
        "namespace:list_": """
        Show all namespaces.
          counter namespace list
        {reads}
        """,
        "namespace:show": """
        Show a namespace's settings.
          counter namespace show videos
        {reads}
        """,
        "namespace:delete": """
        Delete a namespace with its counters, events and tokens, permanently.

        It asks for the name once more, unless --yes is given.
          counter namespace delete videos
          counter namespace delete videos --yes
        0; 1 if there is no such namespace, or its name was not repeated, or it may not be seen; 2
        if a value cannot be read, or the service cannot be reached or does not know now;
        {interrupted}.
        """,
    },
    "token": {
        "token:new": """
        Make tokens, one per line: use one for each add.

        They are made here, with this machine's time, unless --served is given.
          counter token new
          counter token new 10 --served
        {reads}
        """,
        "token:show": """
        Show a token's time and age, and whether it is still accepted.
          counter token show 5f3a0f0e-6f0c-4f7e-9d3b-0c5f1d2e3a4b@2026-01-31T08:15:30Z
        {reads}
        """,
        "token:derive": """
        Print the token for a step of a larger operation: the same on every machine.
          counter token derive key:order-123 stock
        0; 2 if a value cannot be read.
        """,
        "token:resolve": """
        Find the outcome of a token that was sent to a counter.

        It looks up the token's event. If there is none and DELTA is given, the same add is sent
        once more: a token in time is counted, and a late one is decided permanently.
          counter token resolve 5f3a0f0e-6f0c-4f7e-9d3b-0c5f1d2e3a4b@2026-01-31T08:15:30Z views
          counter token resolve key:order-123 orders 1
        {adds}
        """,
    },
    "key": {
        "key:create": """
        Create a key, and print it; it cannot be shown again.
          counter key create --namespace videos --scope write --label web
          counter key create --namespace '*' --scope admin --expires 90d
        {keyed}
        """,
        "key:list_": """
        Show all stored keys.
          counter key list --json
        {keyed}
        """,
        "key:rotate": """
        Create a key to replace another one.
          counter key rotate pbay5xaap5pt --grace 1d
        {keyed}
        """,
        "key:revoke": """
        Revoke a key permanently.
          counter key revoke pbay5xaap5pt
        {keyed}
        """,
    },
    "plan": {
        "plan:dedup": """
        Plan the store that recognizes repeated tokens.
          counter plan dedup --rate 80/s --caller 10s --retry 90s --network 30s --clock 5s
        {planned}
        """,
        "plan:storage": """
        Plan how one counter's events are partitioned.
          counter plan storage --events-per-day 43e6 --retention 7d
        {planned}
        """,
        "plan:postgresql": """
        Plan one PostgreSQL server: its disk and connections, and when it is not enough.
          counter plan postgresql --adds 2000/s --counters 1e6
        {planned}
        """,
        "plan:cluster": """
        Plan nodes, servers and processes.
          counter plan cluster --adds 20000/s --counters 1e6
          counter plan cluster --adds 20000/s --counters 1e6 --rates rates.json --json
        {planned}
        """,
    },
    "schema": {
        "serve:apply": """
        Create or update the schema; it is safe to run repeatedly and concurrently.
          counter schema apply --store cassandra --contact-points db1 --replication dc1:3
        0 if all is there, 2 if it cannot be done; {interrupted}.
        """,
        "backup:restored": """
        Prepare a restored database, or restored keyspaces: no id or token is issued twice.
          counter schema restored --store cassandra --contact-points db1
        0 if it is done, 2 if it cannot be; {interrupted}.
        """,
    },
    "config": {
        "serve:check": """
        Print the effective settings in TOML, with the source of each.
          counter config check --config counter.toml
          counter config check --json
        0 if they are right, 2 with every error if not.
        """,
    },
}


def _help_of(text: str) -> str:
    """Compose the help of a command from its text in ``_COMMANDS``."""
    lines = cleandoc(text).splitlines()
    indented = [number for number, line in enumerate(lines) if line.startswith("  ")]
    first, end = indented[0], indented[-1] + 1
    paragraphs = "\n".join(lines[:first]).split("\n\n")
    what = "\n\n".join(each.replace("\n", " ") for each in paragraphs)
    examples, codes = "\n".join(lines[first:end]), " ".join(lines[end:])
    return f"{what}\n\nFor example:\n{examples}\n\nExit codes: {codes.format_map(_CODES)}"


app = App(
    name="counter",
    help="A distributed counter service: every acknowledged add counts exactly once.",
    help_format="plaintext",
    version=__version__,
)
for _group, _commands in _COMMANDS.items():
    _of = App(name=_group, help=_GROUPS[_group]) if _group else app
    if _group:
        app.command(_of)
    for _path, _text in _commands.items():
        # A function may not be named list or import.
        _name = _path.partition(":")[2].rstrip("_")
        _of.command(f"counter.cli.commands.{_path}", name=_name, help=_help_of(_text))


def main() -> None:
    """Run the command line."""
    try:
        app()
    except BrokenPipeError:
        read_no_more()
        raise SystemExit(EXIT_UNREAD) from None
    except OutputError as error:
        read_no_more()
        remark(str(error))
        raise SystemExit(EXIT_UNREAD) from None
