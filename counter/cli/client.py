"""Give commands of a running service its address, a client and their exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

from cyclopts import Parameter

from counter.cli.contexts import CONTEXT_VARIABLE, load_contexts
from counter.cli.terminal import (
    EXIT_CANNOT_START,
    EXIT_INTERRUPTED,
    EXIT_UNREAD,
    OutputError,
    flag,
    give_up_output,
    parsed,
    print_error,
    printable,
    printing,
    remark,
)
from counter.errors import StartupError
from counter.limits import SECOND
from counter.quantities import parse_duration
from counter.tokens import token_of_uuid7
from counter_client import (
    Attempt,
    BoundReachedError,
    Bounds,
    Count,
    CounterClient,
    HoldState,
    Key,
    Options,
    Sending,
    Token,
    Unfinished,
    UnknownOutcomeError,
    UnreachableError,
    Watch,
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
from counter_client.tokens import check_delta

#: Exit codes of these commands besides 0, done.
EXIT_NO: Final = 1
#: As if a process cannot start: bad input, or nothing could be done and nothing is changed.
EXIT_NOT_DONE: Final = EXIT_CANNOT_START
EXIT_UNKNOWN: Final = 4
#: The add was refused, and its token never counts; there may be room for another one later.
EXIT_BOUND: Final = 5

#: The environment variable of the key: a flag would be visible in the list of processes.
KEY_VARIABLE: Final = "COUNTER_API_KEY"
_DEFAULT_URL: Final = "http://127.0.0.1:8080"
_ATTEMPT_S_MAX: Final = 5.0
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,40}")
#: Fixes for error codes of the service, in terms of the command line.
_HINTS: Final[Mapping[str, str]] = {
    "namespace_unknown": "counter namespace list shows what there is; counter namespace create"
    " makes one",
    "scope_insufficient": "an operator makes such a key: counter key create --namespace {namespace}"
    " --scope {scope}",
    "key_missing": f"put it into the environment as {KEY_VARIABLE}, or name its file with"
    " --api-key-file",
    "key_invalid": "it came from --api-key-file, else from the context, else from"
    f" {KEY_VARIABLE} in the environment",
}
#: Before the commands of :func:`finishing`.
FINISHING: Final = (
    "This finds out; it counts once, however often it is sent, but in a BEST_EFFORT namespace:"
)


@Parameter(name="*", group="Service")
@dataclass(frozen=True, kw_only=True)
class PlaceFlags:
    """The address of the service, and the credentials."""

    url: Annotated[
        str,
        flag(
            "Its URL; several are tried in order: URL,URL", "URL", alias="-u", env_var="COUNTER_URL"
        ),
    ] = _DEFAULT_URL
    timeout: Annotated[str, flag("The time limit, including retries", "DURATION")] = "10s"
    api_key_file: Annotated[
        Path | None, flag(f"A file with the API key [{KEY_VARIABLE} in the environment]", "FILE")
    ] = None
    tls_ca: Annotated[
        Path | None, flag("The authority of its certificate [the usual ones]", "FILE")
    ] = None
    tls_cert: Annotated[Path | None, flag("This client's certificate", "FILE")] = None
    tls_key: Annotated[Path | None, flag("The key of this client's certificate", "FILE")] = None
    context: Annotated[
        str | None,
        flag(
            "The context that names it, in place of a URL; '' for none [the current one]",
            "NAME",
            env_var=CONTEXT_VARIABLE,
        ),
    ] = None

    def words(self) -> list[str]:
        """Return the command-line arguments needed to reproduce these flags: those that neither the
        environment nor the context nor the defaults supply."""
        known = load_contexts().named(self.context).flags() if self.context else {}
        given: list[str] = []
        for each in fields(self):
            name, value = f"--{each.name.replace('_', '-')}", getattr(self, each.name)
            if not value or each.name == "timeout" or str(value) == known.get(name):
                continue
            is_default = value == each.default and name not in known
            if not is_default or f"COUNTER_{each.name.upper()}" in os.environ:
                given += [name, str(value)]
        return given


@Parameter(name="*", group="Service")
@dataclass(frozen=True, kw_only=True)
class ServiceFlags(PlaceFlags):
    """The same, and the namespace."""

    namespace: Annotated[
        str, flag("The namespace", "NAME", alias="-n", env_var="COUNTER_NAMESPACE")
    ] = "default"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class BoundFlags:
    """The bounds of an add."""

    at_least: Annotated[int | None, flag("The least count that an add may lead to", "NUMBER")] = (
        None
    )
    at_most: Annotated[int | None, flag("The greatest count that an add may lead to", "NUMBER")] = (
        None
    )

    @property
    def bounds(self) -> Bounds:
        """The bounds that are given."""
        return Bounds(self.at_least, self.at_most)

    def words(self) -> list[str]:
        """Return the arguments that give the bounds."""
        given = self.bounds.members()
        return [word for x in given for word in (f"--{x.replace('_', '-')}", str(given[x]))]


#: The flags of a command that is given none.
NO_BOUND_FLAGS: Final = BoundFlags()
DEFAULT_SERVICE: Final = ServiceFlags()


def duration_us(name: str, text: str) -> int:
    """Return the microseconds of the flag *name*. Raises StartupError."""
    return parsed(name, text, parse_duration)


def options_of(flags: PlaceFlags, attempts: Attempts | None = None) -> Options:
    """Return the client's options; it reports once on standard error if no service answers, and
    notes its *attempts*.

    Raises StartupError.
    """
    attempts = attempts or Attempts(flags.timeout)
    timeout_s = duration_us("timeout", flags.timeout) / SECOND
    if timeout_s <= 0:
        raise StartupError("--timeout: it is 0; give a duration, such as 10s")
    return Options(
        deadline_s=timeout_s,
        attempt_timeout_s=min(_ATTEMPT_S_MAX, timeout_s),
        wait_for_ready=False,
        before_attempt=attempts.begin,
        on_attempt=attempts.end,
        tls_ca=_path(flags.tls_ca),
        tls_cert=_path(flags.tls_cert),
        tls_key=_path(flags.tls_key),
    )


def _path(path: Path | None) -> str | None:
    return None if path is None else str(path)


class Attempts:
    """Report why a command waits for long, and note whether anything may have been sent."""

    def __init__(self, timeout: str) -> None:
        self._timeout = timeout
        self._has_reported = False
        #: Whether an attempt had a connection, or is in flight.
        self.may_be_sent = False

    def begin(self, attempt: Sending) -> Watch:
        """Note that *attempt* is in flight until it ends without a connection."""
        was_sent, self.may_be_sent = self.may_be_sent, True

        def ended(attempt: Attempt | None) -> None:
            self.may_be_sent = was_sent or attempt is None or attempt.sent

        return Watch(ended=ended)

    def end(self, attempt: Attempt) -> None:
        """Report an attempt without an answer, once."""
        # A read is not retried if its connection is refused.
        if attempt.status is None and attempt.number > 0 and not self._has_reported:
            self._has_reported = True
            remark(f"{attempt.url} does not answer; trying again for {self._timeout}")


def delta_of(text: str, name: str = "DELTA") -> int:
    """Parse the delta, or another integer of 64 bits. Raises StartupError, and
    InvalidParameterError if it has more."""
    if text.startswith("--"):
        raise StartupError(f"{text[:40]} is not a flag of this command")
    if _INTEGER.fullmatch(text) is None:
        raise StartupError(f"{name}: {text[:40]!r} is not an integer; write it like 5 or -5")
    return check_delta(int(text))


@contextmanager
def open_client(
    flags: ServiceFlags, options: Options | None = None, api_key: str | None = None
) -> Iterator[CounterClient]:
    """Return a client of the service, with :func:`options_of` *flags* and :func:`key_of` *flags*
    unless they are given.

    Raises StartupError, and InvalidParameterError for values that no client accepts.
    """
    options = options or options_of(flags)
    key = api_key or key_of(flags)
    with CounterClient(urls_of(flags), flags.namespace, api_key=key, options=options) as client:
        yield client


def urls_of(flags: PlaceFlags) -> list[str]:
    """Return the base URLs."""
    return [each.strip() for each in flags.url.split(",") if each.strip()]


def key_of(flags: PlaceFlags) -> str | None:
    """Return the API key: of its file, else of the context, else of the environment. Raises
    StartupError, never with the key."""
    if flags.api_key_file is not None:
        return key_in(flags.api_key_file)
    context = load_contexts().named(flags.context) if flags.context else None
    if context is not None and context.url != flags.url:
        raise StartupError(
            f"the URL of context {flags.context!r} is {context.url}, and not {flags.url}: its key"
            " is sent nowhere else; run the command again"
        )
    return (context and context.api_key) or os.environ.get(KEY_VARIABLE) or None


def key_in(file: Path) -> str:
    """Return the content of *file*, an API key. Raises StartupError, never with the key."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise StartupError(f"--api-key-file: {file} cannot be read: {why}") from error


@contextmanager
def exit_codes(flags: ServiceFlags | None = None) -> Iterator[None]:
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
    except OutputError as error:
        # The work is done; only printing the result failed.
        give_up_output(error)
        raise SystemExit(EXIT_UNREAD) from None
    except BrokenPipeError:
        give_up_output(OutputError())
        raise SystemExit(EXIT_UNREAD) from None
    except StartupError as error:
        fail(str(error), EXIT_NOT_DONE)
    except UnknownOutcomeError as error:
        report_unfinished(error.unfinished, flags or DEFAULT_SERVICE, why=why_unknown(error))
        raise SystemExit(EXIT_UNKNOWN) from None
    except CounterError as error:
        fail(explain(error, flags), exit_code(error))
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
    if isinstance(error, BoundReachedError):
        return EXIT_BOUND
    if isinstance(error, NotSupportedError):
        return EXIT_NO
    not_done = (BadRequestError, UnavailableError, KeyMissingError, KeyInvalidError)
    return (
        EXIT_NOT_DONE if isinstance(error, not_done) or error.code == CounterError.code else EXIT_NO
    )


def explain(error: CounterError, flags: ServiceFlags | None = None) -> str:
    """Return the text of *error* of a command with *flags*, a line for each fault, and the fix on
    the command line."""
    listed = error.fields.get("errors")
    faults = listed if isinstance(listed, list) else []
    # The detail has the first of several errors.
    texts = [error.detail, *map(_fault, faults[1:])]
    # So that no text can look like lines of the command's own.
    detail = "\n".join(map(printable, texts))
    hint = _HINTS.get(str(error.fields.get("code", error.code)))
    if hint is None and isinstance(error, UnreachableError):
        hint = (
            "start one with counter serve, or say where it is with --url, COUNTER_URL or --context"
        )
    if hint is None:
        return detail
    flags = flags or DEFAULT_SERVICE
    scope = printable(str(error.fields.get("scope")))
    hint = hint.format(namespace=shlex.quote(flags.namespace), scope=scope)
    # All errors with a hint may be because another service was meant.
    used = f"\ncontext {flags.context!r} was used: {flags.url}" if flags.context else ""
    return f"{detail}\n{hint}{used}"


def _fault(error: object) -> str:
    if not isinstance(error, Mapping):
        return str(error)
    text = f"{error.get('field')}: {error.get('message')}"
    return text if error.get("value") is None else f"{text} (it is {error['value']})"


def fields_of(answer: Count | HoldState) -> dict[str, Any]:
    """Return the members of *answer* that are set; what is held of a count only if it is not 0."""
    members = asdict(answer)
    if isinstance(answer, Count):
        members |= {name: members[name] or None for name in ("held", "held_down")}
    return {
        name: value for name, value in members.items() if value is not None and value is not False
    }


def why_unknown(error: UnknownOutcomeError) -> str:
    """Return the cause of the last attempt's failure."""
    cause = error.__cause__
    return printable((cause if isinstance(cause, CounterError) else error).detail)


def report_unfinished(unfinished: Unfinished, flags: ServiceFlags, *, why: str) -> None:
    """Report that the outcome is unknown, and print the command that determines it on its own
    line."""
    what = "held" if unfinished.operation == "hold" else "counted"
    remark(f"it is unknown whether it is {what}: {why}\n{FINISHING}")
    print_error(finishing(unfinished, flags))


def finishing(unfinished: Unfinished, flags: ServiceFlags) -> str:
    """Return the command that sends the same request again, quoted for a shell."""
    known = replace(flags, namespace=unfinished.namespace)
    of_one = unfinished.operation in ("add", "add-and-get", "clear", "delete", "hold")
    if not of_one or not _is_shown(unfinished.items[0][0]):
        text = json.dumps(json.loads(str(unfinished)))
        return shlex.join(["counter", "token", "resolve", text, *known.words()])
    [(counter, delta, bounds)] = unfinished.adds
    has_number = unfinished.operation not in ("clear", "delete")
    command = unfinished.operation.removesuffix("-and-get")
    what = [counter, str(delta)] if has_number else [counter]
    with_get = ["--get"] if unfinished.operation == "add-and-get" else []
    key = unfinished.token_text.removeprefix("key:")
    is_key = key != unfinished.token_text
    credential = ["--key", key] if is_key else ["--token", unfinished.token_text]
    lasts = [] if unfinished.expires_in is None else ["--expires-in", unfinished.expires_in]
    valued = [*BoundFlags(**bounds._asdict()).words(), *lasts, *credential, *known.words()]
    how = [*with_get, *_valued(valued)]
    # A name that looks like a flag comes after all flags.
    is_odd = counter.startswith("-")
    words = [*how, "--", *what] if is_odd else [*what, *how]
    return shlex.join(["counter", command, *words])


def _is_shown(name: str) -> bool:
    """Return whether standard error shows *name* as it is: an escaped name is another counter."""
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    return printable(name, encoding=encoding) == name


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
