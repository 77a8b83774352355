"""Run the command line, for ``python -m counter`` and the script ``counter``.

The server works without the client: if a command asks a service and the client is not installed,
the error says how to install it.
"""

import sys
from typing import Final

from counter import how_to_install

#: The client, and what it needs that the server does not.
_CLIENT: Final = ("counter_client", "httpx")
#: The exit code of a command that cannot start.
_EXIT_CANNOT_START: Final = 2
#: The exit code that shells use for an interrupted program.
_EXIT_INTERRUPTED: Final = 130


def main() -> None:
    """Run the command line."""
    try:
        from counter.background import importing

        with importing():
            from counter.cli.app import main as run

        run()
    except KeyboardInterrupt:
        # Interrupted before the command began; later a command handles this itself.
        raise SystemExit(_EXIT_INTERRUPTED) from None
    except ImportError as error:
        missing = _missing(error)
        if missing not in _CLIENT:
            raise
        sys.stderr.write(
            "counter: this command asks a service, and the client is not installed (there is no"
            f" module {missing}): {how_to_install('client')}\n"
        )
        raise SystemExit(_EXIT_CANNOT_START) from None


def _missing(error: BaseException | None) -> str | None:
    """Return the package that *error* or one of its causes did not find; None for other errors."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            return error.name.partition(".")[0]
        error = error.__cause__
    return None


if __name__ == "__main__":
    main()
