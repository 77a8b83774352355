"""Configure, start and probe one Cassandra node, one memcached and one Redis.

Cassandra's flags are those of its ``cassandra-env.sh`` and ``jvm17-server.options``, without those
that only long-lived clusters need, and with delays for a cluster on one machine.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Final

from scripts.cluster_jars import fetch, java
from scripts.cluster_process import ClusterError, ServerProcess

STORAGE_PORT: Final = 7000
CASSANDRA_START_TIMEOUT_S: Final = 180.0
MEMCACHED_START_TIMEOUT_S: Final = 20.0
_PROBE_TIMEOUT_S: Final = 1.0

_EXPORTS: Final = (
    *("java.base/jdk.internal.misc", "java.base/jdk.internal.ref", "java.base/sun.nio.ch"),
    *("java.management.rmi/com.sun.jmx.remote.internal.rmi", "java.rmi/sun.rmi.registry"),
    *("java.rmi/sun.rmi.server", "java.rmi/sun.rmi.transport.tcp", "java.sql/java.sql"),
    *("jdk.unsupported/sun.misc", "jdk.attach/sun.tools.attach"),
)
_OPENS: Final = (
    *("java.base/java.lang.module", "java.base/jdk.internal.loader", "java.base/jdk.internal.ref"),
    *("java.base/jdk.internal.reflect", "java.base/jdk.internal.math", "java.base/java.util"),
    *("java.base/jdk.internal.module", "java.base/jdk.internal.util.jar", "java.base/java.nio"),
    *("jdk.management/com.sun.management.internal", "java.base/sun.nio.ch", "java.base/java.io"),
    *("java.base/java.lang", "java.base/java.lang.reflect", "java.base/java.util.concurrent"),
    "java.base/java.util.concurrent.atomic",
)
#: What Java's modules must open to Cassandra, the server and its tools.
MODULE_FLAGS: Final = (
    *(f"--add-exports={each}=ALL-UNNAMED" for each in _EXPORTS),
    *(f"--add-opens={each}=ALL-UNNAMED" for each in _OPENS),
)
#: Java without its optimizing compiler, and without a check of all classes that it loads: both take
#: most of a node's start.
QUICK_FLAGS: Final = (
    "-XX:TieredStopAtLevel=1",
    *("-XX:+UnlockDiagnosticVMOptions", "-XX:-BytecodeVerificationRemote"),
)
#: What each way of syncing the commit log needs besides.
_SYNC_PERIODS: Final = {
    "periodic": "commitlog_sync_period: 10000ms",
    "group": "commitlog_sync_group_window: 10ms",
    "batch": "",
}
#: The second one cannot be read by nodes of version 4, and needs a setting that says so.
_SSTABLE_FORMATS: Final = {
    "big": "",
    "bti": "storage_compatibility_mode: NONE\nsstable: {selected_format: bti}",
}
_LOGBACK: Final = """\
<configuration>
  <appender name="OUT" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%d{HH:mm:ss.SSS} %-5level %logger{0} %msg%n</pattern></encoder>
  </appender>
  <root level="INFO"><appender-ref ref="OUT"/></root>
</configuration>
"""


@dataclass(frozen=True, slots=True)
class CassandraSettings:
    """How a node is set up; all nodes of a cluster have the same, but for the data center."""

    port: int
    seed: str
    nodes: int
    auth: bool
    heap_mb: int
    quick: bool
    #: Added to a node's address for the address that clients are given.
    client_offset: int = 0
    #: Added to a node's address for the address that other nodes are given.
    peer_offset: int = 0
    datacenter: str = "dc1"
    durable_schema: bool = True
    disk_failure_policy: str = "stop"
    commitlog_sync: str = "periodic"
    sstable_format: str = "big"


def cassandra_node(
    name: str, folder: Path, address: str, settings: CassandraSettings
) -> ServerProcess:
    """Node *name* at *address*, its configuration, data and log in *folder*."""
    return ServerProcess(
        name,
        folder,
        lambda: _cassandra_command(folder, address, settings),
        lambda: _answers(address, settings.port),
        CASSANDRA_START_TIMEOUT_S,
    )


def memcached_server(name: str, folder: Path, address: str, port: int) -> ServerProcess:
    """A memcached of 64 MiB, whose content is lost when it ends."""

    def command() -> Sequence[str]:
        if problem := memcached_missing():
            raise ClusterError(problem)
        # It does not run as root without -u, and uses the name for nothing else.
        return ["memcached", "-u", "root", "-l", address, "-p", str(port), "-U", "0", "-m", "64"]

    return ServerProcess(
        name, folder, command, lambda: _answers(address, port), MEMCACHED_START_TIMEOUT_S
    )


def memcached_missing() -> str | None:
    """Return what to install before memcached can run; None if it is installed."""
    if shutil.which("memcached") is None:
        return "there is no `memcached` (Debian, Ubuntu: apt-get install memcached)"
    return None


def redis_server(name: str, folder: Path, address: str, port: int) -> ServerProcess:
    """A Redis that keeps nothing on disk."""

    def command() -> Sequence[str]:
        if problem := redis_missing():
            raise ClusterError(problem)
        return [
            *("redis-server", "--bind", address, "--port", str(port)),
            *("--save", "", "--appendonly", "no", "--maxmemory", "64mb"),
        ]

    return ServerProcess(
        name, folder, command, lambda: _answers(address, port), MEMCACHED_START_TIMEOUT_S
    )


def redis_missing() -> str | None:
    """Return what to install before Redis can run; None if it is installed."""
    if shutil.which("redis-server") is None:
        return "there is no `redis-server` (Debian, Ubuntu: apt-get install redis-server)"
    return None


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=_PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _cassandra_command(folder: Path, address: str, settings: CassandraSettings) -> Sequence[str]:
    jars = fetch()
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("cassandra.yaml", _yaml(folder, address, settings)),
        ("cassandra-rackdc.properties", f"dc={settings.datacenter}\nrack=r1\nprefer_local=true\n"),
        ("logback.xml", _LOGBACK),
    ):
        (folder / name).write_text(text, encoding="utf-8")
    properties = {
        "jdk.attach.allowAttachSelf": "true",
        "cassandra.config": (folder / "cassandra.yaml").as_uri(),
        "cassandra-rackdc.properties": (folder / "cassandra-rackdc.properties").as_uri(),
        "logback.configurationFile": folder / "logback.xml",
        "cassandra.storagedir": folder,
        "cassandra.logdir": folder,
        # A killed node leaves unpacked files; here they are deleted with the rest.
        "java.io.tmpdir": folder,
        # Otherwise it closes its standard output, the log, after startup.
        "cassandra-foreground": "yes",
        # Otherwise each start measures it, which takes a third of its CPU time.
        "cassandra.memtable.row_overhead_size": 180,
        "cassandra.skip_wait_for_gossip_to_settle": 0,
        "cassandra.ring_delay_ms": 5000,
        # Retried while other nodes are down: with 0 without a pause.
        "cassandra.superuser_setup_delay_ms": 200,
        "cassandra.test.flush_local_schema_changes": str(settings.durable_schema).lower(),
        # Credentials are replicated to every node, so that logins work with a node down.
        "cassandra.system_auth.default_rf": settings.nodes,
    }
    return [
        java(),
        *(f"-Xms{settings.heap_mb}M", f"-Xmx{settings.heap_mb}M", "-Xss256k"),
        *("-XX:+UseG1GC", "-XX:MaxDirectMemorySize=128M", "-XX:+ExitOnOutOfMemoryError"),
        "-XX:+PerfDisableSharedMem",
        *(QUICK_FLAGS if settings.quick else []),
        f"-javaagent:{next(jars.glob('jamm-*.jar'))}",
        *(f"-D{name}={value}" for name, value in properties.items()),
        *MODULE_FLAGS,
        *("-cp", f"{folder}:{jars}/*", "org.apache.cassandra.service.CassandraDaemon"),
    ]


def _yaml(folder: Path, address: str, settings: CassandraSettings) -> str:
    authenticator, authorizer = "AllowAllAuthenticator", "AllowAllAuthorizer"
    if settings.auth:
        authenticator, authorizer = "PasswordAuthenticator", "CassandraAuthorizer"
    return f"""\
cluster_name: counter
num_tokens: {4 if settings.quick else 16}
partitioner: org.apache.cassandra.dht.Murmur3Partitioner
data_file_directories: ["{folder}/data"]
commitlog_directory: "{folder}/commitlog"
saved_caches_directory: "{folder}/saved_caches"
hints_directory: "{folder}/hints"
cdc_raw_directory: "{folder}/cdc_raw"
commitlog_sync: {settings.commitlog_sync}
{_SYNC_PERIODS[settings.commitlog_sync]}
listen_address: {address}
broadcast_address: {IPv4Address(address) + settings.peer_offset}
rpc_address: {address}
broadcast_rpc_address: {IPv4Address(address) + settings.client_offset}
native_transport_port: {settings.port}
storage_port: {STORAGE_PORT}
endpoint_snitch: GossipingPropertyFileSnitch
seed_provider:
  - class_name: org.apache.cassandra.locator.SimpleSeedProvider
    parameters:
      - seeds: "{settings.seed}:{STORAGE_PORT}"
authenticator: {authenticator}
authorizer: {authorizer}
role_manager: CassandraRoleManager
disk_failure_policy: {settings.disk_failure_policy}
memtable_heap_space: 64MiB
memtable_offheap_space: 64MiB
auto_snapshot: false
auto_bootstrap: false
phi_convict_threshold: {5 if settings.quick else 8}
{_SSTABLE_FORMATS[settings.sstable_format]}
"""
