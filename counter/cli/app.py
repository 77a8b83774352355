"""Define the command ``counter``: its commands, each imported when it is run, and their help texts.

It imports nothing of the server, so commands that call a running service start quickly.
"""

from __future__ import annotations

from typing import Final

from cyclopts import App

from counter.cli.terminal import EXIT_UNREAD, OutputError, read_no_more, remark

#: The exit code after Ctrl-C.
INTERRUPTED: Final = "130 if it was interrupted"


def helped(what: str, examples: str, ends: str, more: str = "") -> str:
    """Compose a help text. *examples* are a line each; *ends* lists the exit codes."""
    shown = "".join(f"\n  {each.strip()}" for each in examples.strip().splitlines())
    parts = (what, more, f"For example:{shown}", f"Exit codes: {ends}")
    return "\n\n".join(part for part in parts if part)


_READS: Final = (
    "0; 1 if there is no such thing, or it may not be seen; 2 if a value cannot be"
    f" read, or the service cannot be reached or does not know now; {INTERRUPTED}."
)
_ADDS: Final = (
    "0 if it is counted; 1 if it is not and never will be under this token; 2 if a"
    " value cannot be read, or nothing could be sent; 4 if it is unknown: a command that finds"
    f" out, and counts it at most once, is printed; {INTERRUPTED}, likewise."
)


def add_service_commands(app: App) -> None:
    """Add the commands that call a running service to *app*."""
    app.command(
        "counter.cli.commands.counters:add",
        help=helped(
            "Add to a counter, once.",
            """
            counter add views
            counter add stock -3
            counter add views 5 --get
            counter add orders --key order-123
            """,
            _ADDS,
            "One token is made before anything is sent, and all attempts use it.",
        ),
    )
    app.command(
        "counter.cli.commands.counters:get",
        help=helped(
            "Print counts; for a single counter only the number.",
            """
            counter get views
            counter get views likes --max-staleness 5s
            counter get views --json
            """,
            _READS,
            "A counter that was never written reads 0.",
        ),
    )
    app.command(
        "counter.cli.commands.counters:clear",
        help=helped(
            "Set a counter to 0, once: all earlier adds are erased.",
            """
            counter clear views
            """,
            _ADDS,
        ),
    )
    _add_looks(app)
    _add_namespaces(app)
    _add_tokens(app)


def _add_looks(app: App) -> None:
    """Add the commands that show a counter, now and in the past."""
    app.command(
        "counter.cli.commands.watch:watch",
        help=helped(
            "Show a count as it changes, how fast, and the changes of the last 40 seconds.",
            """
            counter watch views
            counter watch views --for 1m --json
            counter watch views --count 1
            """,
            _READS.replace("0;", "0 where --for or --count ended it;", 1),
            "Without a terminal it prints a line for each change: time, count, change.",
        ),
    )
    app.command(
        "counter.cli.commands.top:top",
        help=helped(
            "Show the counters that are added to the most just now, or the highest.",
            """
            counter top
            counter top --live --limit 20
            counter top --by count
            """,
            _READS,
            "By adds, the service reports the last seconds; if it could not read all counters that"
            " changed, a note says so. By count, every counter is read.",
        ),
    )
    app.command(
        "counter.cli.commands.history:history",
        help=helped(
            "Print the count at the end of each step of time, and its change.",
            """
            counter history views
            counter history views --from 24h --step 1h --plot
            counter history views --from 2026-01-01T00:00:00Z --to 2026-02-01T00:00:00Z --csv
            """,
            _READS,
            "Without --from it shows the last hour, as far as the rollup has come.",
        ),
    )
    app.command(
        "counter.cli.commands.history:events",
        help=helped(
            "Print the adds and clears of a counter, latest first, with their tokens.",
            """
            counter events views
            counter events views --from 1h --limit 0 --json
            """,
            _READS,
        ),
    )


def _add_namespaces(app: App) -> None:
    """Add ``counter namespace ...``."""
    namespace = App(name="namespace", help="Namespaces: sets of counters with their settings.")
    app.command(namespace)
    where = "counter.cli.commands.namespace:"
    namespace.command(
        f"{where}create",
        help=helped(
            "Create a namespace.",
            """
            counter namespace create videos --counter-type EVENTUAL
            counter namespace create orders --counter-type ACCURATE --accept-limit 1m
            """,
            _READS.replace("no such thing", "one of the name already"),
            "Values that are left out follow the service's settings.",
        ),
    )
    namespace.command(
        f"{where}change",
        help=helped(
            "Change the changeable settings of a namespace; others stay as they are.",
            "counter namespace change videos --cache-ttl 5s",
            _READS,
        ),
    )
    namespace.command(
        f"{where}list_namespaces",
        name="list",
        help=helped("Show all namespaces.", "counter namespace list", _READS),
    )
    namespace.command(
        f"{where}show",
        help=helped("Show a namespace's settings.", "counter namespace show videos", _READS),
    )
    namespace.command(
        f"{where}delete",
        help=helped(
            "Delete a namespace with its counters, events and tokens, permanently.",
            """
            counter namespace delete videos
            counter namespace delete videos --yes
            """,
            _READS.replace("no such thing", "no such namespace, or its name was not repeated"),
            "It asks for the name once more, unless --yes is given.",
        ),
    )


def _add_tokens(app: App) -> None:
    """Add ``counter token ...``."""
    token = App(name="token", help="Tokens: they identify an add when it is sent again.")
    app.command(token)
    token.command(
        "counter.cli.commands.token:new",
        help=helped(
            "Make tokens, one per line: use one for each add.",
            """
            counter token new
            counter token new 10 --served
            """,
            _READS,
            "They are made here, with this machine's time, unless --served is given.",
        ),
    )
    token.command(
        "counter.cli.commands.token:show",
        help=helped(
            "Show a token's time and age, and whether it is still accepted.",
            """
            counter token show 5f3a0f0e-6f0c-4f7e-9d3b-0c5f1d2e3a4b@2026-01-31T08:15:30Z
            """,
            _READS,
        ),
    )
    token.command(
        "counter.cli.commands.token:derive",
        help=helped(
            "Print the token for a step of a larger operation: the same on every machine.",
            """
            counter token derive key:order-123 stock
            """,
            "0; 2 if a value cannot be read.",
        ),
    )
    token.command(
        "counter.cli.commands.token:resolve",
        help=helped(
            "Find the outcome of a token that was sent to a counter.",
            """
            counter token resolve 5f3a0f0e-6f0c-4f7e-9d3b-0c5f1d2e3a4b@2026-01-31T08:15:30Z views
            counter token resolve key:order-123 orders 1
            """,
            _ADDS,
            "It looks up the token's event. If there is none and DELTA is given, the same add is"
            " sent once more: a token in time is counted, and a late one is decided permanently.",
        ),
    )


def add_moving_commands(app: App) -> None:
    """Add the commands that move counts between systems, and those that check and repair."""
    app.command(
        "counter.cli.commands.transfer:export",
        help=helped(
            "Write the exact counts of a namespace to a file: NDJSON, with a checksum.",
            """
            counter export counts.ndjson --namespace videos
            counter export - --prefix eu/ | gzip > counts.ndjson.gz
            """,
            "0 if the file is whole; 1 if the service refuses; 2 if it cannot be done; 130 if it"
            " was interrupted: the same command goes on where it was.",
            "Each count has the instant it is exact as of. If no client adds meanwhile, all counts"
            " are of the same moment.",
        ),
    )
    app.command(
        "counter.cli.commands.transfer:import_",
        name="import",
        help=helped(
            "Count the lines of a file, each exactly once, however often this is run.",
            """
            counter import counts.ndjson --namespace videos --verify
            counter import redis.csv --add
            """,
            "0 if all lines are counted; 1 if it is refused, or --verify finds a difference; 2 if"
            " it cannot be done, and nothing is counted; 4 if it failed half-way, and 130 if it"
            " was interrupted: the same command goes on where it was.",
            "The file is what counter export wrote; or NDJSON of objects with counter and count; or"
            " CSV with these two columns.",
        ),
    )
    _add_checks(app)


def _add_checks(app: App) -> None:
    """Add the commands that check and repair."""
    app.command(
        "counter.cli.commands.recount:recount",
        help=helped(
            "Recount a counter from its events, and report whether that changed its count.",
            """
            counter recount views
            counter recount views --json
            """,
            "0 if the count was right; 1 if it was not, and now is, or if the service refuses; 2 if"
            " it cannot be done; 4 if the recount is not done yet; 130 if it was interrupted: what"
            " was asked for is done all the same.",
            "Counts normally need no recount. counter audit checks all of them.",
        ),
    )
    app.command(
        "counter.cli.commands.doctor:doctor",
        help=helped(
            "Check settings, clock, disk, store, cache and keys, and report problems with their"
            " fixes. It changes nothing.",
            """
            counter doctor --data ./data
            counter doctor --store cassandra --contact-points db1,db2 --json
            counter doctor --url http://127.0.0.1:8080
            """,
            "0 if all is right, with warnings too; 1 if something is wrong; 2 if it cannot run; 130"
            " if it was interrupted.",
            "Give it the flags, the environment and the directory of the process that it is about."
            " It may run beside it. With --url it looks at a running service as well.",
        ),
    )
    app.command(
        "counter.cli.commands.completion:completion",
        help=helped(
            "Print a shell completion script.",
            """
            counter completion bash > ~/.local/share/bash-completion/completions/counter
            counter completion zsh > ~/.zfunc/_counter
            counter completion fish > ~/.config/fish/completions/counter.fish
            """,
            "0; 2 if it knows no such shell.",
        ),
    )


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
# These commands are imported only when one of them is run, so their help texts are here.
app.command(
    "counter.cli.commands.serve:serve",
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
    "counter.cli.commands.serve:rollup",
    help=helped(
        "Roll up what API processes wrote to Cassandra; any number of workers share the work.",
        "counter rollup --store cassandra --contact-points db1,db2 --cache memcached://cache1",
        "0 after SIGTERM or SIGINT, 1 if it could not end in order, 2 if it cannot start.",
    ),
)
schema.command(
    "counter.cli.commands.serve:apply",
    help=helped(
        "Create or update the Cassandra schema; it is safe to run repeatedly and concurrently.",
        "counter schema apply --store cassandra --contact-points db1 --replication dc1:3",
        f"0 if all is there, 2 if it cannot be done; {INTERRUPTED}.",
    ),
)
config.command(
    "counter.cli.commands.serve:check",
    help=helped(
        "Print the effective settings in TOML, with the source of each.",
        """
        counter config check --config counter.toml
        counter config check --json
        """,
        "0 if they are right, 2 with every error if not.",
    ),
)
app.command(
    "counter.cli.commands.audit:audit",
    help=helped(
        "Recompute counts from the event log and compare them with the stored totals.",
        """
        counter audit --all --data ./data
        counter audit --namespace videos --counter views --repair
        """,
        "0 if all is right; 1 if something is wrong, or cannot be judged now; 3 if all"
        f" damage is repaired; 2 if it cannot run; {INTERRUPTED}.",
        "Cassandra may be in use meanwhile; a data directory must not be served by any process.",
    ),
)
app.command(
    "counter.cli.commands.backup:backup",
    help=helped(
        "Copy the data directory to a new directory, as of one moment; it may be in use.",
        "counter backup /backups/monday --data ./data",
        "0 if the copy is whole, checked and on disk; 2, and nothing is left, if not;"
        f" {INTERRUPTED}, and nothing is left.",
    ),
)
app.command(
    "counter.cli.commands.backup:restore",
    help=helped(
        "Restore a backup into a new data directory.",
        "counter restore /backups/monday --data ./data",
        "0 if it is there, whole; 2 if the backup is not, or the directory not empty;"
        f" {INTERRUPTED}. If it is interrupted, the directory cannot be served: empty it.",
    ),
)
schema.command(
    "counter.cli.commands.backup:restored",
    help=helped(
        "Prepare keyspaces restored from snapshots, so that no id or token is issued twice.",
        "counter schema restored --store cassandra --contact-points db1",
        f"0 if it is done, 2 if it cannot be; {INTERRUPTED}.",
    ),
)
_PLANNED: Final = "0, with warnings too; 2 if a value cannot be read or is past its bound."
plan.command(
    "counter.cli.commands.plan:dedup",
    help=helped(
        "Plan the store that recognizes repeated tokens.",
        "counter plan dedup --rate 80/s --caller 10s --retry 90s --network 30s --clock 5s",
        _PLANNED,
    ),
)
plan.command(
    "counter.cli.commands.plan:storage",
    help=helped(
        "Plan how one counter's events are partitioned.",
        "counter plan storage --events-per-day 43e6 --retention 7d",
        _PLANNED,
    ),
)
plan.command(
    "counter.cli.commands.plan:cluster",
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
    "counter.cli.commands.key:create",
    help=helped(
        "Create a key, and print it; it cannot be shown again.",
        """
        counter key create --namespace videos --scope write --label web
        counter key create --namespace '*' --scope admin --expires 90d
        """,
        _KEYED,
    ),
)
key.command(
    "counter.cli.commands.key:list_keys",
    name="list",
    help=helped("Show all stored keys.", "counter key list --json", _KEYED),
)
key.command(
    "counter.cli.commands.key:rotate",
    help=helped(
        "Create a key to replace another one.", "counter key rotate pbay5xaap5pt --grace 1d", _KEYED
    ),
)
key.command(
    "counter.cli.commands.key:revoke",
    help=helped("Revoke a key permanently.", "counter key revoke pbay5xaap5pt", _KEYED),
)

add_moving_commands(app)
add_service_commands(app)


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
