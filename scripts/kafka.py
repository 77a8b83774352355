"""The command line of ``scripts/kafka``: one real Apache Kafka broker on loopback.

It is for experiments and tests. The broker continues after the command; its data, log and pid file
are in ``.cluster/kafka``.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter

from scripts.cluster_jars import ROOT, Jars, java
from scripts.cluster_process import ClusterError, ServerProcess

KAFKA: Final = "4.1.1"
JARS: Final = Jars(
    server="Kafka",
    version=KAFKA,
    artifacts=(
        f"org.apache.kafka:kafka_2.13:{KAFKA}",
        # Without it the broker logs nothing, not even errors.
        "org.apache.logging.log4j:log4j-slf4j-impl:2.24.3",
    ),
    java_versions=(17, 21),
    variable="COUNTER_KAFKA_JARS",
    kept_in=f"kafka-jars-{KAFKA}",
)
DIRECTORY: Final = ROOT / ".cluster" / "kafka"
_HOST: Final = "127.0.0.1"
_START_TIMEOUT_S: Final = 60.0
#: What names the (one-broker) cluster and its disk; any 16 bytes in base64 do.
_CLUSTER_ID: Final = "Y291bnRlci10dXRvcmlhbA"

Directory = Annotated[Path, Parameter(help="Where the broker keeps everything.")]
app = App(
    name="scripts/kafka",
    help="Runs one real Kafka broker on loopback. It outlives the command.",
    help_format="plaintext",
    version_flags=(),
)


def broker(folder: Path, port: int) -> ServerProcess:
    """A broker at *port* that is its own controller, at the port after it."""
    return ServerProcess(
        "kafka", folder, lambda: _command(folder, port), lambda: _answers(port), _START_TIMEOUT_S
    )


@app.command
def start(*, port: int = 9092, directory: Directory = DIRECTORY) -> None:
    """Start the broker; a stopped one keeps its data.

    Parameters
    ----------
    port
        Where it listens; the port after it is its controller's.
    """
    started = broker(directory, port).start()
    print(f"Kafka {KAFKA} {'listens' if started else 'was running already'} on {_HOST}:{port}")


@app.command
def stop(*, directory: Directory = DIRECTORY) -> None:
    """Stop the broker and keep its data."""
    print("stopped" if broker(directory, 0).stop() else "it was not running")


def _answers(port: int) -> bool:
    try:
        socket.create_connection((_HOST, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _command(folder: Path, port: int) -> Sequence[str]:
    jars = JARS.fetch()
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    settings = folder / "server.properties"
    settings.write_text(_properties(data, port), encoding="utf-8")
    # What `kafka-storage format` would write, without starting Java for it.
    identity = data / "meta.properties"
    if not identity.exists():
        text = f"version=1\nnode.id=1\ncluster.id={_CLUSTER_ID}\ndirectory.id={_CLUSTER_ID}\n"
        identity.write_text(text, encoding="utf-8")
    return [
        *(java(), "-Xmx256M", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
        # It keeps files of its own in the home and temporary directories.
        f"-Djava.io.tmpdir={folder}",
        *("-cp", f"{jars}/*", "kafka.Kafka", str(settings)),
    ]


def _properties(data: Path, port: int) -> str:
    return f"""\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{_HOST}:{port + 1}
listeners=PLAINTEXT://{_HOST}:{port},CONTROLLER://{_HOST}:{port + 1}
advertised.listeners=PLAINTEXT://{_HOST}:{port}
controller.listener.names=CONTROLLER
log.dirs={data}
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
# One member need not wait for others that may come.
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
"""


if __name__ == "__main__":
    try:
        app()
    except ClusterError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
