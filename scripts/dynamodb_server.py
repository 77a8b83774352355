"""A real DynamoDB on loopback: Amazon's own local engine, of Maven Central, for tests.

server = DynamodbServer(Path("/tmp/dynamodb"))
server.start()
server.stop()
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from scripts.cluster_jars import DYNAMODB, java
from scripts.cluster_process import ServerProcess, accepts
from scripts.service_process import HOST, free_ports

START_TIMEOUT_S: Final = 180.0
_PROGRAM: Final = Path(__file__).with_name("DynamodbOnLoopback.java")


class DynamodbServer(ServerProcess):
    """One engine with tables in memory: they are gone when it ends."""

    def __init__(self, folder: Path) -> None:
        (self.port,) = free_ports(1)
        super().__init__(
            *("DynamoDB", folder, self._server, lambda: accepts(HOST, self.port)), START_TIMEOUT_S
        )

    @property
    def endpoint(self) -> str:
        """The setting ``dynamodb_endpoint``."""
        return f"http://{HOST}:{self.port}"

    def _server(self) -> Sequence[str]:
        jars = DYNAMODB.fetch()
        return (
            *(java(), "-Xmx512M", f"-Dsqlite4java.library.path={jars}", "-cp", f"{jars}/*"),
            *(str(_PROGRAM), HOST, "-inMemory", "-sharedDb", "-disableTelemetry"),
            *("-port", str(self.port)),
        )
