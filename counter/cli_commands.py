"""What the commands against a running service are called, and what their help says.

Each is imported when it is run; see docs/cli.md.
"""

from __future__ import annotations

from typing import Final

from cyclopts import App

from counter.cli_help import INTERRUPTED, helped

_READS: Final = (
    "0; 1 if there is no such thing, or it may not be seen; 2 if a value cannot be"
    f" read, or the service cannot be reached or cannot tell now; {INTERRUPTED}."
)
_ADDS: Final = (
    "0 if it is counted; 1 if it is not and never will be under this token; 2 if a"
    " value cannot be read, or nothing could be sent; 4 if nobody knows: the command that finds"
    f" out, and counts it at most once, is printed; {INTERRUPTED}, likewise."
)


def add_service_commands(app: App) -> None:
    """Give *app* the commands that ask a running service."""
    app.command(
        "counter.cli_add:add",
        help=helped(
            "Add to a counter, once.",
            """
            counter add views
            counter add stock -3
            counter add views 5 --get
            counter add orders --key order-123
            """,
            _ADDS,
            "One token is made before anything is sent, and goes with every attempt.",
        ),
    )
    app.command(
        "counter.cli_get:get",
        help=helped(
            "Print the counts of counters: of one the number alone.",
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
        "counter.cli_add:clear",
        help=helped(
            "Set a counter to 0, once: all that was added until now is erased.",
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
    """The commands that look at a counter, now and back."""
    app.command(
        "counter.cli_watch:watch",
        help=helped(
            "Show a count as it changes, how fast, and the changes of the last 40 seconds.",
            """
            counter watch views
            counter watch views --for 1m --json
            counter watch views --count 1
            """,
            _READS.replace("0;", "0 where --for or --count ended it;", 1),
            "Where the output is no terminal, a line for each change: when, the count, the change.",
        ),
    )
    app.command(
        "counter.cli_top:top",
        help=helped(
            "Show the counters that are added to the most just now, or the highest.",
            """
            counter top
            counter top --live --limit 20
            counter top --by count
            """,
            _READS,
            "By adds, the service tells of the last seconds; where it could not look at all that"
            " changed, that is said. By count, every counter is read.",
        ),
    )
    app.command(
        "counter.cli_history:history",
        help=helped(
            "Print the count at the end of each step of time, and its change.",
            """
            counter history views
            counter history views --from 24h --step 1h --plot
            counter history views --from 2026-01-01T00:00:00Z --to 2026-02-01T00:00:00Z --csv
            """,
            _READS,
            "It is the last hour without --from, as far as the rollup has come.",
        ),
    )
    app.command(
        "counter.cli_history:events",
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
    """``counter namespace ...``."""
    namespace = App(name="namespace", help="Namespaces: sets of counters with their settings.")
    app.command(namespace)
    where = "counter.cli_namespace:"
    namespace.command(
        f"{where}create",
        help=helped(
            "Make a namespace.",
            """
            counter namespace create videos --counter-type EVENTUAL
            counter namespace create orders --counter-type ACCURATE --accept-limit 1m
            """,
            _READS.replace("no such thing", "one of the name already"),
            "What is left out is as the service's settings have it.",
        ),
    )
    namespace.command(
        f"{where}change",
        help=helped(
            "Change what can be changed of a namespace; what is left out stays.",
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
            "Delete a namespace with its counters, events and tokens, for ever.",
            """
            counter namespace delete videos
            counter namespace delete videos --yes
            """,
            _READS.replace("no such thing", "no such namespace, or its name was not repeated"),
            "It asks for the name once more, unless --yes is given.",
        ),
    )


def _add_tokens(app: App) -> None:
    """``counter token ...``."""
    token = App(name="token", help="Tokens: what makes an add the same add when it is sent again.")
    app.command(token)
    token.command(
        "counter.cli_token:new",
        help=helped(
            "Make tokens, one a line: one for each add that you mean.",
            """
            counter token new
            counter token new 10 --served
            """,
            _READS,
            "They are made here, with this machine's time, unless --served is given.",
        ),
    )
    token.command(
        "counter.cli_token:show",
        help=helped(
            "Tell a token's time and age, and whether it is still in time.",
            """
            counter token show 5f3a0f0e-6f0c-4f7e-9d3b-0c5f1d2e3a4b@2026-01-31T08:15:30Z
            """,
            _READS,
        ),
    )
    token.command(
        "counter.cli_token:derive",
        help=helped(
            "Print the token of a step of a work: the same on every machine, every time.",
            """
            counter token derive key:order-123 stock
            """,
            "0; 2 if a value cannot be read.",
        ),
    )
    token.command(
        "counter.cli_token:resolve",
        help=helped(
            "Ask what became of a token that was sent to a counter.",
            """
            counter token resolve 5f3a0f0e-6f0c-4f7e-9d3b-0c5f1d2e3a4b@2026-01-31T08:15:30Z views
            counter token resolve key:order-123 orders 1
            """,
            _ADDS,
            "It looks for its event. Where there is none and DELTA is given, the very same is sent"
            " once more: a token in time is counted by that, and of a late one the service decides"
            " for ever.",
        ),
    )
