"""Run ``counter add --stream``: add the lines of standard input.

The client's buffer merges them by counter and sends batches, each item with one token for all of
its attempts. A line with bounds is not merged: it is sent by itself, after all lines before it, and
is counted or refused before the next one is read. A signal ends the reading between two lines,
never the adding of one: so the number of lines that are counted is known.
"""

from __future__ import annotations

import signal
import sys
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Final

from counter.cli.client import (
    EXIT_BOUND,
    EXIT_NO,
    EXIT_NOT_DONE,
    EXIT_UNKNOWN,
    FINISHING,
    ServiceFlags,
    delta_of,
    duration_us,
    explain,
    fail,
    finishing,
    open_client,
    options_of,
)
from counter.cli.terminal import (
    exiting,
    output_bytes,
    print_error,
    print_out,
    printing,
    remark,
)
from counter.errors import StartupError
from counter.limits import ADD_STREAM_LINE_BYTES_MAX, SECOND
from counter.quantities import plural
from counter_client import (
    BoundReachedError,
    Bounds,
    Buffer,
    CounterClient,
    Flush,
    Rejected,
    RejectedError,
    UnknownOutcomeError,
    UnsentError,
)
from counter_client.errors import CounterError, TokenTooOldError
from counter_client.tokens import NO_BOUNDS, Add, checked_bounds, checked_name

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def add_lines(service: ServiceFlags, bounds: Bounds = NO_BOUNDS) -> None:
    """Add each line of standard input, until it ends or a signal comes.

    A line is ``NAME`` or ``NAME DELTA``, with a tab between them if the name has spaces; then
    ``at_least=NUMBER`` and ``at_most=NUMBER``, if they are not those of *bounds*. The first line
    that is not like this ends the stream too. Exits with the codes of :mod:`counter.cli.client`.
    """
    stream = _Stream(service, bounds)
    options = replace(options_of(service), on_flush=stream.record_refusal)
    with open_client(service, options) as client, _signals(stream):
        buffer = client.buffer()
        failure: Exception | None = None
        try:
            stream.add_to(client, buffer)
        except (StartupError, CounterError) as error:
            failure = error
        try:
            # The rest has had its time if it could not be sent.
            buffer.close(0 if isinstance(failure, CounterError) else stream.timeout_s)
        except RejectedError as error:
            stream.rejected += error.items
        except UnsentError as error:
            if isinstance(failure, StartupError):
                remark(str(failure))
            failure = error
    stream.end(failure)


class _Stream:
    """The lines and their outcomes."""

    def __init__(self, service: ServiceFlags, bounds: Bounds) -> None:
        self.timeout_s = duration_us("timeout", service.timeout) / SECOND
        self.signal: signal.Signals | None = None
        self.is_reading = False
        #: What the service rejected of the lines that were merged.
        self.rejected: tuple[Rejected, ...] = ()
        self._service = service
        self._lines = 0
        self._sum = 0
        self._bounds = bounds
        #: How many lines were refused because of their own bounds.
        self._refused = 0
        self._is_merging = False
        #: The refusal of every batch, if there is one.
        self._refusal: CounterError | None = None

    def record_refusal(self, flush: Flush) -> None:
        """Record a batch that is refused and will always be, as with a key that was revoked."""
        if flush.error is not None and flush.error.retry == "never":
            self._refusal = flush.error

    def add_to(self, client: CounterClient, buffer: Buffer) -> None:
        """Add the lines. Raises StartupError for one that is wrong, and CounterError if no line is
        sent in time."""
        for number, line in enumerate(self._read(), start=1):
            if not line.strip():
                continue
            add = _item(line, number, self._bounds)
            if add.bounds != NO_BOUNDS:
                if self._is_merging:
                    self._flush(buffer)
                self._add_bounded(client, add, number)
                continue
            buffer.add(add.counter, add.delta, timeout=self.timeout_s)
            self._is_merging = True
            self._lines += 1
            self._sum += add.delta
            if self._lines == 1:
                # A wrong URL or key shows before more is read.
                self._flush(buffer)
            if self._refusal is not None:
                raise self._refusal

    def _flush(self, buffer: Buffer) -> None:
        """Wait until all lines so far are counted or rejected. Raises UnsentError."""
        self._is_merging = False
        try:
            buffer.flush(self.timeout_s)
        except RejectedError as error:
            self.rejected += error.items

    def _add_bounded(self, client: CounterClient, add: Add, number: int) -> None:
        """Add one line with bounds, and report if it is refused. Raises CounterError."""
        try:
            client.add(add.counter, add.delta, **add.bounds._asdict())
        except BoundReachedError as error:
            self._refused += 1
            remark(f"line {number}: {explain(error)}")
            return
        except UnknownOutcomeError as error:
            self._lines += 1
            raise UnsentError(error.detail, (error.unfinished,), {}) from error.__cause__
        self._lines += 1
        self._sum += add.delta

    def _read(self) -> Iterator[bytes]:
        if sys.stdin is None:
            raise StartupError("standard input is closed: --stream reads lines from it")
        mark = BOM_UTF8
        while self.signal is None:
            self.is_reading = True
            try:
                line = sys.stdin.buffer.readline(ADD_STREAM_LINE_BYTES_MAX + 1)
            except KeyboardInterrupt:
                return
            finally:
                self.is_reading = False
            if not line:
                return
            yield line.removeprefix(mark)
            mark = b""

    def end(self, failure: Exception | None) -> None:
        """Print how many lines are counted; exit unless all are."""
        lines = plural(self._lines, "line is counted, which comes", "lines are counted, which come")
        counted = f"{lines} to {self._sum:,}"
        if self._refused:
            refused = plural(self._refused, "line is refused", "lines are refused")
            counted += f"; {refused} because of a bound"
        if isinstance(failure, UnsentError) or self.rejected:
            self._end_with_left(failure)
            return
        if failure is not None:
            why = explain(failure, self._service) if isinstance(failure, CounterError) else failure
            fail(f"{why}\n{counted}; no line after that", EXIT_NOT_DONE)
        if self.signal is not None:
            fail(f"interrupted: {counted}", 128 + self.signal)
        with exiting(EXIT_BOUND if self._refused else 0):
            print_out(counted)

    def _end_with_left(self, error: Exception | None) -> None:
        """Print the adds that are not counted, or not known to be, for another attempt; exit."""
        code, rejected = EXIT_BOUND, self.rejected
        unsent: Mapping[str, int] = {}
        if isinstance(error, UnsentError):
            code, rejected, unsent = EXIT_UNKNOWN, rejected + error.rejected, error.unsent
            cause = error.__cause__
            remark(explain(cause, self._service) if isinstance(cause, CounterError) else str(error))
            if error.unfinished:
                remark(f"it is unknown whether these are counted\n{FINISHING}")
            for unfinished in error.unfinished:
                print_error(finishing(unfinished, self._service))
        elif error is not None:
            code = EXIT_NO
            remark(explain(error, self._service) if isinstance(error, CounterError) else str(error))
        for each in rejected:
            # A token that is too old and not void: nothing is known of an earlier attempt.
            may_be = isinstance(each.error, (UnknownOutcomeError, TokenTooOldError))
            if may_be:
                code = EXIT_UNKNOWN
            elif code == EXIT_BOUND and not isinstance(each.error, BoundReachedError):
                code = EXIT_NO
            what = "may be counted" if may_be else "is not counted"
            remark(f"{each.counter}: {each.delta:+} {what}: {explain(each.error)}")
        if unsent:
            remark("what is not counted is on standard output, as lines for add --stream")
        read = plural(self._lines + self._refused, "line was", "lines were")
        remark(f"{read} read; what is not named here is counted")
        with exiting(code), printing():
            for counter, delta in unsent.items():
                output_bytes().write(f"{counter}\t{delta}\n".encode())
                output_bytes().flush()


@contextmanager
def _signals(stream: _Stream) -> Iterator[None]:
    """Let signals end the reading of *stream*, and nothing else."""

    def interrupt(number: int, _: FrameType | None) -> None:
        stream.signal = signal.Signals(number)
        if stream.is_reading:
            raise KeyboardInterrupt

    before = {each: signal.signal(each, interrupt) for each in _SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _item(line: bytes, number: int, bounds: Bounds) -> Add:
    """Return the add of a line, with *bounds* unless it has its own. Raises StartupError."""
    try:
        if len(line) > ADD_STREAM_LINE_BYTES_MAX:
            raise StartupError(f"it has more than {ADD_STREAM_LINE_BYTES_MAX:,} bytes")
        text = line.decode().strip("\r\n")
        counter, tab, rest = text.partition("\t")
        words = rest.split()
        if not tab:
            counter, *words = text.split()
        own = {}
        while words and "=" in words[-1]:
            name, _, bound = words.pop().partition("=")
            if name not in Bounds._fields:
                raise StartupError(f"{name[:40]!r} is neither at_least nor at_most")
            own[name] = delta_of(bound, name)
        if len(words) > 1:
            raise StartupError(
                "it has more than a NAME and a DELTA; put a tab between them if a name has spaces"
            )
        kept = checked_bounds(bounds._replace(**own))
        return Add(checked_name(counter), delta_of("".join(words) or "1"), kept)
    except (StartupError, CounterError, UnicodeDecodeError) as error:
        raise StartupError(f"line {number}: {error}") from error
