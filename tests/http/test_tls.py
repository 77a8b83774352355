"""HTTPS of the server itself: real certificates, real handshakes."""

import asyncio
import json
import logging
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from api.server.tls import Certificates, server_context
from counter.config.settings import Settings
from counter.errors import StartupError
from counter_client import AsyncCounterClient, Attempt, CounterClient, Options, UnreachableError
from counter_client.errors import InvalidParameterError
from tests.support.bytes_on_wire import LAST, add, get
from tests.support.certificates import Authority, Signed, openssl
from tests.support.rest import fresh
from tests.support.waiting import eventually
from tests.support.wire import Wire, rest_of, statuses, turns, wired

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPTIONS = Options(trust_env=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wire(own: Signed, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Wire]:
    """One that speaks TLS."""
    async with wired(tmp_path_factory.mktemp("tls"), **own.settings) as each:
        yield each


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mutual(
    own: Signed, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Wire]:
    """One that wants to see clients' certificates."""
    path, settings = tmp_path_factory.mktemp("mutual"), own.settings
    async with wired(path, https_client_ca=authority.cert, **settings) as each:
        yield each


def settings(own: Signed, **more: Any) -> Settings:
    return Settings(**own.settings, **more)


async def test_requests_over_tls_are_answered_as_without(wire: Wire, authority: Authority) -> None:
    """The direct way and the other, one after the other on one connection."""
    sent = add(1, 5, counter="t") + get("t") + get("t?max_staleness=0s") + LAST
    received = await wire.tell(sent, tls=authority.client())
    assert statuses(received) == [200] * 4
    assert received.count(b'"count":5') == 2


async def test_large_bodies_and_responses_pass(wire: Wire, authority: Authority) -> None:
    """More than a record of TLS, or a buffer, holds."""
    names = [f"{number:0200}" for number in range(900)]
    body = json.dumps({"counters": names}).encode()
    head = b"POST /v1/namespaces/default/batch/get HTTP/1.1\r\nhost: localhost\r\n"
    head += b"connection: close\r\n"
    head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    received = await wire.tell(head + body, tls=authority.client())
    results = json.loads(received.partition(b"\r\n\r\n")[2])["results"]
    assert [each["counter"] for each in results] == names


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_no_tls_older_than_1_2(wire: Wire, authority: Authority) -> None:
    for version, spoken in (("TLSv1_2", True), ("TLSv1_1", False)):
        client = authority.client()
        client.set_ciphers("DEFAULT:@SECLEVEL=0")
        client.minimum_version = ssl.TLSVersion.TLSv1
        client.maximum_version = ssl.TLSVersion[version]
        if spoken:
            assert statuses(await wire.tell(LAST, tls=client)) == [200]
        else:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await wire.tell(LAST, tls=client)


async def test_every_cipher_has_forward_secrecy(own: Signed) -> None:
    names = [each["name"] for each in server_context(settings(own)).get_ciphers()]
    assert names
    assert all(name.startswith(("TLS_", "ECDHE-")) for name in names)


async def test_plain_http_is_not_answered(wire: Wire) -> None:
    assert b"HTTP/" not in await wire.tell(LAST)


async def test_a_client_without_a_handshake_is_dropped(own: Signed, tmp_path: Path) -> None:
    """After 300 ms; other clients are not delayed."""
    async with wired(tmp_path, request_timeout_us=300_000, **own.settings) as hasty:
        silent = [await hasty.connect() for _ in range(20)]
        for reader, writer in silent:
            assert await rest_of(reader) == b""
            writer.close()
        assert not hasty.connections
        assert hasty.app.application.connections.ended["handshake"] == 20


async def test_a_client_without_a_required_certificate_is_refused(
    mutual: Wire, authority: Authority, tmp_path: Path
) -> None:
    known = authority.client(authority.sign("client"))
    assert statuses(await mutual.tell(LAST, tls=known)) == [200]
    stranger = authority.client(Authority(tmp_path, "stranger").sign("client"))
    for refused in (authority.client(), stranger):
        # With TLS 1.3 a client learns late that its certificate was refused.
        try:
            received = await mutual.tell(LAST, tls=refused)
        except (ssl.SSLError, ConnectionError):
            received = b""
        assert received == b""


async def test_the_sdk_trusts_the_given_authority_and_shows_its_own(
    mutual: Wire, authority: Authority
) -> None:
    own = authority.sign("sdk")
    options = replace(
        OPTIONS, tls_ca=str(authority.cert), tls_cert=str(own.cert), tls_key=str(own.key)
    )
    url = f"https://localhost:{mutual.port}"

    async with AsyncCounterClient(url, options=options) as client:
        await mutual.app.rest.add("sdk", 2, fresh(mutual.app.clock.now_us()))
        assert (await client.get("sdk")).count == 2
    seen: list[Attempt] = []
    async with AsyncCounterClient(url, options=replace(OPTIONS, on_attempt=seen.append)) as client:
        with pytest.raises(UnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
            await client.get("sdk")
        with pytest.raises(UnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
            await client.add("sdk", 2)
    assert len(seen) == 2, "what is not trusted now is not trusted in a second either"


@pytest.mark.parametrize("wrong", [{"tls_ca": "none"}, {"tls_cert": "none"}, {"tls_key": "none"}])
async def test_the_sdk_says_which_file_is_none(wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidParameterError, match=next(iter(wrong))):
        CounterClient("https://localhost", options=replace(OPTIONS, **wrong))  # type: ignore[arg-type]


async def shown(wire: Wire, authority: Authority) -> bytes:
    """The certificate that a new connection is shown."""
    _, writer = await wire.connect(authority.client())
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    assert isinstance(shown, bytes)
    return shown


async def test_a_renewed_certificate_is_taken_up_and_a_broken_one_is_not(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Connections that are open live on."""
    caplog.set_level(logging.INFO, "counter.api")
    mine = authority.sign("mine")
    async with wired(tmp_path, **mine.settings) as wire:
        certificates = wire.server._certificates
        assert certificates is not None
        reader, writer = await wire.connect(authority.client())
        first = await shown(wire, authority)
        stop = asyncio.Event()
        watching = asyncio.create_task(certificates.watch(stop, 0.01))
        mine.install(authority.sign("mine"))

        async def renewed() -> bool:
            return await shown(wire, authority) != first

        await eventually(renewed, "the new certificate is shown")
        second = await shown(wire, authority)
        mine.cert.write_text("no certificate", encoding="ascii")
        await eventually(lambda: "stays in use" in caplog.text, "the broken file is logged")
        assert await shown(wire, authority) == second
        mine.key.unlink()
        assert not certificates.renew()
        assert await shown(wire, authority) == second
        writer.write(get() + LAST)
        assert statuses(await rest_of(reader)) == [200, 200]
        writer.close()
        stop.set()
        await watching
    assert "was renewed from" in caplog.text


async def test_the_end_of_a_certificate_is_known_and_reported(
    wire: Wire, own: Signed, caplog: pytest.LogCaptureFixture
) -> None:
    said = openssl("x509", "-in", own.cert, "-noout", "-enddate")
    end_s = ssl.cert_time_to_seconds(said.strip().partition("=")[2])
    families = {each.name: each for each in wire.app.application.connections.collect()}
    assert families["counter_certificate_end_timestamp_seconds"].samples[0].value == end_s
    Certificates(settings(own))
    assert f"the certificate in {own.cert} ends at " in caplog.text


async def test_the_end_is_known_with_clients_certificates_and_after_it_has_passed(
    own: Signed, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = Certificates(settings(own)).ends_at_s
    assert Certificates(settings(own, https_client_ca=authority.cert)).ends_at_s == known
    past = Signed(tmp_path / "past.pem", own.key)
    openssl(
        *("x509", "-in", own.cert, "-days", "-1", "-out", past.cert, "-signkey", own.key),
    )
    assert 0 < Certificates(settings(past)).ends_at_s < time.time()
    assert "is not known" not in caplog.text


async def test_files_that_stay_the_same_are_reported_once(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    mine = authority.sign("once")
    certificates = Certificates(settings(mine))
    mine.install(Signed(authority.sign().cert, mine.key))
    assert [certificates.renew() for _ in range(3)] == [False] * 3
    assert caplog.text.count("stays in use") == 1


async def test_an_unusable_file_is_named(authority: Authority, tmp_path: Path) -> None:
    own, other = authority.sign(), authority.sign()
    hidden = authority.sign("hidden", password="sesame")
    secret = tmp_path / "secret"
    secret.write_text("sesame\n", encoding="ascii")
    junk = tmp_path / "junk"
    junk.write_text("junk", encoding="ascii")
    for wrong in (Signed(own.cert, other.key), Signed(junk, own.key), hidden):
        with pytest.raises(StartupError, match=f"https_cert {wrong.cert} and https_key") as caught:
            server_context(settings(wrong))
        assert "--https-key-password-file" in str(caught.value)
        assert "sesame" not in str(caught.value)
    with pytest.raises(StartupError, match=f"https_client_ca {junk} cannot be used"):
        server_context(settings(own, https_client_ca=junk))
    server_context(settings(hidden, https_key_password_file=secret))
    secret.write_bytes(b"sesame\xff")
    with pytest.raises(StartupError, match="is not text in UTF-8") as caught:
        server_context(settings(hidden, https_key_password_file=secret))
    assert "0xff" not in str(caught.value)


async def test_a_shutdown_ends_connections_in_order(
    own: Signed, authority: Authority, tmp_path: Path
) -> None:
    async with wired(tmp_path, **own.settings) as wire:
        reader, writer = await wire.connect(authority.client())
        writer.write(get())
        await reader.readuntil(b"\r\n\r\n")
        wire.server.stop()
        assert b"HTTP/" not in await rest_of(reader)
        writer.close()
        await turns()
        with pytest.raises(ConnectionError):
            await wire.connect(authority.client())
