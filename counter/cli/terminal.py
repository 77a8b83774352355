"""Print to standard output and error, as text, tables or JSON."""

from __future__ import annotations

import json
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import IO, Annotated, Any, BinaryIO, Final, Literal, NoReturn, TypeVar, cast

from cyclopts import Parameter

from counter.clock import to_rfc3339, to_us
from counter.errors import CounterError, StartupError
from counter.quantities import parse_duration

_Value = TypeVar("_Value")
#: Exit code of a command that cannot start, or has wrong settings.
EXIT_CANNOT_START: Final = 2
#: Exit code that shells use for an interrupted program.
EXIT_INTERRUPTED: Final = 130
#: Exit code that shells use for a closed pipe: the output was not printed.
EXIT_UNREAD: Final = 141
#: Characters that may need escaping; most texts have none.
_UNUSUAL: Final = re.compile(r"[^ -~]")
#: Joiners that emoji and some scripts need, which str.isprintable() rejects.
_JOINERS: Final = "\u200c\u200d"


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Exit with EXIT_CANNOT_START after a StartupError, and print its message."""
    try:
        yield
    except StartupError as error:
        _fail(str(error))
    except CounterError as error:
        _fail(error.detail)


class OutputError(Exception):
    """Standard output cannot be written: the disk may be full. It has no text if its reader is
    gone."""


@contextmanager
def printing() -> Iterator[None]:
    """Raise OutputError if standard output cannot be written.

    Writing another file may fail for the same reasons, and must be distinguished.
    """
    try:
        yield
    except BrokenPipeError as error:
        raise OutputError from error
    except OSError as error:
        raise OutputError(f"standard output: {error.strerror or error}") from error


def give_up_output(error: OutputError) -> None:
    """Report that standard output cannot be written, unless it is a closed pipe, which is usual;
    discard the rest: otherwise Python tries to write it at exit."""
    if sys.stdout is not None:
        _discard(sys.stdout)
    if str(error):
        remark(str(error))


@contextmanager
def exiting(code: int) -> Iterator[None]:
    """Exit with *code* after printing, even if that fails: the code reports the outcome to a
    script. With 0, go on, and let the OutputError pass."""
    try:
        yield
    except OutputError as error:
        if code == 0:
            raise
        give_up_output(error)
    if code != 0:
        raise SystemExit(code)


class StandardError:
    """Standard error that discards text which it cannot write: nothing is left to report that
    to, and a traceback would replace the exit code."""

    def __init__(self, file: IO[str] | None) -> None:
        # A shell may have closed it.
        self._file = file or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    def install(self) -> None:
        """Make it ``sys.stderr``."""
        sys.stderr = cast("Any", self)

    def write(self, text: str) -> int:
        """Write *text*."""
        with self._unfailing():
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush it."""
        with self._unfailing():
            self._file.flush()

    @contextmanager
    def _unfailing(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            _discard(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _discard(file: IO[str]) -> None:
    """Discard the buffer of *file*, and everything that is written to it later."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def printable(text: str, *, lines: bool = False, encoding: str = "utf-8") -> str:
    """Escape, as in JSON, everything in *text* that controls a terminal or changes the writing
    direction, and what *encoding* does not have. *lines* keeps line breaks and tabs.

    All printed text passes through here: names, problems and files may come from anyone.
    """
    return _UNUSUAL.sub(partial(_escaped, "\n\t" if lines else "", encoding), text)


def _escaped(kept: str, encoding: str, found: re.Match[str]) -> str:
    char = found[0]
    if char in kept:
        return char
    is_shown = char.isprintable() or char in _JOINERS or unicodedata.category(char) == "Zs"
    return char if is_shown and _is_encodable(char, encoding) else json.dumps(char)[1:-1]


def _is_encodable(char: str, encoding: str) -> bool:
    try:
        char.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def output_encoding() -> str:
    """Return the encoding of standard output."""
    return getattr(sys.stdout, "encoding", None) or "utf-8"


def output_bytes() -> BinaryIO:
    """Return standard output for a file or lines that a program reads, in UTF-8. Raises
    OutputError if it is closed."""
    if sys.stdout is None:
        raise OutputError("standard output is closed")
    return sys.stdout.buffer


def print_out(text: str, warnings: Iterable[str] = ()) -> None:
    """Print *text*, and then *warnings* to standard error. Raises OutputError."""
    with printing():
        print(printable(text, lines=True, encoding=output_encoding()), flush=True)
    for each in warnings:
        print(f"counter: warning: {printable(each)}", file=sys.stderr)


def remark(text: str) -> None:
    """Print *text* to standard error, with the program's name."""
    for line in text.split("\n"):
        print(f"counter: {printable(line)}", file=sys.stderr)


def print_error(text: str, end: str = "\n") -> None:
    """Print *text* on standard error without a prefix: to be copied, or answered."""
    print(printable(text, lines=True), end=end, file=sys.stderr, flush=True)


def _fail(message: str) -> NoReturn:
    remark(message)
    raise SystemExit(EXIT_CANNOT_START)


def flag(what: str, word: str | None = None, **more: Any) -> Parameter:
    """Return the description of a flag or an argument: its help, without the final dot, and the
    word for its value."""
    return Parameter(help=f"{what}.", metavar=word, negative="", show_default=default_shown, **more)


def default_shown(value: object) -> str | None:
    """Return the default of a flag for its help; None for one that says nothing."""
    return None if value is None or value in (False, (), "") else str(value)


#: The flag of commands that print one answer, and of those that print several.
Json = Annotated[bool, flag("Print JSON")]
JsonLines = Annotated[bool, flag("Print JSON, one document per line")]
From = Annotated[
    str | None,
    flag("The start: an instant, how long ago, like 24h, or today", "TIME", name="--from"),
]
To = Annotated[str | None, flag("The end, exclusive [now]", "TIME", name="--to")]
TimeZone = Annotated[str | None, flag("The time zone of days: Europe/Berlin [UTC]", "ZONE")]
#: An instant, or the beginning of the day.
Moment = datetime | Literal["today"]
_SECOND_CHARS: Final = len("2026-01-31T08:15:30")


def print_answer(text: str, body: object, *, json: bool, indent: int | None = None) -> None:
    """Print *body* as JSON if *json*, else *text*."""
    print_out(json_line(body, indent) if json else text)


def json_line(body: object, indent: int | None = None) -> str:
    """Return *body* as JSON, on one line without *indent*. Instants are written as the service
    writes them."""
    if is_dataclass(body) and not isinstance(body, type):
        body = asdict(body)
    return json.dumps(body, ensure_ascii=False, default=_text, indent=indent)


def _text(value: object) -> str:
    return instant(value) if isinstance(value, datetime) else str(value)


def instant(moment: datetime) -> str:
    """Format *moment* in RFC 3339, to the microsecond."""
    return to_rfc3339(to_us(moment))


def second(moment: datetime) -> str:
    """Format *moment* for people, to the second."""
    return instant(moment)[:_SECOND_CHARS].replace("T", " ") + "Z"


def signed(number: int) -> str:
    """Format *number* with its sign, so that a change does not look like a count."""
    return f"{number:+}"


def listing(fields: Mapping[str, object]) -> str:
    """Format *fields* with one line each; None is a dash."""
    width = max(map(len, fields))
    return "\n".join(
        f"{printable(name):<{width}}  {printable('-' if value is None else str(value))}"
        for name, value in fields.items()
    )


def table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format columns with a header, as wide as necessary: a shortened name or token could not be
    copied. Numbers are right-aligned."""
    from rich.cells import cell_len

    encoding = output_encoding()
    cells = [[printable(str(cell), encoding=encoding) for cell in row] for row in rows]
    right = [bool(rows) and all(_is_number(row[at]) for row in rows) for at in range(len(names))]
    lines = [list(names), *cells]
    widths = [max(cell_len(line[at]) for line in lines) for at in range(len(names))]
    shown = []
    for line in lines:
        parts = []
        for cell, width, is_right in zip(line, widths, right, strict=True):
            gap = " " * (width - cell_len(cell))
            parts.append(gap + cell if is_right else cell + gap)
        shown.append("  ".join(parts).rstrip())
    return "\n".join(shown)


def _is_number(cell: object) -> bool:
    return isinstance(cell, int | float) or str(cell).lstrip("+-").replace(".", "").isdecimal()


def parsed(name: str, text: str, parse: Callable[[str], _Value]) -> _Value:
    """Return the value of the flag *name*. Raises StartupError if *parse* raises ValueError."""
    try:
        return parse(text)
    except ValueError as error:
        raise StartupError(f"--{name}: {error}") from error


def span_of(
    start: str | None, end: str | None, window_us: int = 1
) -> tuple[Moment | None, Moment | None]:
    """Parse the flags ``--from`` and ``--to``; how long ago is rounded down to the end of a window.
    Raises StartupError."""
    now_us = to_us(datetime.now(UTC))
    return _moment_of("from", start, now_us, window_us), _moment_of("to", end, now_us, window_us)


def _moment_of(name: str, text: str | None, now_us: int, window_us: int) -> Moment | None:
    """Parse the instant of the flag *name*: RFC 3339, ``today``, or a duration before now. Raises
    StartupError."""
    if text is None or text == "today":
        return cast("Moment | None", text)
    try:
        at_us = now_us - parse_duration(text)
        return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=at_us - at_us % window_us)
    except (ValueError, OverflowError):
        pass
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise StartupError(
            f"--{name}: {text[:40]!r} is not an instant; write it like 2026-01-31T08:15:30Z, or how"
            " long ago it was, like 24h, or today"
        ) from None
    # Without an offset it could be local time or UTC; the answers are in UTC.
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
