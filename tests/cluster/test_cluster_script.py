"""The clusters that tests run on: found again by anybody, broken at will, never left behind."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from cassandra.cluster import NoHostAvailable

from scripts import cluster_jars, cluster_servers
from scripts.cluster_jars import CASSANDRA, ROOT
from scripts.cluster_nodes import Cluster, Shape, make_temporary
from scripts.cluster_process import ClusterError, ServerProcess
from tests.support.cluster import running_cluster, session_of
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("child_processes")


SMALL = Shape(nodes=0, memcached=1)
KILLED_RUN = """
import sys
from pathlib import Path
from scripts.cluster_nodes import Cluster, dies_with_us

directory = Path(sys.argv[1])
with dies_with_us(directory):
    Cluster.find(directory).start()
    print("up", flush=True)
    sys.stdin.read()
"""


def is_paused(server: ServerProcess) -> bool:
    """Return whether all its threads have stopped, which they have soon after the signal."""
    state = Path(f"/proc/{server.pid()}/stat").read_text(encoding="ascii").rpartition(") ")[2]
    return state.startswith("T")


def test_a_second_start_finds_the_running_servers(memcached: Cluster) -> None:
    """From another object or another process."""
    found = Cluster.find(memcached.directory)
    assert found is not None
    assert found.start() == []
    assert [each.pid() for each in found.servers] == [each.pid() for each in memcached.servers]


def test_a_cluster_of_another_shape_is_not_taken_for_it(memcached: Cluster) -> None:
    with pytest.raises(ClusterError, match="holds another cluster"):
        Cluster.create(memcached.directory, Shape(nodes=3))


async def test_servers_are_killed_paused_and_mended(breakable_memcached: Cluster) -> None:
    first, second = breakable_memcached.memcached
    pid = second.pid()
    assert first.kill()
    assert first.pid() is None
    assert not first.kill()
    assert second.pause()

    await eventually(lambda: is_paused(second), "the server is paused")
    breakable_memcached.mend()
    assert not is_paused(second)
    assert second.pid() == pid
    assert first.pid() is not None


def test_a_stale_pid_file_is_no_process(tmp_path: Path) -> None:
    """Whichever process has its number now."""
    server = Cluster(tmp_path, SMALL).memcached[0]
    server.folder.mkdir()
    (server.folder / "pid").write_text(str(os.getpid()))
    assert server.pid() is None
    assert not server.kill()


def test_a_port_that_is_taken_is_named(memcached: Cluster, tmp_path: Path) -> None:
    """Not mistaken for a server of this cluster."""
    other = Cluster.create(tmp_path, Shape(nodes=0, address=memcached.shape.address))
    with pytest.raises(ClusterError, match="memcached-1 cannot start: something else"):
        other.start()


def test_a_server_that_ends_at_its_start_shows_its_log(tmp_path: Path) -> None:
    server = Cluster(tmp_path, Shape(nodes=0, address="192.0.2.1")).memcached[0]
    with pytest.raises(ClusterError, match="failed to listen"):
        server.start()


def test_a_missing_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package that has it."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("COUNTER_JARS", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "apt-get install memcached" in str(cluster_servers.memcached_missing())
    assert "there is no `java`" in str(cluster_jars.missing())
    script = tmp_path / "java"
    for version, problem in (("21.0.1", "is Java 21"), ("17.0.2", "apt-get install maven")):
        script.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
        script.chmod(0o755)
        assert problem in str(cluster_jars.missing())
    with pytest.raises(ClusterError, match="apt-get install memcached"):
        Cluster(tmp_path, SMALL).start()
    with pytest.raises(ClusterError, match="apt-get install maven"):
        Cluster(tmp_path, Shape(memcached=0)).start()


async def test_a_temporary_cluster_dies_with_a_killed_test_run(tmp_path: Path) -> None:
    """Its files too: nothing of it may be left on the machine."""
    with running_cluster(SMALL):
        pass  # skips, or fails, if there is no memcached
    directory = tmp_path / "cluster"
    cluster = make_temporary(directory, SMALL)
    run = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", KILLED_RUN, str(directory)),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert run.stdout is not None
    assert await run.stdout.readline() == b"up\n"
    assert cluster.memcached[0].pid() is not None
    os.killpg(run.pid, signal.SIGKILL)
    await run.wait()

    await eventually(
        lambda: cluster.memcached[0].pid() is None and not directory.exists(), "the cluster ends"
    )


def version_of(cluster: Cluster, password: str | None = None) -> str:
    """The first node's description of itself."""
    with session_of(cluster, password) as session:
        [row] = session.execute("SELECT release_version FROM system.local")
    return str(row.release_version)


def test_a_node_runs_the_pinned_version(cassandra: Cluster) -> None:
    assert version_of(cassandra) == CASSANDRA


def test_a_node_with_passwords_asks_for_one(cassandra_with_passwords: Cluster) -> None:
    assert version_of(cassandra_with_passwords, "cassandra") == CASSANDRA
    for wrong in (None, "wrong"):
        with pytest.raises(NoHostAvailable):
            version_of(cassandra_with_passwords, wrong)
