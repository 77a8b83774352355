"""Run ``counter key ...``: parse rights and show keys."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

from cyclopts import Parameter

from counter.api_keys import ApiKey, Scope
from counter.cli.flags import StoreFlags, ready
from counter.cli.terminal import (
    Json,
    exit_on_error,
    flag,
    json_line,
    parsed,
    print_out,
    remark,
    table,
)
from counter.clock import SystemClock, to_rfc3339
from counter.config.settings import Settings
from counter.errors import NotFoundError, PreconditionFailedError, StartupError
from counter.limits import DAY, HOUR, MINUTE, SECOND
from counter.quantities import format_number, parse_duration, parse_rate
from counter.security.audit_log import AdminLog, os_user
from counter.security.key_admin import (
    LIMITS,
    Issued,
    KeyAdmin,
    Rights,
    check_rights,
    key_document,
    key_state,
    rights_of,
)
from counter.security.keys import RING_AGE_MAX_US, id_in

#: The exit code if the stored keys do not allow it, and nothing was done.
EXIT_REFUSED: Final = 1
_COLUMNS: Final = (
    *("ID", "LABEL", "NAMESPACES", "SCOPE", "LIMITS", "CREATED", "EXPIRES", "LAST USED", "STATE"),
)
_MINUTE_CHARS: Final = len("2026-01-31T08:15")

_Value = TypeVar("_Value")


_Which = Annotated[
    str,
    flag("The key's id; - for a whole key on standard input", allow_leading_hyphen=True),
]
#: Longer than any key.
_KEY_CHARS_MAX: Final = 200


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class NewKey:
    """The rights of a key. A rate that is left out follows the settings."""

    namespace: Annotated[
        tuple[str, ...],
        flag(
            "A namespace, or the beginning of several and a *: 'team-*'; '*' for all. Give it"
            " again for more",
            "NAME",
            alias="-n",
            consume_multiple=False,
        ),
    ]
    scope: Annotated[
        str, flag("read, write, or admin; each allows what those before it do", "read|write|admin")
    ]
    label: Annotated[str | None, flag("A label for people", "TEXT")] = None
    expires: Annotated[str | None, flag("How long it is valid: 90d [for ever]", "DURATION")] = None
    requests: Annotated[
        str | None, flag("Requests it may make, of each process: 100/s; 0/s for any number", "RATE")
    ] = None
    adds: Annotated[
        str | None, flag("Adds it may make, each item of a batch counted: 1000/s", "RATE")
    ] = None
    reservations: Annotated[
        str | None, flag("Keys of Idempotency-Key that it may reserve: 10/s", "RATE")
    ] = None
    resolutions: Annotated[
        str | None, flag("Late tokens that it may have resolved: 10/s", "RATE")
    ] = None


def create(new: NewKey, store: StoreFlags | None = None, *, json: Json = False) -> None:
    """Create a key, and print it: this is the only time."""
    with _ended():
        rights = _rights(new)
        check_rights(rights)
        settings = ready(store).settings

        async def work(admin: KeyAdmin, log: AdminLog) -> Issued:
            async with log.act("key.create", os_user()) as act:
                issued = await admin.create(rights)
                act.to |= {"key": issued.key.id}
                act.after |= rights_of(issued.key)
                return issued

        issued = _run(settings, work)
        notes = [f"key {issued.key.id} is shown only now: the stored digest cannot reproduce it"]
        if issued.is_first:
            notes.append(
                "it is the first key: from now on every request to this service needs a key, even"
                " if this one is revoked"
            )
        _show_issued(issued, notes, json=json)


def list_(store: StoreFlags | None = None, *, json: Json = False) -> None:
    """Show all stored keys, never a secret."""
    with _ended():
        settings = ready(store).settings

        async def work(admin: KeyAdmin, _: AdminLog) -> Sequence[ApiKey]:
            return await admin.all()

        keys = _run(settings, work)
        now_us = SystemClock().now_us()
        if json:
            _show_json({"keys": [key_document(each, now_us) for each in keys]})
        elif keys:
            print_out(table(_COLUMNS, [_row(each, now_us) for each in keys]))
        else:
            remark("there are no keys: no request needs one. counter key create makes one")


def rotate(
    key: _Which,
    store: StoreFlags | None = None,
    *,
    grace: Annotated[
        str, flag("How long the old key is still valid; 0s revokes it at once", "DURATION")
    ] = "1h",
    json: Json = False,
) -> None:
    """Create a key with the same rights to replace another one, which expires after the grace
    period."""
    with _ended():
        name = _named(key)
        if name == key:
            _refuse_secret(name)
        grace_us = parsed("grace", grace, parse_duration)
        settings = ready(store).settings

        async def work(admin: KeyAdmin, log: AdminLog) -> tuple[Issued, ApiKey]:
            async with log.act("key.rotate", os_user()) as act:
                issued, old = await admin.rotate(name, grace_us)
                act.to |= {"key": old.id, "new_key": issued.key.id}
                act.after |= {"expires_at": _time(old.expires_at_us)}
                return issued, old

        issued, old = _run(settings, work)
        notes = [
            f"key {issued.key.id} is shown only now, and has the rights of {old.id}",
            f"key {old.id} is valid until {_time(old.expires_at_us)}:"
            " give its clients the new one by then",
        ]
        _show_issued(issued, notes, json=json, replaced=old.id)


def revoke(key: _Which, store: StoreFlags | None = None, *, json: Json = False) -> None:
    """Revoke a key permanently; every process rejects it within seconds.

    A whole key is taken as an argument, too: its secret is worth nothing afterwards.
    """
    with _ended():
        name = _named(key)
        settings = ready(store).settings

        async def work(admin: KeyAdmin, log: AdminLog) -> tuple[ApiKey, bool]:
            async with log.act("key.revoke", os_user()) as act:
                revoked, is_new = await admin.revoke(name)
                act.to |= {"key": revoked.id}
                return revoked, is_new

        revoked, is_new = _run(settings, work)
        if json:
            _show_json(key_document(revoked, SystemClock().now_us()))
        if is_new:
            remark(
                f"key {revoked.id} is revoked: every process rejects it within two seconds, or,"
                f" if it cannot read the keys, after {RING_AGE_MAX_US // SECOND} s"
            )
        else:
            remark(f"key {revoked.id} was revoked before, at {_time(revoked.revoked_at_us)}")


def _named(which: str) -> str:
    """Return the id or the whole key that *which* is, or for ``-`` the first line of standard
    input. Raises StartupError."""
    if which != "-":
        return which
    line = sys.stdin.readline(_KEY_CHARS_MAX) if sys.stdin is not None else ""
    line = line.removeprefix("\ufeff").strip()
    if not line:
        raise StartupError("KEY: standard input is empty; - reads a whole key from it")
    return line


def _refuse_secret(name: str) -> None:
    """Raise StartupError for more than the id of a key that stays valid."""
    key_id = id_in(name.strip())
    if key_id is not None and name.strip() not in (key_id, f"ck_{key_id}"):
        raise StartupError(
            f"KEY: the secret of key {key_id} is an argument, which all users of this machine can"
            f" see while the command runs; give the id, counter key rotate {key_id}, or - and the"
            " key on standard input"
        )


@contextmanager
def _ended() -> Iterator[None]:
    """As :func:`exit_on_error`, and exit with EXIT_REFUSED if the stored record forbids it."""
    with exit_on_error():
        try:
            yield
        except (NotFoundError, PreconditionFailedError) as error:
            remark(error.detail)
            raise SystemExit(EXIT_REFUSED) from None


def _run(settings: Settings, work: Callable[[KeyAdmin, AdminLog], Awaitable[_Value]]) -> _Value:
    """Return the result of *work* on the keys that *settings* lead to."""
    clock = settings.kind.clock()

    async def within() -> _Value:
        log = AdminLog(settings.audit_log, clock)
        async with settings.kind.opened_keys(settings, clock) as (store, guard):
            return await work(KeyAdmin(store, clock, guard), log)

    return asyncio.run(within())


def _rights(new: NewKey) -> Rights:
    """Parse the rights. Raises StartupError with every problem."""
    problems: list[str] = []

    def read(name: str, text: str | None, parse: Callable[[str], _Value]) -> _Value | None:
        try:
            return None if text is None else parsed(name, text, parse)
        except StartupError as error:
            problems.append(str(error))
            return None

    scope = read("scope", new.scope, _scope)
    lifetime_us = read("expires", new.expires, parse_duration)
    rates = {
        f"{name}_per_s": read(name, getattr(new, name), lambda text: float(parse_rate(text)))
        for name in LIMITS
    }
    if problems:
        raise StartupError("\n".join(problems))
    return Rights(new.namespace, scope or Scope.READ, new.label or "", lifetime_us, **rates)


def _scope(text: str) -> Scope:
    for each in Scope:
        if each.name.lower() == text:
            return each
    raise ValueError(f"{text[:40]!r} is none of {', '.join(each.name.lower() for each in Scope)}")


def _show_issued(
    issued: Issued, notes: Sequence[str], *, json: bool, replaced: str | None = None
) -> None:
    """Print only the key to standard output, so that scripts can capture it; the rest goes to
    standard error."""
    if json:
        body = {"key": issued.text, **key_document(issued.key, issued.key.created_at_us)}
        _show_json(body if replaced is None else {**body, "replaces": replaced})
    else:
        print_out(issued.text)
    for each in notes:
        remark(each)


def _show_json(body: object) -> None:
    print_out(json_line(body, indent=2))


def _time(time_us: int | None) -> str | None:
    return None if time_us is None else to_rfc3339(time_us)


def _row(key: ApiKey, now_us: int) -> Sequence[str]:
    rates = ((name, getattr(key, f"{name}_per_s")) for name in LIMITS)
    limits = (
        f"{name} {f'{format_number(rate)}/s' if rate else 'unlimited'}"
        for name, rate in rates
        if rate is not None
    )
    state = key_state(key, now_us)
    if key.replaced_by is not None and state != "replaced":
        state += ", replaced"
    return (
        key.id,
        key.label or "-",
        ",".join(key.namespaces),
        key.scope.name.lower(),
        ", ".join(limits) or "-",
        _minute(key.created_at_us),
        "never" if key.expires_at_us is None else _minute(key.expires_at_us),
        "never" if key.last_used_us is None else _ago(now_us - key.last_used_us),
        state if key.replaced_by is None else f"{state} by {key.replaced_by}",
    )


def _ago(past_us: int) -> str:
    """Format a duration in its largest unit; uses of keys are known to minutes only."""
    for unit, size_us in (("d", DAY), ("h", HOUR), ("m", MINUTE)):
        if past_us >= size_us:
            return f"{past_us // size_us}{unit} ago"
    return "just now"


def _minute(time_us: int) -> str:
    return to_rfc3339(time_us)[:_MINUTE_CHARS].replace("T", " ") + "Z"
