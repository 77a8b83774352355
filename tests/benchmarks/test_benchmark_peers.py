"""The peers of the benchmarks: a missing one is left out with a message, and no other."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import nats_server, peer_list, peer_stores
from benchmarks.harness import Bench
from benchmarks.nats_server import NoNatsError


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(Console(file=StringIO()), tmp_path, rounds=1, seconds=1.0, quick=True)


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(peer_stores, "_DEBIAN", tmp_path)


def test_a_peer_whose_server_is_missing_is_left_out_with_what_to_install(bench: Bench) -> None:
    """Those that need no server stay."""
    found, left_out = peer_list.peers(bench)

    assert [peer.app for peer in found] == ["floor", "nothing"]
    assert [word.partition(":")[0] for word in left_out] == ["Redis", "PostgreSQL", "NATS"]
    for name, word in zip(("redis-server", "postgresql", "`go`"), left_out, strict=True):
        assert name in word


@pytest.mark.usefixtures("child_processes")
def test_a_quick_run_does_not_wait_for_go(tmp_path: Path) -> None:
    """It says how to build the server ahead, and takes the one that is built."""
    go = tmp_path / "go"
    go.write_text("#!/bin/sh\nexit 1\n")
    go.chmod(0o755)

    with pytest.raises(NoNatsError, match=r"python -m benchmarks\.nats_server"):
        nats_server.find(build=False)
    with pytest.raises(NoNatsError, match="Go could not build"):
        nats_server.find()

    kept = nats_server.path()
    kept.write_bytes(b"")
    assert nats_server.find(build=False) == kept


@pytest.mark.usefixtures("child_processes")
def test_a_debian_that_has_two_versions_runs_the_newer_one(tmp_path: Path) -> None:
    """By number, not by spelling: 15 is newer than 9."""
    for version in (9, 15, 13):
        program = tmp_path / str(version) / "bin" / "postgres"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\necho 'postgres (PostgreSQL) {version}.1 (Debian)'\n")
        program.chmod(0o755)

    assert peer_stores.postgres_version() == "15.1"
