"""Configure, start and probe one Cassandra node, one memcached and one Redis.

Cassandra's flags are those of its ``cassandra-env.sh`` and ``jvm17-server.options``, without those
that only long-lived clusters need, and with delays for a cluster on one machine.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Final

from scripts.cluster_jars import fetch, java
from scripts.cluster_process import ClusterError, ServerProcess, accepts

STORAGE_PORT: Final = 7000
CASSANDRA_START_TIMEOUT_S: Final = 180.0
CACHE_START_TIMEOUT_S: Final = 60.0

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
#: The Java modules to open to Cassandra, the server and its tools.
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
#: Further settings of each sync of the commit log.
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
class CassandraShape:
    """The nodes of a cluster; node *n* is at *address* + n - 1.

    *quick* disables Java's optimizing compiler and its check of classes: a node starts with less
    than half the work and stays slower. It also gives a node 4 token ranges instead of 16, so that
    a repair is short, and has nodes notice sooner that another one is dead. Clients connect to a
    node at its address + *client_offset*, and nodes to each other at *peer_offset*; a proxy can
    listen there, at the same port. *datacenters* lists the nodes' data centers, separated by
    commas; the last one is that of all further nodes. Without *durable_schema* a schema change is
    not flushed to disk, which takes most of its time; a killed node loses the schema. The last
    three are settings of Cassandra.
    """

    nodes: int = 1
    auth: bool = False
    address: str = "127.0.0.1"
    cassandra_port: int = 9042
    heap_mb: int = 512
    quick: bool = False
    client_offset: int = 0
    peer_offset: int = 0
    datacenters: str = "dc1"
    durable_schema: bool = True
    disk_failure_policy: str = "stop"
    commitlog_sync: str = "periodic"
    sstable_format: str = "big"

    def datacenter_of(self, number: int) -> str:
        names = self.datacenters.split(",")
        return names[min(number, len(names)) - 1]

    def address_of(self, number: int) -> str:
        return str(IPv4Address(self.address) + number - 1)

    def peer_address_of(self, number: int) -> str:
        """Return the address at which other nodes connect to node *number*."""
        return str(IPv4Address(self.address_of(number)) + self.peer_offset)

    def advertised_address_of(self, number: int) -> str:
        """Return the address at which clients connect to node *number*."""
        return str(IPv4Address(self.address_of(number)) + self.client_offset)


def cassandra_node(name: str, folder: Path, number: int, shape: CassandraShape) -> ServerProcess:
    """Node *number* of *shape*, its configuration, data and log in *folder*."""
    return ServerProcess(
        name,
        folder,
        lambda: _cassandra_command(folder, number, shape),
        lambda: accepts(shape.address_of(number), shape.cassandra_port),
        CASSANDRA_START_TIMEOUT_S,
    )


def memcached_server(name: str, folder: Path, address: str, port: int) -> ServerProcess:
    """A memcached of 64 MiB, which loses its content when it ends."""
    # It does not run as root without -u, and uses the name for nothing else.
    options = ("-u", "root", "-l", address, "-p", str(port), "-U", "0", "-m", "64")
    return _cache(name, folder, address, port, ["memcached", *options])


def redis_server(name: str, folder: Path, address: str, port: int) -> ServerProcess:
    """A Redis that keeps nothing on disk."""
    options = ("--save", "", "--appendonly", "no", "--maxmemory", "64mb")
    command = ["redis-server", "--bind", address, "--port", str(port), *options]
    return _cache(name, folder, address, port, command)


def _cache(
    name: str, folder: Path, address: str, port: int, command: Sequence[str]
) -> ServerProcess:
    def checked() -> Sequence[str]:
        if problem := _missing(command[0]):
            raise ClusterError(problem)
        return command

    return ServerProcess(
        name, folder, checked, lambda: accepts(address, port), CACHE_START_TIMEOUT_S
    )


def memcached_missing() -> str | None:
    """Return the packages to install before memcached can run; None if it is installed."""
    return _missing("memcached")


def redis_missing() -> str | None:
    """Return the packages to install before Redis can run; None if it is installed."""
    return _missing("redis-server")


def _missing(program: str) -> str | None:
    if shutil.which(program) is None:
        return f"there is no `{program}` (Debian, Ubuntu: apt-get install {program})"
    return None


def _cassandra_command(folder: Path, number: int, shape: CassandraShape) -> Sequence[str]:
    jars = fetch()
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("cassandra.yaml", _yaml(folder, number, shape)),
        (
            "cassandra-rackdc.properties",
            f"dc={shape.datacenter_of(number)}\nrack=r1\nprefer_local=true\n",
        ),
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
        "cassandra.test.flush_local_schema_changes": str(shape.durable_schema).lower(),
        # Credentials are replicated to every node, so that logins work with a node down.
        "cassandra.system_auth.default_rf": shape.nodes,
    }
    return [
        java(),
        *(f"-Xms{shape.heap_mb}M", f"-Xmx{shape.heap_mb}M", "-Xss256k"),
        *("-XX:+UseG1GC", "-XX:MaxDirectMemorySize=128M", "-XX:+ExitOnOutOfMemoryError"),
        "-XX:+PerfDisableSharedMem",
        *(QUICK_FLAGS if shape.quick else []),
        f"-javaagent:{next(jars.glob('jamm-*.jar'))}",
        *(f"-D{name}={value}" for name, value in properties.items()),
        *MODULE_FLAGS,
        *("-cp", f"{folder}:{jars}/*", "org.apache.cassandra.service.CassandraDaemon"),
    ]


def _yaml(folder: Path, number: int, shape: CassandraShape) -> str:
    authenticator, authorizer = "AllowAllAuthenticator", "AllowAllAuthorizer"
    if shape.auth:
        authenticator, authorizer = "PasswordAuthenticator", "CassandraAuthorizer"
    return f"""\
cluster_name: counter
num_tokens: {4 if shape.quick else 16}
partitioner: org.apache.cassandra.dht.Murmur3Partitioner
data_file_directories: ["{folder}/data"]
commitlog_directory: "{folder}/commitlog"
saved_caches_directory: "{folder}/saved_caches"
hints_directory: "{folder}/hints"
cdc_raw_directory: "{folder}/cdc_raw"
commitlog_sync: {shape.commitlog_sync}
{_SYNC_PERIODS[shape.commitlog_sync]}
listen_address: {shape.address_of(number)}
broadcast_address: {shape.peer_address_of(number)}
rpc_address: {shape.address_of(number)}
broadcast_rpc_address: {shape.advertised_address_of(number)}
native_transport_port: {shape.cassandra_port}
storage_port: {STORAGE_PORT}
endpoint_snitch: GossipingPropertyFileSnitch
seed_provider:
  - class_name: org.apache.cassandra.locator.SimpleSeedProvider
    parameters:
      - seeds: "{shape.peer_address_of(1)}:{STORAGE_PORT}"
authenticator: {authenticator}
authorizer: {authorizer}
role_manager: CassandraRoleManager
disk_failure_policy: {shape.disk_failure_policy}
memtable_heap_space: 64MiB
memtable_offheap_space: 64MiB
auto_snapshot: false
auto_bootstrap: false
phi_convict_threshold: {5 if shape.quick else 8}
{_SSTABLE_FORMATS[shape.sstable_format]}
"""
