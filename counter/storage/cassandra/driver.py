"""Configure the driver: node selection, second sends, logging; and translate its errors."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Collection, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from time import monotonic
from typing import Any, Final

import cassandra
from cassandra import ProtocolVersion, UnresolvableContactPoints
from cassandra.auth import PlainTextAuthProvider
from cassandra.cluster import (
    EXEC_PROFILE_DEFAULT,
    Cluster,
    DefaultConnection,
    ExecutionProfile,
    NoHostAvailable,
)
from cassandra.connection import ConnectionBusy, ConnectionException
from cassandra.policies import (
    ConstantReconnectionPolicy,
    DCAwareRoundRobinPolicy,
    SpeculativeExecutionPlan,
    SpeculativeExecutionPolicy,
    TokenAwarePolicy,
)
from cassandra.pool import NoConnectionsAvailable
from cassandra.protocol import (
    ErrorMessage,
    IsBootstrappingErrorMessage,
    OverloadedErrorMessage,
    ServerError,
)
from cassandra.query import tuple_factory

from counter.errors import (
    OverloadedError,
    SliceMissingError,
    StartupError,
    StoreUnavailableError,
    UnavailableError,
    WriteTimeoutError,
)
from counter.limits import SECOND
from counter.storage.cassandra.options import CassandraOptions, Tls
from counter.storage.shared.write_deadline import write_within

_RETRY_AFTER_US: Final = SECOND
#: Time-outs: the node, or a replica, may have done it or may do it later.
_TIME_OVER: Final = (cassandra.OperationTimedOut, cassandra.WriteTimeout, cassandra.WriteFailure)
#: Nothing was done: no node accepted it.
_NOT_TAKEN: Final = (
    OverloadedErrorMessage,
    IsBootstrappingErrorMessage,
    NoConnectionsAvailable,
    ConnectionBusy,
)
#: Contention of compare-and-sets for a row; the outcome is unknown. The driver does not name it.
_CODE_CAS_WRITE_UNKNOWN: Final = 0x1700


def causes_of(error: BaseException) -> list[BaseException]:
    """Return each node's error if no node could be used; otherwise nothing."""
    if not isinstance(error, NoHostAvailable) or not isinstance(error.errors, dict):
        # The driver gives a list of names if it sent no request.
        return []
    return list(error.errors.values())


def is_outcome_unknown(error: BaseException) -> bool:
    """Return whether a compare-and-set with this error may have been applied, or may be later."""
    if isinstance(error, NoHostAvailable):
        return any(is_outcome_unknown(each) for each in causes_of(error))
    if isinstance(error, ErrorMessage):
        return error.code == _CODE_CAS_WRITE_UNKNOWN or isinstance(error, ServerError)
    return isinstance(error, (*_TIME_OVER, ConnectionException))


def translated(error: BaseException, *, wrote: bool = True) -> BaseException:
    """Translate *error* to the service's own; return any other error unchanged.

    *wrote* says whether the statement writes: a read has no unknown outcome.
    """
    if isinstance(error, NoHostAvailable):
        return _no_host(error, wrote)
    if isinstance(error, cassandra.InvalidRequest):
        return _invalid(error)
    if isinstance(error, _TIME_OVER):
        kind = WriteTimeoutError if wrote else StoreUnavailableError
        return _made(kind, f"Cassandra did not answer in time: {_text(error)}")
    if isinstance(error, cassandra.Unavailable):
        return _too_few(error)
    if isinstance(error, _NOT_TAKEN):
        return _made(OverloadedError, f"Cassandra is overloaded: {_text(error)}")
    if isinstance(error, cassandra.DriverException | ErrorMessage | ConnectionException):
        # For a write also an unknown outcome: neither error says that nothing was done.
        return _made(StoreUnavailableError, f"Cassandra: {_text(error)}")
    return error


def within(timeout_us: int) -> AbstractAsyncContextManager[None]:
    """Bound a write, as :func:`write_within`."""
    return write_within("Cassandra", timeout_us)


def _too_few(error: cassandra.Unavailable) -> UnavailableError:
    return _made(
        StoreUnavailableError,
        f"{error.alive_replicas} of the {error.required_replicas} replicas that the consistency"
        " level needs are alive; see `nodetool status`",
    )


def _no_host(error: NoHostAvailable, wrote: bool) -> UnavailableError:
    """Return the first cause with more information than that no host is available."""
    causes = causes_of(error)
    ours = [translated(each, wrote=wrote) for each in causes]
    for kind in (WriteTimeoutError, OverloadedError, SliceMissingError):
        for cause in ours:
            if isinstance(cause, kind):
                return cause
    for each in causes:
        # A node reported that too few others are up.
        if isinstance(each, cassandra.Unavailable):
            return _too_few(each)
    hosts = ", ".join(str(host) for host in error.errors) or "none known"
    reasons = "; ".join(dict.fromkeys(_text(each) for each in causes))
    return _made(
        StoreUnavailableError,
        f"no Cassandra node can be asked (tried: {hosts}{': ' if reasons else ''}{reasons[:300]})",
    )


def _invalid(error: cassandra.InvalidRequest) -> UnavailableError:
    text = _text(error)
    if "table" in text and ("does not exist" in text or "unconfigured" in text):
        return _made(SliceMissingError, f"Cassandra: {text}")
    return _made(StoreUnavailableError, f"Cassandra refuses a statement: {text}")


def _made(kind: type[UnavailableError], detail: str) -> UnavailableError:
    return kind(detail, retry_after_us=_RETRY_AFTER_US)


def _text(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


_RECONNECT_AFTER_S: Final = 1.0
_CONNECT_TIMEOUT_S: Final = 5.0
#: A node that is silent for this long, and again after a heartbeat, is considered down.
_HEARTBEAT_S: Final = 5

#: The driver writes in pieces of 4 KiB. Without this the last piece of a batch waits until the node
#: acknowledges the one before, which it delays for 40 ms.
_SOCKET_OPTIONS: Final = ((socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),)

#: An idempotent statement is sent to a second node after this time.
_SPECULATE_AFTER_S: Final = 0.1
#: The maximum of second sends per statement, in the long run and at once.
_SECONDS_PER_STATEMENT: Final = 0.4
_SECONDS_AT_ONCE: Final = 256


#: A node that has pending requests and was silent for this long is used after the others; the list
#: of such nodes is refreshed after this long.
_SILENT_AFTER_S: Final = 0.5
_SILENCE_LOOK_S: Final = 0.1

#: What the driver logs about retries to reach a node that is known to be down, about a failed first
#: connection, which :func:`cannot_connect` explains, and about statements whose error is raised.
_SAID_ELSEWHERE: Final = (
    "Error attempting to reconnect",
    "Control connection failed to connect",
    "Error preparing query:",
)
_NO_BUGS: Final = (OSError, cassandra.DriverException, ConnectionException, NoHostAvailable)


class HeardConnection(DefaultConnection):  # type: ignore[misc]
    """Record when the node last sent anything."""

    heard_s = 0.0

    def process_msg(self, header: Any, body: Any) -> None:
        self.heard_s = monotonic()
        super().process_msg(header, body)


class SilentLast(TokenAwarePolicy):  # type: ignore[misc]
    """Use replicas first, and silent nodes last.

    A node that is frozen or cut off is considered down only after two heartbeats. Until then a
    third of all statements in a cluster of three would go to it first and need a second send:
    more than :class:`SparingSpeculation` allows. And compare-and-sets are never sent twice. A node
    that sends anything is used normally again.
    """

    def __init__(self, child: Any) -> None:
        super().__init__(child)
        self._cluster: Any = None
        self._silent: Collection[Any] = ()
        self._looked_s = 0.0

    def populate(self, cluster: Any, hosts: Any) -> None:
        self._cluster = cluster
        super().populate(cluster, hosts)

    def make_query_plan(
        self, working_keyspace: str | None = None, query: Any = None
    ) -> Iterator[Any]:
        plan: Iterator[Any] = super().make_query_plan(working_keyspace, query)
        silent = self.silent()
        if not silent:
            yield from plan
            return
        last = []
        for host in plan:
            if host in silent:
                last.append(host)
            else:
                yield host
        yield from last

    def silent(self) -> Collection[Any]:
        """Return the nodes that have pending requests and were silent for a while."""
        now_s = monotonic()
        if now_s - self._looked_s >= _SILENCE_LOOK_S:
            self._looked_s = now_s
            self._silent = {
                host
                for session in tuple(self._cluster.sessions)
                for host, pool in tuple(session._pools.items())
                if _is_silent(pool._connection, now_s)
            }
        return self._silent


def _is_silent(connection: Any, now_s: float) -> bool:
    """Return whether *connection* has pending requests and received nothing for a while.

    A request that timed out counts as long as the node may still answer it.
    """
    if connection is None or not connection.in_flight:
        return False
    return bool(now_s - connection.heard_s > _SILENT_AFTER_S)


class SparingSpeculation(SpeculativeExecutionPolicy):  # type: ignore[misc]
    """Use a second node if the first is slow, but not if all are.

    One slow node of three makes a third of the statements slow, and second sends help. If every
    statement is slow, sending each twice would make it worse. The counts are approximate, because
    threads share them without a lock.
    """

    def __init__(self) -> None:
        self._budget = float(_SECONDS_AT_ONCE)

    def new_plan(self, keyspace: str | None, statement: Any) -> SpeculativeExecutionPlan:
        self._budget = min(self._budget + _SECONDS_PER_STATEMENT, _SECONDS_AT_ONCE)
        return _Plan(self)

    def may_spend(self) -> bool:
        """Return whether a statement that is sent now may be sent again later."""
        return self._budget >= 1

    def spend(self) -> None:
        """Count a second send."""
        self._budget -= 1


class _Plan(SpeculativeExecutionPlan):  # type: ignore[misc]
    """Return the delays: the driver asks when it sends, and again after the delay."""

    __slots__ = ("_asked", "_policy")

    def __init__(self, policy: SparingSpeculation) -> None:
        self._policy = policy
        self._asked = False

    def next_execution(self, host: Any) -> float:
        if self._asked:
            self._policy.spend()
            return -1
        if not self._policy.may_spend():
            return -1
        self._asked = True
        return _SPECULATE_AFTER_S


def new_cluster(options: CassandraOptions) -> Cluster:
    """Return the driver's cluster object, not connected."""
    profile = ExecutionProfile(
        # Without a name it uses the data center of the contact points.
        load_balancing_policy=SilentLast(DCAwareRoundRobinPolicy(options.local_datacenter or "")),
        speculative_execution_policy=SparingSpeculation(),
        row_factory=tuple_factory,
        request_timeout=options.read_timeout_us / SECOND,
    )
    auth = None
    if options.username is not None:
        auth = PlainTextAuthProvider(options.username, options.password or "")
    return Cluster(
        list(options.contact_points),
        # Cassandra 4.0 and later. Set, because negotiation takes a connection per attempt.
        protocol_version=ProtocolVersion.V5,
        execution_profiles={EXEC_PROFILE_DEFAULT: profile},
        auth_provider=auth,
        ssl_context=_tls_context(options.tls) if options.tls else None,
        reconnection_policy=ConstantReconnectionPolicy(_RECONNECT_AFTER_S, max_attempts=None),
        sockopts=_SOCKET_OPTIONS,
        connect_timeout=_CONNECT_TIMEOUT_S,
        control_connection_timeout=_CONNECT_TIMEOUT_S,
        idle_heartbeat_interval=_HEARTBEAT_S,
        idle_heartbeat_timeout=_HEARTBEAT_S,
        connection_class=HeardConnection,
        # A node prepares each statement at its first use. Preparing on all nodes at once would wait
        # for a silent one, with all users of the statement.
        prepare_on_all_hosts=False,
        reprepare_on_up=False,
    )


def check_datacenters(cluster: Cluster, options: CassandraOptions) -> None:
    """Raise StartupError if the local data center is ambiguous.

    LOCAL_QUORUM is a quorum in the coordinator's data center: a write in one data center and a read
    in another need not overlap.
    """
    known = sorted({host.datacenter for host in cluster.metadata.all_hosts() if host.datacenter})
    if options.local_datacenter is None and len(known) > 1:
        raise StartupError(
            f"the cluster has several data centers ({', '.join(known)}):"
            " say which one is near with --local-datacenter"
        )
    if known and options.local_datacenter not in (None, *known):
        raise StartupError(
            f"the cluster has no data center {options.local_datacenter!r}; it has"
            f" {', '.join(known)}: correct --local-datacenter"
        )


def cannot_connect(
    options: CassandraOptions, error: Exception
) -> StartupError | StoreUnavailableError:
    """Return why the first connection failed and the fix; StartupError if retries cannot help."""
    points = ", ".join(f"{host}:{port}" for host, port in options.contact_points)
    causes = causes_of(error) or [error]
    for cause in causes:
        if isinstance(cause, cassandra.AuthenticationFailed):
            who = "a user without a name" if options.username is None else repr(options.username)
            return StartupError(
                f"Cassandra at {points} refuses {who}:"
                " check COUNTER_CASSANDRA_USERNAME and COUNTER_CASSANDRA_PASSWORD"
            )
    text = " ".join(str(causes[0]).split())[:200]
    if options.tls is not None and "SSL" in text:
        do = "check --tls-ca"
        if "mismatch" in text:
            do = (
                "give each node a certificate that names its address, or accept any certificate of"
                " --tls-ca for any node with --no-tls-check-host"
            )
        return StartupError(f"no TLS connection to Cassandra at {points} ({text}); {do}")
    if isinstance(error, UnresolvableContactPoints):
        return StartupError(f"no address is known for {points}; check --contact-points")
    said = f"cannot reach Cassandra at {points} ({text}); check --contact-points"
    return StoreUnavailableError(said) if isinstance(error, _NO_BUGS) else StartupError(said)


def quieten() -> None:
    """Reduce the driver's log to useful single lines."""
    for name in ("cluster", "connection", "pool"):
        logger = logging.getLogger(f"cassandra.{name}")
        if not any(isinstance(each, _Quiet) for each in logger.filters):
            logger.addFilter(_Quiet())


@contextmanager
def tried_again(again: bool) -> Iterator[None]:
    """Suppress the driver's log of failed connections after the first attempt."""
    logger = logging.getLogger("cassandra.cluster")
    if again:
        logger.addFilter(_is_no_failed_try)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_failed_try)


def _is_no_failed_try(record: logging.LogRecord) -> bool:
    return "Error connecting to" not in str(record.msg)


class _Quiet(logging.Filter):
    """Log once that a node went down and why, without a traceback and repetitions."""

    def filter(self, record: logging.LogRecord) -> bool:
        if str(record.msg).startswith(_SAID_ELSEWHERE):
            return False
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, _NO_BUGS):
            record.msg = f"{record.getMessage().rstrip(': ')}: {' '.join(str(error).split())}"
            record.args = None
            record.exc_info = None
        return True


def _tls_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(tls.ca))
    # The driver gives each connection the address of its node, to verify the certificate.
    context.check_hostname = tls.check_host
    if tls.cert is not None:
        context.load_cert_chain(str(tls.cert), str(tls.key) if tls.key else None)
    return context
