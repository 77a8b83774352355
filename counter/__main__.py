"""``python -m counter``, and the script ``counter``. It comes with the SDK alone as well: where a
part is not installed that a command takes, it says how to install it."""

import sys
from typing import Final

#: What every command takes; whatever else is missing is the server's.
_COMMAND_LINE: Final = ("cyclopts", "rich")
#: That one of these is not found is a fault, and no part that was left out.
_OURS: Final = ("counter", "api", "rollup")
#: What a command ends with that cannot start.
_EXIT_CANNOT_START: Final = 2
#: What a shell tells of a program that was interrupted.
_EXIT_INTERRUPTED: Final = 130


def main() -> None:
    """Run the command line."""
    try:
        from counter.cli.app import main as run

        run()
    except KeyboardInterrupt:
        # Before the command began, or it would have said what became of it.
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
    """The package that *error*, or what it came of, did not find; None for another fault."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            package = error.name.partition(".")[0]
            return None if package in _OURS else package
        error = error.__cause__
    return None


if __name__ == "__main__":
    main()
