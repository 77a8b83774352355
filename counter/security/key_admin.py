"""Create, rotate and revoke API keys, for ``counter key`` and ``/v1/keys``.

The operator, who has the machine, may create any key. The holder of an ``admin`` key may create
keys that reach no further than its own: see :func:`handed_down`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from counter.api_keys import ApiKey, Scope
from counter.clock import to_rfc3339
from counter.core.clock_guard import ClockGuard, checked_now_us
from counter.errors import (
    InvalidParameterError,
    KeyInvalidError,
    NotFoundError,
    PreconditionFailedError,
    ScopeInsufficientError,
    UnavailableError,
)
from counter.limits import DAY, SECOND
from counter.quantities import format_duration
from counter.security.keys import (
    covers,
    digest_of,
    id_in,
    is_pattern,
    key_text,
    new_id,
    new_secret,
)

if TYPE_CHECKING:
    from counter.api_keys import KeyStore
    from counter.ports import Clock

#: Each process reads all of them every second.
KEYS_MAX: Final = 2_000
#: Of those, within the reach of an admin key that is not for all namespaces.
KEYS_OF_PATTERN_MAX: Final = 200
#: An ended key is deleted after this time, when another one is created.
FORGET_AFTER_US: Final = 30 * DAY
NAMESPACES_MAX: Final = 100
LABEL_CHARS_MAX: Final = 100
LIFETIME_MAX_US: Final = 3_650 * DAY
GRACE_MAX_US: Final = 365 * DAY
RATE_MAX: Final = 1e9
#: The rates of a key that can be limited, per second.
LIMITS: Final = ("requests", "adds", "reservations", "resolutions")


@dataclass(frozen=True, slots=True)
class Rights:
    """The rights of a new key, and their duration. Rates are per second; 0 means no bound, and None
    the default of the settings."""

    namespaces: tuple[str, ...]
    scope: Scope
    label: str = ""
    lifetime_us: int | None = None
    requests_per_s: float | None = None
    adds_per_s: float | None = None
    reservations_per_s: float | None = None
    resolutions_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Issued:
    """A new key, and the text that its holder sends, which cannot be shown again."""

    key: ApiKey
    text: str = field(repr=False)
    #: Whether it is the first key: from now on requests need a key.
    is_first: bool = False


class KeyAdmin:
    """Changes the stored keys. Several processes may do so at once: each change is a
    compare-and-set."""

    def __init__(self, store: KeyStore, clock: Clock, guard: ClockGuard | None = None) -> None:
        self._store = store
        self._clock = clock
        self._guard = guard

    async def all(self) -> Sequence[ApiKey]:
        """Return all stored keys, in the order of their creation."""
        return await self._store.api_keys()

    async def create(
        self, rights: Rights, holder: ApiKey | None = None, rates: Mapping[str, float] | None = None
    ) -> Issued:
        """Create a key for the operator, or for the *holder* of an admin key; *rates* are the
        default rates of a key.

        Raises InvalidParameterError for invalid *rights*, ScopeInsufficientError for rights beyond
        those of *holder*, KeyInvalidError if that key is revoked meanwhile, PreconditionFailedError
        if there are too many keys, and ClockSkewError if this machine's clock is not known to be
        right.
        """
        check_rights(rights)
        existing = await self._store.api_keys()
        now_us = await self._checked_now_us()
        if holder is not None:
            rights = handed_down(rights, holder, rates or {}, now_us)
        _check_number(existing, holder, now_us)
        expires_us = None if rights.lifetime_us is None else now_us + rights.lifetime_us
        issued = await self._issue(
            ApiKey(
                "",
                rights.label,
                b"",
                tuple(dict.fromkeys(rights.namespaces)),
                rights.scope,
                now_us,
                expires_us,
                **{f"{name}_per_s": getattr(rights, f"{name}_per_s") for name in LIMITS},
            )
        )
        if holder is not None:
            await self._must_still_hold(holder, issued.key, now_us)
        # Done after the new key is stored, so that the table is never empty: an empty table would
        # mean that API keys were never in use.
        await self._forget(now_us)
        return replace(issued, is_first=not existing)

    async def rotate(self, name: str, grace_us: int) -> tuple[Issued, ApiKey]:
        """Create a key with the rights of the key *name*, which then expires after *grace_us*;
        return the new key, and the old one as changed.

        The lifetime of the new key starts now. Raises NotFoundError, InvalidParameterError, and
        PreconditionFailedError for a key that was revoked or rotated before. Raises ClockSkewError
        if this machine's clock is not known to be right.
        """
        if not 0 <= grace_us <= GRACE_MAX_US:
            raise InvalidParameterError(
                f"grace is {format_duration(grace_us)}; it must be from 0s to"
                f" {format_duration(GRACE_MAX_US)}",
                field="grace",
            )
        old = await self.find(name)
        _must_rotate(old)
        now_us = await self._checked_now_us()
        expires_us = old.expires_at_us
        lifetime_us = None if expires_us is None else expires_us - old.created_at_us
        issued = await self._issue(
            replace(
                old,
                created_at_us=now_us,
                expires_at_us=None if lifetime_us is None else now_us + lifetime_us,
            )
        )
        ends_us = now_us + grace_us if expires_us is None else min(expires_us, now_us + grace_us)
        ended = replace(old, expires_at_us=ends_us, replaced_by=issued.key.id)
        try:
            changed = await self._store.change_api_key(old, ended)
        except UnavailableError as error:
            error.detail += f"; a new key {issued.key.id} is stored, and has no use"
            raise
        if not changed:
            # The new key's secret was never shown; its record stays, to show what happened.
            await self._store.change_api_key(issued.key, replace(issued.key, revoked_at_us=now_us))
            _must_rotate(await self.find(old.id))
            raise PreconditionFailedError(f"key {old.id} has changed meanwhile; try again")
        await self._forget(now_us)
        return issued, ended

    async def revoke(self, name: str) -> tuple[ApiKey, bool]:
        """Revoke the key *name* permanently; return the key, and whether this call revoked it.
        Raises NotFoundError."""
        while True:
            key = await self.find(name)
            if key.revoked_at_us is not None:
                return key, False
            # A wrong clock does not matter: a revoked key is rejected, whatever the time is.
            revoked = replace(key, revoked_at_us=self._clock.now_us())
            # A failed compare-and-set means that it has just been rotated or revoked: read it
            # again.
            if await self._store.change_api_key(key, revoked):
                return revoked, True

    async def _must_still_hold(self, holder: ApiKey, made: ApiKey, now_us: int) -> None:
        """Revoke the key *made* unless *holder* is still valid: this process may not have read yet
        that it was revoked, and a revoked key must pass nothing on. Raises KeyInvalidError."""
        stored = {each.id: each for each in await self._store.api_keys()}
        if holder.id not in stored or not stored[holder.id].is_valid_at(now_us):
            await self._store.change_api_key(made, replace(made, revoked_at_us=now_us))
            raise KeyInvalidError(f"the key {holder.id} was revoked or expired meanwhile")

    async def find(self, name: str) -> ApiKey:
        """Return the key with the id or whole text *name*. Raises NotFoundError."""
        key_id = id_in(name.strip())
        known = await self._store.api_keys()
        for each in known:
            if each.id == key_id:
                return each
        raise NotFoundError(_unknown(key_id, known))

    async def _checked_now_us(self) -> int:
        """Return the checked time, which decides for every process when keys begin and end."""
        if self._guard is not None:
            await self._guard.measure()
        return checked_now_us(self._clock, self._guard)

    async def _forget(self, now_us: int) -> None:
        """Delete the keys that ended long ago.

        If the store fails, the next new key retries: the key that was just created must be shown.
        """
        with suppress(UnavailableError):
            for each in await self._store.api_keys():
                if _is_forgettable(each, now_us):
                    await self._store.forget_api_key(each)

    async def _issue(self, key: ApiKey) -> Issued:
        """Store *key* with a new id and secret."""
        while True:
            secret = new_secret()
            made = replace(
                key,
                id=new_id(),
                digest=digest_of(secret.encode("ascii")),
                last_used_us=None,
                revoked_at_us=None,
                replaced_by=None,
            )
            if await self._store.create_api_key(made):
                return Issued(made, key_text(made.id, secret))


def check_rights(rights: Rights) -> None:
    """Raise InvalidParameterError, naming the value, the bound and the fix."""
    problems = [
        f"namespace {each[:80]!r} is not valid for a key: give a name, the beginning of one"
        " and a * ('team-*'), or '*' for all"
        for each in rights.namespaces
        if not is_pattern(each)
    ]
    if not 1 <= len(rights.namespaces) <= NAMESPACES_MAX:
        problems.append(
            f"{len(rights.namespaces)} namespaces are given; it must be 1 to {NAMESPACES_MAX}: a *"
            " at the end matches many"
        )
    if len(rights.label) > LABEL_CHARS_MAX or not rights.label.isprintable():
        problems.append(
            f"label {rights.label[:LABEL_CHARS_MAX]!r} must be at most {LABEL_CHARS_MAX} printable"
            " characters"
        )
    lifetime_us = rights.lifetime_us
    if lifetime_us is not None and not SECOND <= lifetime_us <= LIFETIME_MAX_US:
        problems.append(
            f"expires is {format_duration(lifetime_us)}; it must be from 1s to"
            f" {format_duration(LIFETIME_MAX_US)}; leave it out for a key that does not expire"
        )
    for name in LIMITS:
        rate = getattr(rights, f"{name}_per_s")
        if rate is not None and not 0 <= rate <= RATE_MAX:
            problems.append(
                f"{name} is {rate:g}/s; it must be at most {RATE_MAX:g}/s, or 0/s for any number"
            )
    if problems:
        raise InvalidParameterError("\n".join(problems))


def _check_number(existing: Sequence[ApiKey], holder: ApiKey | None, now_us: int) -> None:
    """Raise PreconditionFailedError if *holder* may not create one more key."""
    kept = [each for each in existing if not _is_forgettable(each, now_us)]
    bounds = [(len(kept), KEYS_MAX)]
    if holder is not None and "*" not in holder.namespaces:
        own = sum(reaches(holder, each.namespaces) for each in kept)
        bounds.append((own, KEYS_OF_PATTERN_MAX))
    for found, most in bounds:
        if found >= most:
            raise PreconditionFailedError(
                f"{found} keys are on record; at most {most} may be: revoke some, which"
                f" are forgotten {format_duration(FORGET_AFTER_US)} later"
            )


def reaches(holder: ApiKey, namespaces: Sequence[str]) -> bool:
    """Return whether *holder* covers every namespace that any of the patterns *namespaces* does."""
    return all(
        # A pattern is covered as its longest common beginning is, but only by another pattern.
        any(
            covers(own, each.removesuffix("*")) and (own.endswith("*") or not each.endswith("*"))
            for own in holder.namespaces
        )
        for each in namespaces
    )


def handed_down(rights: Rights, holder: ApiKey, rates: Mapping[str, float], now_us: int) -> Rights:
    """Return *rights* as *holder* may give them to a new key. Rates and an end that they leave
    out are inherited. *rates* are the defaults of all keys, 0 for no bound.

    Raises ScopeInsufficientError, naming the value, the bound and the fix.
    """
    problems = [
        f"namespace {each!r} is not within {', '.join(holder.namespaces)}"
        for each in rights.namespaces
        if not reaches(holder, [each])
    ]
    if rights.scope > holder.scope:
        problems.append(
            f"scope {rights.scope.name.lower()} is more than {holder.scope.name.lower()}"
        )
    given: dict[str, Any] = {}
    for name in LIMITS:
        own, wanted = getattr(holder, f"{name}_per_s"), getattr(rights, f"{name}_per_s")
        bound = rates.get(name, 0) if own is None else own
        if wanted is None:
            given[f"{name}_per_s"] = own
        elif bound and not 0 < wanted <= bound:
            shown = f"{wanted:g}/s" if wanted else "without bound"
            problems.append(f"{name} is {shown}, and that key has {bound:g}/s")
    if holder.expires_at_us is not None:
        left_us = holder.expires_at_us - now_us
        given["lifetime_us"] = rights.lifetime_us or left_us
        if given["lifetime_us"] > left_us:
            problems.append(
                f"expires is {format_duration(given['lifetime_us'])}, and that key ends in"
                f" {format_duration(left_us // SECOND * SECOND)}"
            )
    if problems:
        raise ScopeInsufficientError(
            f"the key {holder.id} gives no more rights than it has: {'; '.join(problems)};"
            " ask for less, or have an operator run counter key create",
            scope=holder.scope.name.lower(),
        )
    return replace(rights, **given)


def key_document(key: ApiKey, now_us: int) -> dict[str, Any]:
    """Return the public part of *key*: everything but the digest of its secret."""
    times = ("created_at", "expires_at", "revoked_at", "last_used")
    return {
        "id": key.id,
        "label": key.label,
        **rights_of(key),
        **{name: _time(getattr(key, f"{name}_us")) for name in times},
        "replaced_by": key.replaced_by,
        "state": key_state(key, now_us),
    }


def rights_of(key: ApiKey) -> dict[str, Any]:
    """Return the rights of *key*, as lists and the audit log show them."""
    rates = {name: getattr(key, f"{name}_per_s") for name in LIMITS}
    return {
        "namespaces": list(key.namespaces),
        "scope": key.scope.name.lower(),
        "limits": {f"{name}_per_s": rate for name, rate in rates.items() if rate is not None},
    }


def key_state(key: ApiKey, now_us: int) -> str:
    """Return ``valid``, ``replaced``, ``expired`` or ``revoked``."""
    if key.revoked_at_us is not None:
        return "revoked"
    if not key.is_valid_at(now_us):
        return "expired"
    return "valid" if key.replaced_by is None else "replaced"


def _time(time_us: int | None) -> str | None:
    return None if time_us is None else to_rfc3339(time_us)


def _must_rotate(key: ApiKey) -> None:
    if key.revoked_at_us is not None:
        raise PreconditionFailedError(
            f"key {key.id} was revoked at {to_rfc3339(key.revoked_at_us)}, and what it allowed is"
            " not given again: create a new one"
        )
    if key.replaced_by is not None:
        raise PreconditionFailedError(
            f"key {key.id} was rotated before, to {key.replaced_by}: rotate that one"
        )


def _is_forgettable(key: ApiKey, now_us: int) -> bool:
    ends_us = key.ends_at_us()
    return ends_us is not None and ends_us <= now_us - FORGET_AFTER_US


def _unknown(key_id: str | None, known: Sequence[ApiKey]) -> str:
    """Return the error for an unknown key: without what was given, which may hold a secret."""
    if not known:
        return "there are no keys: make one with counter key create"
    if key_id is None:
        return "this is not the id of a key; counter key list shows them"
    return f"there is no key {key_id!r}; counter key list shows them"
