"""Run the command line, for ``python -m counter`` and the script ``counter``.

The SDK alone also installs it: if a command needs a part that is not installed, the error names the
command that installs it.
"""

import sys
from typing import Final

#: The packages that every command needs; any other missing package belongs to the server.
_COMMAND_LINE: Final = ("cyclopts", "rich")
#: If one of these is not found, it is a bug and not a part that was left out.
_OURS: Final = ("counter", "api", "rollup")
#: The exit code of a command that cannot start.
_EXIT_CANNOT_START: Final = 2
#: The exit code that shells use for an interrupted program.
_EXIT_INTERRUPTED: Final = 130


def main() -> None:
    """Run the command line."""
    try:
        from counter.cli.app import main as run

        run()
    except KeyboardInterrupt:
        # Interrupted before the command began; later a command handles this itself.
        raise SystemExit(_EXIT_INTERRUPTED) from None
    except ImportError as error:
        missing = _missing(error)
        if missing is None:
            raise
        part, how = "the server, which this takes,", ""
        if missing in _COMMAND_LINE:
            part = "the command line"
            how = " in its checkout, pip install '.[cli]' to ask a service, or, to serve too,"
        sys.stderr.write(
            f"counter: {part} is not installed (there is no module {missing}):{how}"
            " pip install '.[server]' in its checkout\n"
        )
        raise SystemExit(_EXIT_CANNOT_START) from None


def _missing(error: BaseException | None) -> str | None:
    """Return the package that *error* or one of its causes did not find; None for other errors."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            package = error.name.partition(".")[0]
            return None if package in _OURS else package
        error = error.__cause__
    return None


if __name__ == "__main__":
    main()
