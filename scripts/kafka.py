"""The command line of ``scripts/kafka``: one real Apache Kafka broker on loopback.

It is for experiments and tests. The broker continues after the command; its data, log and pid file
are in ``.cluster/kafka``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cyclopts import App

from scripts.cluster_jars import ROOT, Jars, java
from scripts.cluster_process import ServerProcess, accepts, run_command
from scripts.service_process import HOST

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
_START_TIMEOUT_S: Final = 180.0
#: The name of the (one-broker) cluster and its disk; any 16 bytes in base64 do.
_CLUSTER_ID: Final = "Y291bnRlci10dXRvcmlhbA"

app = App(
    name="scripts/kafka",
    help="Runs one real Kafka broker on loopback. It outlives the command.",
    help_format="plaintext",
    version_flags=(),
)


def broker(folder: Path, port: int) -> ServerProcess:
    """A broker at *port* that is its own controller, at the port after it."""
    return ServerProcess(
        *("kafka", folder, lambda: _command(folder, port), lambda: accepts(HOST, port)),
        _START_TIMEOUT_S,
    )


@app.command
def start(*, port: int = 9092) -> None:
    """Start the broker; a stopped one keeps its data.

    Parameters
    ----------
    port
        Where it listens; the port after it is its controller's.
    """
    started = broker(DIRECTORY, port).start()
    print(f"Kafka {KAFKA} {'listens' if started else 'was running already'} on {HOST}:{port}")


@app.command
def stop() -> None:
    """Stop the broker and keep its data."""
    print("stopped" if broker(DIRECTORY, 0).stop() else "it was not running")


def _command(folder: Path, port: int) -> Sequence[str]:
    jars = JARS.fetch()
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    settings = folder / "server.properties"
    settings.write_text(_properties(data, port), encoding="utf-8")
    # The output of `kafka-storage format`, without starting Java for it.
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
controller.quorum.voters=1@{HOST}:{port + 1}
listeners=PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{port + 1}
advertised.listeners=PLAINTEXT://{HOST}:{port}
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
    run_command(app)
