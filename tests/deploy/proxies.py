"""The proxies of deploy/proxy as processes: their shipped files, with addresses of this machine."""

import asyncio
import shutil
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import httpx

from scripts.service_process import free_ports
from tests.support.certificates import Authority
from tests.support.needs import miss
from tests.support.problems import check_end
from tests.support.rest import Rest
from tests.support.server import ROOT
from tests.support.waiting import eventually

FOLDER = ROOT / "deploy" / "proxy"
FILES = {"nginx": "nginx.conf", "haproxy": "haproxy.cfg"}
#: The service's addresses in the files.
SERVERS = ("10.0.0.11:8080", "10.0.0.12:8080")
#: What the distribution's own file has around the shipped one.
_NGINX = """
user root;
pid {folder}/pid;
error_log stderr;
worker_processes 1;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    scgi_temp_path {folder}/scgi;
    uwsgi_temp_path {folder}/uwsgi;
    include {folder}/shipped;
}}
"""
_HAPROXY = """
global
    maxconn 1000
    stats socket {folder}/stats mode 600
"""


_Started: TypeAlias = tuple["subprocess.Popen[bytes]", int]


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy that listens on *port*, with TLS."""

    port: int
    folder: Path
    tls: ssl.SSLContext

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    @asynccontextmanager
    async def client(self, namespace: str = "default") -> AsyncIterator[Rest]:
        """The API through the proxy."""
        async with httpx.AsyncClient(
            base_url=self.url,
            timeout=100.0,
            trust_env=False,
            verify=self.tls,
            event_hooks={"response": [check_end]},
        ) as http:
            yield Rest(http, namespace)

    async def statuses(self) -> dict[str, str]:
        """HAProxy's status of each server: UP or DOWN, or a transition."""
        reader, writer = await asyncio.open_unix_connection(self.folder / "stats")
        writer.write(b"show stat\n")
        lines = (await reader.read()).decode().splitlines()
        writer.close()
        columns = lines[0].removeprefix("# ").split(",")
        rows = [dict(zip(columns, line.split(","), strict=False)) for line in lines[1:] if line]
        return {row["svname"]: row["status"] for row in rows}


def shipped(name: str) -> str:
    return (FOLDER / FILES[name]).read_text(encoding="utf-8")


def _replaced(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


def _command(name: str, folder: Path, port: int, servers: Sequence[str]) -> list[str]:
    """Write the files of *name* into *folder*, and return its command."""
    text = shipped(name)
    for old, new in zip(SERVERS, servers, strict=True):
        text = _replaced(text, old, new)
    pem, key = folder / "both.pem", folder / "key.pem"
    if name == "nginx":
        text = _replaced(text, "listen 443 ssl", f"listen 127.0.0.1:{port} ssl")
        text = _replaced(text, "/etc/nginx/tls/counter.pem", str(pem))
        text = _replaced(text, "/etc/nginx/tls/counter.key", str(key))
    else:
        text = _replaced(text, "bind :443", f"bind 127.0.0.1:{port}")
        text = _replaced(text, "/etc/haproxy/counter.pem", str(pem))
        text = _HAPROXY.format(folder=folder) + text
    (folder / "shipped").write_text(text, encoding="utf-8")
    if name == "haproxy":
        return ["haproxy", "-db", "-f", str(folder / "shipped")]
    (folder / "main").write_text(_NGINX.format(folder=folder), encoding="utf-8")
    return ["nginx", "-p", str(folder), "-c", "main", "-e", "stderr", "-g", "daemon off;"]


def _started(name: str, folder: Path, urls: Sequence[str], authority: Authority) -> _Started:
    """Start the proxy before the services at *urls*; return its process and its port."""
    signed = authority.sign()
    shutil.copy(signed.key, folder / "key.pem")
    (folder / "both.pem").write_bytes(signed.cert.read_bytes() + signed.key.read_bytes())
    (port,) = free_ports(1)
    command = _command(name, folder, port, [url.removeprefix("http://") for url in urls])
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    return process, port


@asynccontextmanager
async def proxied(name: str, folder: Path, urls: Sequence[str]) -> AsyncIterator[Proxy]:
    """Run the proxy *name* before the services at *urls*."""
    if shutil.which(name) is None:
        miss(f"there is no {name} (Debian: apt-get install {name})")
    authority = Authority(folder)
    process, port = _started(name, folder, urls, authority)

    async def listens() -> bool:
        assert process.poll() is None, (folder / "log").read_text(encoding="utf-8")
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.close()
        return True

    try:
        await eventually(listens, f"{name} listens")
        yield Proxy(port, folder, ssl.create_default_context(cafile=authority.cert))
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
