"""What the commands that move counts, and mend, are called, and what their help says."""

from __future__ import annotations

from cyclopts import App

from counter.cli_help import helped


def add_moving_commands(app: App) -> None:
    """Give *app* the commands that move counts between systems, and that mend."""
    app.command(
        "counter.cli_export:export",
        help=helped(
            "Write the exact counts of a namespace to a file: NDJSON, with a checksum.",
            """
            counter export counts.ndjson --namespace videos
            counter export - --prefix eu/ | gzip > counts.ndjson.gz
            """,
            "0 if the file is whole; 1 if the service refuses; 2 if it cannot be done; 130 if it"
            " was interrupted: the same command goes on where it was.",
            "Each count has the instant it is exact as of. Where nobody adds meanwhile, all are as"
            " of the same moment.",
        ),
    )
    app.command(
        "counter.cli_import:import_",
        name="import",
        help=helped(
            "Count the lines of a file, each exactly once, however often this is run.",
            """
            counter import counts.ndjson --namespace videos --verify
            counter import redis.csv --add
            """,
            "0 if all lines are counted; 1 if it is refused, or --verify finds a difference; 2 if"
            " it cannot be done, and nothing is counted; 4 if it broke off amid it, and 130 if it"
            " was interrupted: the same command goes on where it was.",
            "The file is what counter export wrote; or NDJSON of objects with counter and count; or"
            " CSV with these two columns.",
        ),
    )
    _add_looks(app)


def _add_looks(app: App) -> None:
    """What mends, and what tells what is to be mended."""
    app.command(
        "counter.cli_recount:recount",
        help=helped(
            "Have a counter counted anew from its events, and say whether that changed its count.",
            """
            counter recount views
            counter recount views --json
            """,
            "0 if the count was right; 1 if it was not, and now is, or if the service refuses; 2 if"
            " it cannot be done; 4 if the recount is not done yet; 130 if it was interrupted: what"
            " was asked for is done all the same.",
            "Counts need no recount: this is for doubt. counter audit looks at all of them.",
        ),
    )
    app.command(
        "counter.cli_doctor:doctor",
        help=helped(
            "Look at settings, clock, disk, store, cache and keys, say what is wrong, and what to"
            " do. It changes nothing.",
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
        "counter.cli_completion:completion",
        help=helped(
            "Print what completes the words of counter in a shell.",
            """
            counter completion bash > ~/.local/share/bash-completion/completions/counter
            counter completion zsh > ~/.zfunc/_counter
            counter completion fish > ~/.config/fish/completions/counter.fish
            """,
            "0; 2 if it knows no such shell.",
        ),
    )
