"""A Cassandra that cannot be reached, or that refuses: each error has the cause and the fix."""

import ssl
import subprocess
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from counter.clock import SystemClock
from counter.errors import StartupError, StoreUnavailableError, UnavailableError
from counter.limits import SECOND
from counter.storage.cassandra.options import CassandraOptions, Tls
from counter.storage.cassandra.store import CassandraStore
from counter.storage.shared.startup_retry import StartupRetry
from scripts.cluster_nodes import Cluster
from tests.support.cassandra import at, connected, have_schema, opened, options_for
from tests.support.child import run_python
from tests.support.relay import Relay
from tests.support.server import ROOT
from tests.support.waiting import eventually

AWAY = CassandraOptions(contact_points=[("127.0.0.1", 1)])


async def refusal(options: CassandraOptions) -> str:
    """Why a store with *options* does not open."""
    with pytest.raises(StartupError) as caught:
        async with opened(options):
            pass
    return str(caught.value)


async def trouble(options: CassandraOptions) -> str:
    """The same if it may open another time."""
    with pytest.raises(StoreUnavailableError) as caught:
        async with opened(options, retry=StartupRetry(0)):
            pass
    return caught.value.detail


async def test_nothing_listens_at_the_contact_point() -> None:
    """Perhaps not yet."""
    text = await trouble(AWAY)
    assert "cannot reach Cassandra at 127.0.0.1:1" in text
    assert "refused" in text
    assert "--contact-points" in text


async def test_a_contact_point_without_an_address() -> None:
    text = await refusal(at(AWAY, ("nowhere.invalid", 9042)))
    assert text == "no address is known for nowhere.invalid:9042; check --contact-points"


async def test_a_contact_point_that_is_not_cassandra(memcached: Cluster) -> None:
    """A server that closes the connection, or does not speak CQL."""
    host, port = memcached.memcached_addresses[0].split(":")
    text = await trouble(at(AWAY, (host, int(port))))
    assert f"cannot reach Cassandra at {host}:{port}" in text


async def test_a_contact_point_that_is_silent(cassandra: Cluster) -> None:
    """It is given up after a while."""
    relay = Relay(cassandra.contact_points[0], cassandra.shape.cassandra_port)
    relay.deaf = True
    async with relay.listening():
        text = await trouble(at(AWAY, relay.address))
    assert "cannot reach Cassandra" in text


async def test_a_store_that_did_not_open_can_be_opened_again(cassandra: Cluster) -> None:
    """Whether it never came to a node, or met trouble when it had prepared its statements."""
    relay = Relay(cassandra.contact_points[0], cassandra.shape.cassandra_port)
    options = options_for(cassandra)
    await have_schema(options)
    async with relay.listening():
        relay.is_away = True
        store = CassandraStore(at(options, relay.address), SystemClock())
        with pytest.raises(StoreUnavailableError):
            await store.open()
        relay.is_away = False
        trouble = StoreUnavailableError("a node was killed")
        with (
            patch.object(store, "_must_have_datasets", side_effect=trouble),
            pytest.raises(StoreUnavailableError, match="a node was killed"),
        ):
            await store.open()
        await store.open()
        await store.ping()
        await store.close()


async def test_one_contact_point_that_answers_is_enough(cassandra: Cluster) -> None:
    options = options_for(cassandra)
    async with connected(at(options, *AWAY.contact_points, *options.contact_points)) as each:
        assert await each.simple("SELECT key FROM system.local") == [("local",)]


async def test_a_data_center_that_is_not_there(cassandra: Cluster) -> None:
    text = await refusal(replace(options_for(cassandra), local_datacenter="dc9"))
    assert "no data center 'dc9'; it has dc1" in text
    assert "--local-datacenter" in text


async def test_the_data_center_that_is_there(cassandra: Cluster) -> None:
    options = replace(options_for(cassandra), local_datacenter="dc1")
    async with connected(options) as connection:
        assert connection.near_nodes()


async def test_a_schema_that_was_never_applied(cassandra: Cluster) -> None:
    text = await refusal(options_for(cassandra, keyspace="never"))
    assert "no keyspace 'never'" in text
    assert "counter schema apply" in text


async def test_a_dataset_that_was_never_made(cassandra: Cluster) -> None:
    options = options_for(cassandra)
    await have_schema(options)
    ((dataset, placement),) = options.datasets
    more = replace(options, datasets=[(replace(dataset, name="more"), placement)])
    text = await refusal(more)
    assert "no dataset 'more'" in text
    assert "counter schema apply" in text


@pytest.mark.parametrize(
    ("username", "password"),
    [("cassandra", "wrong"), ("missing", "cassandra"), (None, None)],
    ids=["password", "user", "none"],
)
async def test_wrong_credentials(
    cassandra_with_passwords: Cluster, username: str | None, password: str | None
) -> None:
    """The password is not repeated."""
    options = options_for(cassandra_with_passwords)
    text = await refusal(replace(options, username=username, password=password))
    assert "COUNTER_CASSANDRA_USERNAME" in text
    assert "COUNTER_CASSANDRA_PASSWORD" in text
    assert "wrong" not in text


async def test_right_credentials(cassandra_with_passwords: Cluster) -> None:
    """And options do not show them."""
    options = replace(
        options_for(cassandra_with_passwords), username="cassandra", password="cassandra"
    )
    assert "password" not in repr(options)
    await have_schema(options)
    async with opened(options) as store:
        await store.ping()


def certificate(folder: Path, name: str, address: str = "127.0.0.1") -> Path:
    """A certificate of *address* that signs itself, its key beside it."""
    path = folder / f"{name}.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", f"/CN={name}", "-keyout", path.with_suffix(".key"), "-out", path),
            *("-addext", f"subjectAltName=IP:{address}"),
        ],
        check=True,
        capture_output=True,
    )
    return path


def of_a_node(shown: Path, trusted: Path) -> ssl.SSLContext:
    """How a node speaks TLS that shows one certificate and wants another one shown."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(trusted))
    context.load_cert_chain(shown, shown.with_suffix(".key"))
    context.verify_mode = ssl.CERT_REQUIRED
    return context


@pytest.mark.usefixtures("child_processes")
async def test_a_certificate_of_another_address_is_refused(tmp_path: Path) -> None:
    """Regression: a certificate of the authority for any machine was taken for that of a node."""
    ours, theirs = certificate(tmp_path, "ours"), certificate(tmp_path, "theirs", "127.0.0.99")
    relay = Relay("127.0.0.1", 1)
    async with relay.listening(of_a_node(theirs, ours)):
        tls = Tls(theirs, ours, ours.with_suffix(".key"))
        text = await refusal(at(replace(AWAY, tls=tls), relay.address))
    assert "IP address mismatch" in text
    assert "--no-tls-check-host" in text


async def test_a_certificate_of_another_address_may_be_accepted(
    cassandra: Cluster, tmp_path: Path
) -> None:
    ours, theirs = certificate(tmp_path, "ours"), certificate(tmp_path, "theirs", "127.0.0.99")
    relay = Relay(cassandra.contact_points[0], cassandra.shape.cassandra_port)
    async with relay.listening(of_a_node(theirs, ours)):
        tls = Tls(theirs, ours, ours.with_suffix(".key"), check_host=False)
        options = replace(at(options_for(cassandra), relay.address), tls=tls)
        async with connected(options) as connection:
            assert await connection.simple("SELECT key FROM system.local") == [("local",)]


async def test_tls(cassandra: Cluster, tmp_path: Path) -> None:
    """A node is known by who signed its certificate, and may ask for the client's."""
    ours, theirs = certificate(tmp_path, "ours"), certificate(tmp_path, "theirs")
    context = of_a_node(theirs, ours)
    relay = Relay(cassandra.contact_points[0], cassandra.shape.cassandra_port)
    async with relay.listening(context):
        options = at(options_for(cassandra), relay.address)
        known = replace(options, tls=Tls(theirs, ours, ours.with_suffix(".key")))
        async with connected(known) as connection:
            assert await connection.simple("SELECT key FROM system.local") == [("local",)]
        stranger = await refusal(replace(options, tls=Tls(ours)))
    assert "no TLS connection" in stranger
    assert "--tls-ca" in stranger


async def test_tls_to_a_node_without_tls(cassandra: Cluster, tmp_path: Path) -> None:
    tls = Tls(certificate(tmp_path, "ours"))
    text = await refusal(replace(options_for(cassandra), tls=tls))
    assert "no TLS connection" in text


@pytest.mark.usefixtures("child_processes")
def test_the_driver_is_not_installed() -> None:
    """The error names the extra to install; nothing else of the service needs the driver."""
    script = (
        "import sys; sys.modules['cassandra'] = None\n"
        "import counter.storage, api.app\n"
        "from counter.errors import StartupError\n"
        "from counter.config.store_kinds import store_kind\n"
        "try: store_kind('cassandra').open(None, None)\n"
        "except StartupError as error: print(error)"
    )
    assert f"pip install '.[cassandra]' in {ROOT}" in run_python("-c", script).stdout


async def test_a_node_that_returns_is_found_again(cassandra: Cluster) -> None:
    """Within the time it takes to notice; the store is the same."""
    relay = Relay(cassandra.contact_points[0], cassandra.shape.cassandra_port)
    options = options_for(cassandra)
    await have_schema(options)
    async with relay.listening():
        near = replace(at(options, relay.address), read_timeout_us=2 * SECOND)
        async with opened(near) as store:
            await store.ping()
            relay.go_away()
            for _ in range(3):
                with pytest.raises(UnavailableError):
                    await store.ping()
                with pytest.raises(StoreUnavailableError):
                    await store.control.read_clock()
            relay.is_away = False

            async def answers() -> bool:
                try:
                    await store.ping()
                except UnavailableError:
                    return False
                return True

            await eventually(answers, "the node is found again")
            await store.control.read_clock()
