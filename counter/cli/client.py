"""Share what the commands against a running service need: its address, a client, and exit codes."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Final, NoReturn

from cyclopts import Parameter

from counter.cli.terminal import (
    EXIT_CANNOT_START,
    EXIT_INTERRUPTED,
    EXIT_UNREAD,
    OutputError,
    flag,
    parsed,
    print_error,
    printing,
    read_no_more,
    remark,
)
from counter.durations import parse_iso_duration
from counter.errors import StartupError
from counter.limits import SECOND
from counter.tokens import token_of_uuid7
from counter_client import (
    Attempt,
    CounterClient,
    Key,
    Options,
    Token,
    Unfinished,
    UnknownOutcomeError,
    UnreachableError,
)
from counter_client.errors import (
    BadRequestError,
    CounterError,
    KeyInvalidError,
    KeyMissingError,
    NotSupportedError,
    TokenTooOldError,
    UnavailableError,
)

#: Exit codes of these commands besides 0, done.
EXIT_NO: Final = 1
#: As if a process cannot start: bad input, or nothing could be done and nothing is changed.
EXIT_NOT_DONE: Final = EXIT_CANNOT_START
EXIT_UNKNOWN: Final = 4

#: The environment variable of the key: a flag would be visible in the list of processes.
KEY_VARIABLE: Final = "COUNTER_API_KEY"
_DEFAULT_URL: Final = "http://127.0.0.1:8080"
_ATTEMPT_S_MAX: Final = 5.0
#: Fixes for error codes of the service, in terms of the command line.
_HINTS: Final[Mapping[str, str]] = {
    "namespace_unknown": "counter namespace list shows what there is; counter namespace create"
    " makes one",
    "key_missing": f"put it into the environment as {KEY_VARIABLE}, or name its file with"
    " --api-key-file",
    "key_invalid": f"it came from --api-key-file, or else from {KEY_VARIABLE} in the environment",
}


@Parameter(name="*", group="Service")
@dataclass(frozen=True, kw_only=True)
class PlaceFlags:
    """The address of the service, and the credentials."""

    url: Annotated[
        str,
        flag(
            "The service; several URLs, separated by commas, are tried in order",
            env_var="COUNTER_URL",
        ),
    ] = _DEFAULT_URL
    api_key_file: Annotated[
        Path | None, flag(f"A file with the API key [{KEY_VARIABLE} in the environment]")
    ] = None
    tls_ca: Annotated[
        Path | None, flag("The authority of the service's certificate [the usual ones]")
    ] = None
    tls_cert: Annotated[Path | None, flag("This client's certificate, if it needs one")] = None
    tls_key: Annotated[Path | None, flag("The key of that certificate")] = None
    timeout: Annotated[str, flag("The time limit, including retries")] = "10s"

    def words(self) -> list[str]:
        """Return these flags as words of a command line, without those that the environment or
        the defaults supply."""
        given: list[str] = []
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None or each.name == "timeout":
                continue
            if value != each.default or f"COUNTER_{each.name.upper()}" in os.environ:
                given += [f"--{each.name.replace('_', '-')}", str(value)]
        return given


@Parameter(name="*", group="Service")
@dataclass(frozen=True, kw_only=True)
class ServiceFlags(PlaceFlags):
    """The same, and the namespace."""

    namespace: Annotated[
        str, flag("The namespace of the counters", env_var="COUNTER_NAMESPACE")
    ] = "default"


#: The flags of a command that is given none.
DEFAULT_SERVICE: Final = ServiceFlags()


def duration_us(name: str, text: str) -> int:
    """Return the microseconds of the flag *name*. Raises StartupError."""
    return parsed(name, text, parse_iso_duration)


def options_of(flags: PlaceFlags) -> Options:
    """Return the client's options; it reports once on standard error if no service answers.

    Raises StartupError.
    """
    timeout_s = duration_us("timeout", flags.timeout) / SECOND
    if timeout_s <= 0:
        raise StartupError("--timeout: it is 0; give a duration, such as 10s")
    return Options(
        deadline_s=timeout_s,
        attempt_timeout_s=min(_ATTEMPT_S_MAX, timeout_s),
        on_attempt=_Remarks(flags.timeout).attempt,
        tls_ca=_path(flags.tls_ca),
        tls_cert=_path(flags.tls_cert),
        tls_key=_path(flags.tls_key),
    )


def _path(path: Path | None) -> str | None:
    return None if path is None else str(path)


class _Remarks:
    """Reports why a command waits for long."""

    def __init__(self, timeout: str) -> None:
        self._timeout = timeout
        self._has_reported = False

    def attempt(self, attempt: Attempt) -> None:
        if attempt.status is None and not self._has_reported:
            self._has_reported = True
            remark(f"{attempt.url} does not answer; trying again for {self._timeout}")


@contextmanager
def opened(flags: ServiceFlags, options: Options | None = None) -> Iterator[CounterClient]:
    """Return a client of the service, with :func:`options_of` *flags* unless *options* are given.

    Raises StartupError, and InvalidParameterError for values that no client accepts.
    """
    options = options or options_of(flags)
    key = key_of(flags.api_key_file)
    with CounterClient(urls_of(flags), flags.namespace, api_key=key, options=options) as client:
        yield client


def urls_of(flags: PlaceFlags) -> list[str]:
    """Return the base URLs."""
    return [each.strip() for each in flags.url.split(",") if each.strip()]


def key_of(file: Path | None) -> str | None:
    """Return the API key of *file* or the environment. Raises StartupError, never with the key."""
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise StartupError(f"--api-key-file: {file} cannot be read: {why}") from error


@contextmanager
def ended(flags: ServiceFlags | None = None) -> Iterator[None]:
    """Exit with the code of commands against a service, and print the error to standard error.

    *flags* are used in the command that finishes an add with an unknown outcome.
    """
    try:
        yield
        # A shell may have closed it.
        if sys.stdout is not None:
            with printing():
                sys.stdout.flush()
    except KeyboardInterrupt:
        fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        read_no_more()
        raise SystemExit(EXIT_UNREAD) from None
    except StartupError as error:
        fail(str(error), EXIT_NOT_DONE)
    except UnknownOutcomeError as error:
        report_unfinished(error.unfinished, flags or DEFAULT_SERVICE, why=why_unknown(error))
        raise SystemExit(EXIT_UNKNOWN) from None
    except CounterError as error:
        fail(said(error), exit_code(error))
    except OutputError as error:
        # The work is done; only printing the result failed.
        read_no_more()
        fail(str(error), EXIT_UNREAD)
    except OSError as error:
        fail(f"{error.filename or 'a file'}: {error.strerror or error}", EXIT_NOT_DONE)


def fail(message: str, code: int) -> NoReturn:
    """Print *message* and exit with *code*."""
    remark(message)
    raise SystemExit(code)


def exit_code(error: CounterError) -> int:
    """Return the exit code for *error*."""
    if isinstance(error, UnknownOutcomeError):
        return EXIT_UNKNOWN
    if isinstance(error, TokenTooOldError):
        return EXIT_NO if error.applied is False else EXIT_UNKNOWN
    if isinstance(error, NotSupportedError):
        return EXIT_NO
    not_done = (BadRequestError, UnavailableError, KeyMissingError, KeyInvalidError)
    return (
        EXIT_NOT_DONE if isinstance(error, not_done) or error.code == CounterError.code else EXIT_NO
    )


def said(error: CounterError) -> str:
    """Return the text of *error*, with the fix for a command line."""
    hint = _HINTS.get(str(error.fields.get("code", error.code)))
    if hint is None and isinstance(error, UnreachableError):
        hint = "start one with counter serve, or say where it is with --url or COUNTER_URL"
    return error.detail if hint is None else f"{error.detail}\n{hint}"


def why_unknown(error: UnknownOutcomeError) -> str:
    """Return the cause of the last attempt's failure."""
    cause = error.__cause__
    return cause.detail if isinstance(cause, CounterError) else error.detail


def report_unfinished(unfinished: Unfinished, flags: ServiceFlags, *, why: str) -> None:
    """Report that the outcome is unknown, and print the command that determines it on its own
    line."""
    remark(
        f"it is unknown whether it is counted: {why}\n"
        "This finds out; it counts once, however often it is sent, but in a BEST_EFFORT namespace:"
    )
    print_error(finishing(unfinished, flags))


def finishing(unfinished: Unfinished, flags: ServiceFlags) -> str:
    """Return the command that sends the same request again, quoted for a shell."""
    known = replace(flags, namespace=unfinished.namespace)
    if unfinished.operation not in ("add", "add-and-get", "clear"):
        where = known.words()
        return shlex.join(["counter", "token", "resolve", str(unfinished), *where])
    [(counter, delta)] = unfinished.items
    command = "clear" if unfinished.operation == "clear" else "add"
    what = [counter] if command == "clear" else [counter, str(delta)]
    with_get = ["--get"] if unfinished.operation == "add-and-get" else []
    key = unfinished.token_text.removeprefix("key:")
    is_key = key != unfinished.token_text
    credential = ["--key", key] if is_key else ["--token", unfinished.token_text]
    how = [*with_get, *_valued(credential), *_valued(known.words())]
    # A name that looks like a flag comes after all flags.
    is_odd = counter.startswith("-")
    words = [*how, "--", *what] if is_odd else [*what, *how]
    return shlex.join(["counter", command, *words])


def _valued(words: Sequence[str]) -> list[str]:
    """Join flags and their values; a value that looks like a flag is attached with ``=``."""
    pairs = zip(words[::2], words[1::2], strict=True)
    return [
        word
        for name, value in pairs
        for word in ([f"{name}={value}"] if value.startswith("-") else [name, value])
    ]


def credential_of(text: str) -> Token | Key:
    """Parse a token or a key; a UUIDv7 is a token. Raises InvalidParameterError."""
    of_uuid = token_of_uuid7(text)
    return Token.parse(text) if of_uuid is None else Token(*of_uuid)
