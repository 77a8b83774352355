"""A real PostgreSQL server on a free port, of Debian's package."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from scripts.postgresql_server import PostgresqlServer, postgresql_missing
from tests.support.disk import mounted
from tests.support.needs import miss


@contextmanager
def postgresql_server(disk_size: str | None = None) -> Iterator[PostgresqlServer]:
    """A server of the caller's own, on a disk of *disk_size* if given (``server.folder``)."""
    if problem := postgresql_missing():
        miss(problem)
    with tempfile.TemporaryDirectory(prefix="postgresql-") as directory, ExitStack() as stack:
        Path(directory).chmod(0o711)
        server = PostgresqlServer(Path(directory) / "server")
        if disk_size is not None:
            stack.enter_context(mounted(server.folder, disk_size))
        server.start()
        # Its disk cannot be unmounted while it runs.
        stack.callback(server.stop)
        yield server
