"""Authentication and authorization: keys, their scopes, namespaces and rates.

For a key, namespaces that it does not cover do not exist. It is rejected before any lookup, so
neither the response nor its timing shows whether such a namespace exists.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hmac import compare_digest
from typing import Final, NamedTuple

from api.http.token_bucket import TokenBucket
from counter.api_keys import ApiKey, Scope
from counter.core.namespaces import unknown
from counter.errors import (
    KeyInvalidError,
    KeyMissingError,
    OriginRefusedError,
    RateLimitedError,
    ScopeInsufficientError,
)
from counter.security.host_rule import HostRule
from counter.security.keys import KeyRing
from counter.types import Namespace

_BEARER: Final = b"bearer "
_EVERY: Final = "*"
#: The limited kinds, as keys and the RateLimit fields name them.
LIMITED: Final = ("requests", "adds", "reservations", "resolutions")
#: The maximum of namespaces whose rights and meters are cached per caller.
_REMEMBERED_MAX: Final = 1_000
#: Less than any scope.
_NOTHING: Final = 0


#: Methods that change nothing on any route.
_ONLY_READ: Final = frozenset({"GET", "HEAD", "OPTIONS"})


def _shown(value: bytes) -> str:
    return repr(value[:80].decode("latin-1"))


class Meters(NamedTuple):
    """The token buckets for requests of one caller to one namespace."""

    version: int
    requests: tuple[TokenBucket, ...]
    adds: tuple[TokenBucket, ...]
    is_empty: bool


def _meters(version: int, *holders: Mapping[str, TokenBucket]) -> Meters:
    requests = tuple(each["requests"] for each in holders if "requests" in each)
    adds = tuple(each["adds"] for each in holders if "adds" in each)
    return Meters(version, requests, adds, not requests and not adds)


class Caller:
    """A key, or every client if no keys exist, with its remaining rates in this process."""

    __slots__ = ("_allowed", "_authorizer", "_buckets", "_meters", "_own", "key")

    def __init__(self, authorizer: Authorizer, key: ApiKey | None) -> None:
        self._authorizer = authorizer
        self.key = key
        #: Its scope in each namespace that it used.
        self._allowed: dict[str, int] = {}
        self._meters: dict[int, Meters] = {}
        rates = {name: authorizer.rates.get(name) for name in LIMITED}
        if key is not None:
            own = {name: getattr(key, f"{name}_per_s") for name in LIMITED}
            rates |= {name: rate for name, rate in own.items() if rate is not None}
        self._buckets = {
            name: TokenBucket(name, rate, self.name) for name, rate in rates.items() if rate
        }
        self._own = _meters(0, self._buckets)

    @property
    def name(self) -> str:
        """Return its name in errors and logs."""
        return "a client without a key" if self.key is None else f"the key {self.key.id}"

    def may(self, scope: Scope, namespace: str) -> bool:
        """Return whether it has *scope* in *namespace*."""
        allowed = self._allowed.get(namespace)
        return (self._allow(namespace) if allowed is None else allowed) >= scope

    def sees(self, namespace: str) -> bool:
        """Return whether it covers *namespace*."""
        return self.may(Scope.READ, namespace)

    def _allow(self, namespace: str) -> int:
        key = self.key
        if key is None:
            return Scope.ADMIN
        if len(self._allowed) >= _REMEMBERED_MAX:
            self._allowed.clear()
        allowed = key.scope if self._authorizer.ring.allows(key, namespace) else _NOTHING
        self._allowed[namespace] = allowed
        return allowed

    def require(self, scope: Scope, namespace: str = "") -> None:
        """Raise NamespaceUnknownError for a namespace that the key does not cover, and
        ScopeInsufficientError if its scope is less than *scope*."""
        key = self.key
        if key is None:
            return
        if namespace and not self.sees(namespace):
            self._authorizer.turned_away["namespace"] += 1
            raise unknown(namespace)
        if key.scope < scope:
            self._refuse(f"has the scope {key.scope.name.lower()}, and this takes", scope)

    def require_all_namespaces(self) -> None:
        """Raise ScopeInsufficientError unless the key covers all namespaces."""
        key = self.key
        if key is not None and _EVERY not in key.namespaces:
            self._refuse(
                f"is for {', '.join(key.namespaces)}, and this takes one for '*', of the scope",
                Scope.READ,
            )

    def _refuse(self, why: str, scope: Scope) -> None:
        self._authorizer.turned_away["scope"] += 1
        wanted = scope.name.lower()
        raise ScopeInsufficientError(f"{self.name} {why} {wanted}", scope=wanted)

    def reserve(self, count: int) -> None:
        """See :class:`counter.core.rate_limits.Allowance`."""
        self._charge_own("reservations", count)

    def resolve(self, count: int, *, overdraws: bool = False) -> None:
        """See :class:`counter.core.rate_limits.Allowance`."""
        self._charge_own("resolutions", count, overdraws=overdraws)

    def _charge_own(self, name: str, count: int, *, overdraws: bool = False) -> None:
        bucket = self._buckets.get(name)
        if bucket is not None:
            self._authorizer.charge_one(bucket, count, overdraws=overdraws)

    def admit(self, namespace: Namespace | None, adds: int) -> None:
        """Take one request and *adds* adds to *namespace* from the rates. Raises
        RateLimitedError."""
        meters = self.meters(namespace)
        if meters.is_empty:
            return
        for bucket in meters.requests:
            self._authorizer.charge_one(bucket, 1)
        if adds and meters.adds:
            self._authorizer.charge_all(meters.adds, adds)

    def charge(self, namespace: Namespace | None, adds: int) -> None:
        """Take *adds* adds to *namespace* from the rates. Raises RateLimitedError."""
        self._authorizer.charge_all(self.meters(namespace).adds, adds)

    def charge_requests(self, namespace: Namespace | None, requests: int) -> None:
        """Take *requests* more for a request that was admitted; later ones wait for them."""
        for bucket in self.meters(namespace).requests:
            self._authorizer.charge_one(bucket, requests, overdraws=True)

    def forget_meters(self) -> None:
        """Look up the buckets of namespaces again."""
        self._meters.clear()

    def meters(self, namespace: Namespace | None) -> Meters:
        """Return the buckets of a request to *namespace*, or to none."""
        if namespace is None:
            return self._own
        meters = self._meters.get(namespace.id)
        if meters is None or meters.version != namespace.version:
            if len(self._meters) >= _REMEMBERED_MAX:
                self._meters.clear()
            shared = self._authorizer.buckets_of(namespace)
            meters = _meters(namespace.version, self._buckets, shared)
            self._meters[namespace.id] = meters
        return meters


class KeyMemory:
    """The key that a connection had last: a key costs each of its requests one comparison."""

    __slots__ = ("authorization", "caller", "version")

    caller: Caller

    def __init__(self) -> None:
        self.authorization = b""
        #: The version of the keys that this holds for.
        self.version = -1


@dataclass(slots=True)
class _Shared:
    """The buckets of a namespace, shared by all its callers."""

    version: int
    buckets: dict[str, TokenBucket] = field(default_factory=dict)


class Authorizer:
    """Admit or reject requests. Rates apply to this process only."""

    def __init__(
        self,
        ring: KeyRing,
        rates: Mapping[str, float] | None = None,
        now_s: Callable[[], float] = time.monotonic,
        *,
        hosts: HostRule | None = None,
        origins: Sequence[str] = (),
    ) -> None:
        """If no keys exist, *hosts* must allow Host, and a page that writes must be of the
        service's own origin or of *origins*."""
        self.ring = ring
        self._hosts = hosts or HostRule()
        #: The last Host that was allowed.
        self._host: bytes | None = None
        self._origins = frozenset(each.encode() for each in origins)
        #: The default rates per second of a caller, by :data:`LIMITED`.
        self.rates = rates or {}
        self._now_s = now_s
        #: The caller if no keys exist.
        self.anyone = Caller(self, None)
        self._callers: dict[str, Caller] = {}
        self._shared: dict[int, _Shared] = {}
        #: At this number of buckets, full ones are dropped.
        self._shared_most = _REMEMBERED_MAX
        #: Rejected requests by reason.
        self.turned_away = dict.fromkeys(("key_missing", "key_invalid", "scope", "namespace"), 0)
        #: How often a rate was exceeded, by kind.
        self.limited = dict.fromkeys(LIMITED, 0)

    def identify(
        self, method: str, first: Mapping[bytes, bytes], memory: KeyMemory | None
    ) -> Caller:
        """Return the caller of a request by its headers: *first* has the first value of each.
        Raises OriginRefusedError and the errors of :meth:`caller`."""
        self.check_origin(method, first)
        authorization = first.get(b"authorization")
        if memory is None:
            return self.caller(authorization)
        if memory.version != self.ring.version or not compare_digest(
            memory.authorization, authorization or b""
        ):
            memory.caller = self.caller(authorization)
            memory.authorization, memory.version = authorization or b"", self.ring.version
        return memory.caller

    def check_origin(self, method: str, first: Mapping[bytes, bytes]) -> None:
        """Raise OriginRefusedError for a request that a foreign web page may have sent, if no keys
        exist. If keys exist, a page needs one, and browsers never add it.
        """
        if self.ring.required:
            return
        host, origin = first.get(b"host"), first.get(b"origin", b"")
        if host is not None and host != self._host:
            if not self._hosts.answers(host):
                raise OriginRefusedError(
                    f"Host is {_shown(host)}: without API keys only localhost, loopback"
                    " addresses and the names in hosts are answered; set hosts, create a key,"
                    " or give --insecure"
                )
            self._host = host
        if method in _ONLY_READ or origin in self._origins:
            return
        own = origin.partition(b"://")[2].lower()
        if origin and own != (host or b"").lower():
            raise OriginRefusedError(
                f"Origin is {_shown(origin)}: without API keys only the service's own pages and"
                " those of cors_origins may write; list it there, or create a key"
            )
        site = first.get(b"sec-fetch-site", b"")
        if not origin and site.strip().lower() == b"cross-site":
            raise OriginRefusedError(
                "Sec-Fetch-Site is cross-site: without API keys only the service's own pages and"
                " those of cors_origins may write; list the page there, or create a key"
            )

    def caller(self, authorization: bytes | None) -> Caller:
        """Return the caller of a request with this Authorization header. Raises KeyMissingError,
        KeyInvalidError and StoreUnavailableError."""
        caller = self.known(authorization)
        if caller is None and authorization is None:
            self.turned_away["key_missing"] += 1
            raise KeyMissingError(
                "this service asks for an API key: send Authorization: Bearer <key>;"
                " counter key create makes one"
            )
        if caller is None:
            self.turned_away["key_invalid"] += 1
            raise KeyInvalidError(
                "the Authorization header holds no key that is valid now: it may be mistyped,"
                " expired or revoked; send Authorization: Bearer <key>"
            )
        return caller

    def known(self, authorization: bytes | None) -> Caller | None:
        """Return the caller whose key the header holds, and any caller if no keys exist; None if
        the header holds no valid key. Raises StoreUnavailableError.

        The result is valid while ``ring.version`` stays the same."""
        if not self.ring.required:
            return self.anyone
        if authorization is None or authorization[: len(_BEARER)].lower() != _BEARER:
            return None
        key = self.ring.find(authorization[len(_BEARER) :].strip())
        if key is None:
            return None
        caller = self._callers.get(key.id)
        if caller is None or (caller.key is not key and caller.key != key):
            caller = self._callers[key.id] = Caller(self, key)
        # The ring reloads its keys: keep the identical object for the next comparison.
        caller.key = key
        return caller

    def buckets_of(self, namespace: Namespace) -> Mapping[str, TokenBucket]:
        """The buckets that all callers of *namespace* share."""
        settings = namespace.settings
        if not (settings.requests_per_s or settings.adds_per_s):
            self._shared.pop(namespace.id, None)
            return {}
        shared = self._shared.get(namespace.id)
        if shared is None or shared.version != namespace.version:
            if len(self._shared) >= self._shared_most:
                self._forget_full()
            shared = self._shared[namespace.id] = _Shared(namespace.version)
            for name in ("requests", "adds"):
                rate = getattr(settings, f"{name}_per_s")
                if rate:
                    whose = f"namespace {namespace.name!r}"
                    shared.buckets[name] = TokenBucket(name, rate, whose)
        return shared.buckets

    def _forget_full(self) -> None:
        """Drop full buckets, because new ones are the same. The others must stay; otherwise their
        rates would not apply."""
        now_s = self._now_s()
        self._shared = {
            number: each
            for number, each in self._shared.items()
            if not all(bucket.is_full(now_s) for bucket in each.buckets.values())
        }
        self._shared_most = max(_REMEMBERED_MAX, 2 * len(self._shared))
        for caller in (self.anyone, *self._callers.values()):
            # It may refer to a dropped bucket, and then there would be two.
            caller.forget_meters()

    def charge_all(self, buckets: Sequence[TokenBucket], amount: int) -> None:
        """Take *amount* from each bucket, or from none. Raises RateLimitedError."""
        now_s = self._now_s()
        for place, bucket in enumerate(buckets):
            if not bucket.take(amount, now_s):
                for taken in buckets[:place]:
                    taken.give_back(amount)
                raise self._refused(bucket, now_s)

    def charge_one(self, bucket: TokenBucket, amount: int, *, overdraws: bool = False) -> None:
        """Take *amount* from *bucket*. Raises RateLimitedError, unless it *overdraws*."""
        now_s = self._now_s()
        if not bucket.take(amount, now_s, overdraws=overdraws):
            raise self._refused(bucket, now_s)

    def _refused(self, bucket: TokenBucket, now_s: float) -> RateLimitedError:
        self.limited[bucket.name] += 1
        return bucket.refusal(now_s)
