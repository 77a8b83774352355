"""A real DynamoDB on loopback: Amazon's own local engine, of Maven Central, for tests.

server = DynamodbServer(Path("/tmp/dynamodb"))
server.start()
server.stop()
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from scripts.cluster_jars import DYNAMODB, java
from scripts.cluster_process import ServerProcess
from scripts.demo_process import HOST, free_ports

START_TIMEOUT_S: Final = 60.0
_PROGRAM: Final = Path(__file__).with_name("DynamodbOnLoopback.java")


class DynamodbServer(ServerProcess):
    """One engine, whose tables are in memory: they are gone when it ends."""

    def __init__(self, folder: Path) -> None:
        super().__init__("DynamoDB", folder, self._server, self._accepts, START_TIMEOUT_S)
        (self.port,) = free_ports(1)

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

    def _accepts(self) -> bool:
        try:
            socket.create_connection((HOST, self.port), timeout=1).close()
        except OSError:
            return False
        return True
