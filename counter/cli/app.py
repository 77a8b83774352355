"""Define the command ``counter``: its commands, each imported when it is run, and their help texts.

It imports nothing of the server, so commands that call a running service start quickly.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from inspect import cleandoc
from typing import Any, Final

from cyclopts import (
    App,
    CycloptsError,
    Group,
    MissingArgumentError,
    UnusedCliTokensError,
)
from rich.console import Console
from rich.text import Text

from counter import __version__
from counter.cli.contexts import fill_from_context
from counter.cli.terminal import (
    EXIT_UNREAD,
    OutputError,
    StandardError,
    give_up_output,
    printable,
    printing,
)

#: What the exit codes of all commands mean; docs/cli.md has those of each.
_CODES: Final = (
    "Exit codes: 0 done; 1 rejected, not found, or a problem found; 2 nothing done; 3 found"
    " and repaired; 4 unknown, or partly done; 5 past a bound; 130 interrupted."
)
_GROUPS: Final[Mapping[str, str]] = {
    "namespace": "Create, show, change and delete namespaces.",
    "token": "Make tokens, and find the outcome of one.",
    "key": "Create, list, rotate and revoke API keys.",
    "plan": "Plan capacity: tokens, and the events of one counter.",
    "context": "Keep services by name, with their API keys.",
    "schema": "Create or update the tables of a shared store.",
    "config": "Print the effective settings.",
}
#: The panels of ``counter --help`` with their commands, in the order in which they are shown.
_PANELS: Final[Sequence[tuple[Group, Sequence[str]]]] = (
    (Group("Count", sort_key=1), ("add", "get", "cancel", "clear", "delete", "token")),
    (Group("Hold", sort_key=2), ("hold", "settle", "release", "extend", "holds")),
    (Group("Look", sort_key=3), ("list", "watch", "top", "history", "events")),
    (Group("Move", sort_key=4), ("export", "import", "backup", "restore")),
    (
        Group("Run", sort_key=5),
        ("serve", "rollup", "schema", "namespace", "key", "context", "completion"),
    ),
    (Group("Check", sort_key=6), ("doctor", "config", "audit", "recount", "plan")),
)
#: The positional arguments of commands that need not have all of them.
_ARGUMENTS: Final[Mapping[str, str]] = {
    "add": "NAME [DELTA]",
    "cancel": "NAME [DELTA]",
    "get": "NAME...",
    "list": "[PREFIX]",
    "token new": "[COUNT]",
    "token resolve": "TOKEN [NAME [DELTA]]",
}
#: The commands of each group, by ``module:function`` in ``counter.cli.commands``: what each does,
#: and indented examples.
_COMMANDS: Final[Mapping[str, Mapping[str, str]]] = {
    "": {
        "counters:add": """
        Add to a counter, once.

        One token is made before anything is sent, and all attempts use it.
          counter add views
          counter add stock -3 --at-least 0
          counter add orders --key order-123
          counter add --stream < visits.txt
        """,
        "counters:get": """
        Print counts; for a single counter only the number.

        A counter that was never written reads 0.
          counter get views
          counter get views likes --max-staleness 5s
          counter get views --json
        """,
        "counters:cancel": """
        Cancel a write or a hold by its token or key, permanently.

        It counts nothing from then on, whether it was counted, is in flight or never arrives.
          counter cancel orders --key order-123
          counter cancel stock -3 --token 5f3a0f0e-6f0c-4f7e-9d3b-0c5f1d2e3a4b@2026-01-31T08:15:30Z
          counter cancel views --operation clear --key monday
        """,
        "counters:clear": """
        Set a counter to 0, once: all earlier adds are erased.
          counter clear views
        """,
        "counters:delete": """
        Delete a counter, once: its count and its name.

        Tokens keep their answers. A later add counts from 0, and lists it again. On a terminal it
        asks, unless --yes is given.
          counter delete views
          counter delete views --yes
        """,
        "holds:hold": """
        Reserve an amount of a counter, once, and print the id of the hold.

        Bounds are kept with what is held. The hold is open until it is settled, released, or
        expires.
          counter hold spend 50 --expires-in 15m --at-most 1000
          counter hold stock -2 --expires-in 10m --at-least 0 --key order-123
        """,
        "holds:settle": """
        Count what the work cost, and end a hold.

        Send it as often as you like: it counts once. The cost has the sign of the hold, or is 0.
          counter settle AAZJqrFpTXpfOg8ObwxPfp07DF8dLjpLc3BlbmQ 37
        """,
        "holds:release": """
        Give all of a hold back: it counts nothing.
          counter release AAZJqrFpTXpfOg8ObwxPfp07DF8dLjpLc3BlbmQ
        """,
        "holds:extend": """
        Let a hold expire later.

        It never expires earlier than it would, and at most a tenth of retention after it began.
          counter extend AAZJqrFpTXpfOg8ObwxPfp07DF8dLjpLc3BlbmQ --expires-in 15m
        """,
        "holds:holds": """
        Print the open holds of a counter, those that expire first.
          counter holds spend
          counter holds spend --limit 0 --json
        """,
        "counters:list_": """
        Print counters with their counts, by name or the largest first.

        By count, all counters with the prefix are read: at most 10,000 may have it.
          counter list
          counter list eu/ --by count --limit 20
          counter list --limit 0 --json
        """,
        "look:watch": """
        Print a line for each change of a count: time, count, change.
          counter watch views
          counter watch views --for 1m --json
          counter watch views --count 1
        """,
        "look:top": """
        Show the counters with the most adds in the last seconds.

        If the service could not read all counters that changed, a note says so.
          counter top
          counter top --limit 20 --span 1m
        """,
        "look:history": """
        Print how a count changed over time.

        A line has the end of a step of time, the count then, and its change; empty steps are one
        line. Without --from it shows the last hour, as far as the rollup has come.
          counter history views
          counter history views --from 24h --step 1h
          counter history views --from 2026-01-01 --to 2026-02-01 --csv
        """,
        "look:events": """
        Print a counter's adds and clears, latest first.
          counter events views
          counter events views --from 1h --limit 0 --json
        """,
        "transfer:export": """
        Write the exact counts of a namespace to a file.

        The file is NDJSON with a checksum. Each count has the instant it is exact as of. If no
        client adds during the export, all counts are of the same moment.
          counter export counts.ndjson --namespace videos
          counter export - --prefix eu/ | gzip > counts.ndjson.gz
        """,
        "transfer:import_": """
        Count the lines of a file, each exactly once.

        Run it again as often as you like. The file is what counter export wrote; or NDJSON of
        objects with counter and count; or CSV with these two columns.
          counter import counts.ndjson --namespace videos --verify
          counter import counts.ndjson -n videos --create
          counter import redis.csv --add
        """,
        "counters:recount": """
        Recount a counter from its events.

        The rollup does so when the current window is closed. Counts normally need no recount:
        counter audit finds those that do.
          counter recount views
          counter recount views --json
        """,
        "doctor:doctor": """
        Report what is wrong with a deployment, and the fixes.

        It checks settings, store, clock and cache, and changes nothing.

        Run it with the flags, the environment and the directory of the process to check, also while
        that process runs. With --url it checks a running service as well.
          counter doctor --data ./data
          counter doctor --config cluster.toml --json
          counter doctor --url http://127.0.0.1:8080
        """,
        "completion:completion": """
        Print a shell completion script.
          counter completion bash > ~/.local/share/bash-completion/completions/counter
          counter completion zsh > ~/.zfunc/_counter
          counter completion fish > ~/.config/fish/completions/counter.fish
        """,
        "serve:serve": """
        Serve the REST API.

        With SQLite one process serves; with another store any number do. Settings come
        from these flags, else from the environment (COUNTER_PORT, COUNTER_DATA, ...),
        else from a TOML file (--config, or ./counter.toml).
          counter serve
          counter serve --port 9000 --data /srv/counter
          counter serve --config cluster.toml --cache memcached://c1
        """,
        "serve:rollup": """
        Roll up events in a store that processes share.

        Any number of these workers share the work; counter serve with SQLite rolls up by itself.
          counter rollup --config cluster.toml --cache memcached://c1
        """,
        "audit:audit": """
        Compare the stored totals with the event log.

        PostgreSQL and Cassandra can be in use; a data directory must not be served by any process.
          counter audit --all --data ./data
          counter audit --namespace videos --counter views --repair
        """,
        "backup:backup": """
        Copy the data directory, which may be in use.

        The copy is of one moment.
          counter backup /backups/monday --data ./data
        """,
        "backup:restore": """
        Restore a backup into a new data directory.
          counter restore /backups/monday --data ./data
        """,
    },
    "namespace": {
        "namespace:create": """
        Create a namespace.

        Omitted values are those of the service's settings.
          counter namespace create orders
          counter namespace create videos --counter-type eventual --accept-limit 1m
        """,
        "namespace:change": """
        Change settings of a namespace; omitted ones stay as they are.
          counter namespace change videos --cache-ttl 5s
          counter namespace change orders --event-rules rules.toml
          counter namespace change stock --at-least 0
          counter namespace change stock --no-bounds
        """,
        "namespace:list_": """
        Show all namespaces.
          counter namespace list
        """,
        "namespace:show": """
        Show a namespace's settings.
          counter namespace show videos
        """,
        "namespace:delete": """
        Delete a namespace with its counters, events and tokens, permanently.

        It asks for the name once more, unless --yes is given.
          counter namespace delete videos
          counter namespace delete videos --yes
        """,
    },
    "token": {
        "token:new": """
        Make tokens, one per line: use one for each add.

        They are made here, with this machine's time, unless --served is given.
          counter token new
          counter token new 10 --served
        """,
        "token:resolve": """
        Find the outcome of a token that was sent to a counter.

        It looks up the token's event. If there is none and DELTA is given, the same add is sent
        once more: a token in time is counted, and a late one is decided permanently.
          counter token resolve 5f3a0f0e-6f0c-4f7e-9d3b-0c5f1d2e3a4b@2026-01-31T08:15:30Z views
          counter token resolve key:order-123 orders 1
        """,
    },
    "key": {
        "key:create": """
        Create a key, and print it; it cannot be shown again.
          counter key create --namespace videos --scope write --label web
          counter key create --namespace '*' --scope admin --expires 90d
        """,
        "key:list_": """
        Show all stored keys.
          counter key list --json
        """,
        "key:rotate": """
        Create a key to replace another one.
          counter key rotate pbay5xaap5pt --grace 1d
        """,
        "key:revoke": """
        Revoke a key permanently.
          counter key revoke pbay5xaap5pt
        """,
    },
    "context": {
        "context:add": """
        Add a context: a service, with its namespace and API key, under a name.

        The contexts are in ~/.config/counter (or in $XDG_CONFIG_HOME/counter), in a file that only
        you can read.
          counter context add prod --url https://counts.example --api-key-file prod.key
          counter context add local --url http://127.0.0.1:8080 --namespace videos
        """,
        "context:list_": """
        Show all contexts, with only the ids of their API keys.
          counter context list
          counter context list --json
        """,
        "context:use": """
        Make a context the current one: commands use its service.

        It is used if neither --context, --url, COUNTER_CONTEXT nor COUNTER_URL names a service.
          counter context use prod
        """,
        "context:remove": """
        Remove a context, with its API key.
          counter context remove prod
        """,
    },
    "plan": {
        "plan:dedup": """
        Plan the store that recognizes repeated tokens.
          counter plan dedup --rate 80/s --caller 10s --retry 90s --clock 5s
        """,
        "plan:storage": """
        Plan how one counter's events are partitioned.
          counter plan storage --events-per-day 43e6 --retention 7d
        """,
    },
    "schema": {
        "serve:apply": """
        Create or update the schema; safe to run repeatedly.
          counter schema apply --config cluster.toml
        """,
        "backup:restored": """
        Prepare a restored database, or restored keyspaces.

        After that no id or token is issued twice.
          counter schema restored --config cluster.toml
        """,
    },
    "config": {
        "serve:check": """
        Print the effective settings, with the source of each.
          counter config check --config counter.toml
          counter config check --json
        """,
    },
}


def _help_of(text: str) -> str:
    """Compose the help of a command from its text in ``_COMMANDS``."""
    what, _, examples = cleandoc(text).partition("\n  ")
    what = "\n\n".join(each.replace("\n", " ") for each in what.split("\n\n"))
    return f"{what}\n\nFor example:\n  {examples}\n\n{_CODES}"


def _error_of(error: CycloptsError) -> Text:
    """Format an error of the words of a command as all other errors are."""
    words = " ".join(["counter", *(error.command_chain or ())])
    lines = (_what_is_wrong(error), f"{words} --help shows how it is used")
    return Text("\n".join(f"counter: {printable(each)}" for each in lines))


def _what_is_wrong(error: CycloptsError) -> str:
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        name = error.argument.name
        return f"{error.keyword} needs a value" if error.keyword else f"{name} is missing"
    if isinstance(error, UnusedCliTokensError):
        return f"{' '.join(error.unused_tokens or ())[:80]!r} is more than the command takes"
    return str(error)


def _place_of(name: str) -> dict[str, Any]:
    """Return the panel of a command in ``counter --help``, and its place there."""
    for panel, names in _PANELS:
        if name in names:
            return {"group": panel, "sort_key": names.index(name)}
    raise KeyError(f"{name}: add it to a panel of _PANELS")


def _usage_of(words: str) -> dict[str, Any]:
    """Return the usage line of a command, if the names of its parameters do not show it."""
    if words not in _ARGUMENTS:
        return {}
    return {"usage": f"Usage: counter {words} [OPTIONS] {_ARGUMENTS[words]}"}


class _Help(Console):
    """Prints help as :func:`counter.cli.terminal.print_out` prints answers."""

    def print(self, *objects: Any, **how: Any) -> None:
        with printing():
            super().print(*objects, **how)

    def on_broken_pipe(self) -> None:
        raise OutputError


app = App(
    name="counter",
    help="A distributed counter service: every acknowledged add counts exactly once.",
    help_format="plaintext",
    error_formatter=_error_of,
    console=_Help(),
    # The lines of an error are not wrapped.
    error_console=Console(stderr=True, soft_wrap=True),
    group_commands=Group("Options", sort_key=len(_PANELS) + 1),
    version=__version__,
    config=(fill_from_context,),
)
for _group, _commands in _COMMANDS.items():
    _of = app
    if _group:
        _place = _place_of(_group)
        _of = App(name=_group, help=_GROUPS[_group], group_commands="Commands", **_place)
        app.command(_of)
    for _path, _text in _commands.items():
        # A function may not be named list or import.
        _name = _path.partition(":")[2].rstrip("_")
        _words = f"{_group} {_name}".strip()
        _more = _usage_of(_words) | ({} if _group else _place_of(_name))
        _of.command(f"counter.cli.commands.{_path}", name=_name, help=_help_of(_text), **_more)


def main() -> None:
    """Run the command line."""
    StandardError(sys.stderr).install()
    try:
        app()
    except OutputError as error:
        give_up_output(error)
        raise SystemExit(EXIT_UNREAD) from None
