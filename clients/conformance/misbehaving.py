"""A proxy that misbehaves, in front of a real service.

It deals one fault to each request from a shuffled deck that holds every fault, so each of them
occurs in any run that is longer than the deck.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any, Final
from urllib.parse import urlsplit

_HEAD_BYTES_MAX: Final = 1 << 20
#: Regular answers in a deck, for each fault.
_REGULAR_PER_FAULT: Final = 1
_SHORT_S: Final = 0.05
_PAGE: Final = b"<html><title>Sorry</title>" + b"<p>busy</p>" * 40 + b"</html>"
_OVERSIZED_BYTES: Final = 100_000
_PIECE: Final = b" " * 16_384
#: What an endless answer sends before it gives up on a client that reads on.
_ENDLESS_PIECES: Final = 2_000
_CLOSED: Final = (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)


@dataclass(frozen=True, slots=True)
class Message:
    """A request or an answer: its first line, its headers by lower-case name, and its body."""

    first: bytes
    headers: Mapping[bytes, bytes]
    body: bytes

    def text(self, length: int | None = None, **headers: str) -> bytes:
        """Return it as bytes, with *headers* in place of its own, and maybe another length."""
        changed = {name.replace("_", "-").encode(): x.encode() for name, x in headers.items()}
        size = str(len(self.body) if length is None else length).encode()
        every = {**self.headers, **changed, b"content-length": size}
        lines = [self.first, *(name + b": " + value for name, value in every.items()), b"", b""]
        return b"\r\n".join(lines) + self.body


def answer(status: str, body: bytes = b"", **headers: str) -> bytes:
    """Return an answer of the proxy's own."""
    return Message(b"HTTP/1.1 " + status.encode(), {}, body).text(None, **headers)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request, and how to answer it."""

    request: Message
    writer: asyncio.StreamWriter
    random: random.Random

    async def say(self, text: bytes) -> None:
        """Send bytes to the client."""
        self.writer.write(text)
        await self.writer.drain()


class Misbehaving:
    """The proxy. *slow_s* is longer than a client waits for one attempt."""

    def __init__(self, upstream: str, seed: int, slow_s: float, deck: Sequence[Fault] = ()) -> None:
        parts = urlsplit(upstream)
        self._upstream = parts.hostname or "", parts.port or 80
        self.slow_s = slow_s
        self._random = random.Random(seed)
        self._cards = deck or (*FAULTS, *[regular] * (len(FAULTS) * _REGULAR_PER_FAULT))
        self._deck: list[Fault] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        #: How often each fault was dealt, by name.
        self.dealt: Counter[str] = Counter()
        #: The body of the service's last success.
        self.last = b"{}"
        self.url = ""

    async def listen(self) -> asyncio.Server:
        """Listen at ``url``, a free port of loopback."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_HEAD_BYTES_MAX)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def drain(self) -> None:
        """Wait until no client is connected, and all that was held back has been forwarded."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _keep(self, task: asyncio.Task[Any] | None) -> None:
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._keep(asyncio.current_task())
        try:
            while request := await _read(reader):
                fault = self._deal()
                self.dealt[fault.__name__] += 1
                exchange = Exchange(request, writer, random.Random(self._random.random()))
                if not await fault(self, exchange):
                    break
        except _CLOSED:
            # The client gave up.
            pass
        finally:
            writer.close()
            with suppress(*_CLOSED):
                await writer.wait_closed()

    def _deal(self) -> Fault:
        if not self._deck:
            self._deck = self._random.sample(self._cards, len(self._cards))
        return self._deck.pop()

    async def forward(self, request: Message) -> Message:
        """Send *request* to the service; return its answer."""
        reader, writer = await asyncio.open_connection(*self._upstream, limit=_HEAD_BYTES_MAX)
        try:
            writer.write(request.text(connection="close"))
            found = await _read(reader)
            if found is None:
                raise ConnectionResetError("the service closed the connection")
            if found.first.startswith(b"HTTP/1.1 200"):
                self.last = found.body
            return found
        finally:
            writer.close()

    def later(self, request: Message, delay_s: float) -> None:
        """Forward *request* after a delay, whether or not a client still waits."""

        async def forward() -> None:
            await asyncio.sleep(delay_s)
            with suppress(*_CLOSED):
                await self.forward(request)

        self._keep(asyncio.create_task(forward()))


Fault = Callable[[Misbehaving, Exchange], Awaitable[bool]]


async def _read(reader: asyncio.StreamReader) -> Message | None:
    """Return the next message, or None at the end."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head[:-4].split(b"\r\n")
    pairs = (line.partition(b":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    if headers.pop(b"transfer-encoding", None):
        # A live stream has no end: its first part stands for it, and its client connects again.
        size = int(await reader.readuntil(b"\r\n"), 16)
        return Message(first, headers, await reader.readexactly(size))
    return Message(first, headers, await reader.readexactly(int(headers.get(b"content-length", 0))))


# Each fault returns whether the connection stays open.


async def regular(proxy: Misbehaving, x: Exchange) -> bool:
    """Forward, and answer."""
    await x.say((await proxy.forward(x.request)).text())
    return True


async def lost_before(_: Misbehaving, __: Exchange) -> bool:
    """Lose the request."""
    return False


async def lost_after(proxy: Misbehaving, x: Exchange) -> bool:
    """Lose the answer."""
    await proxy.forward(x.request)
    return False


async def reset_after(proxy: Misbehaving, x: Exchange) -> bool:
    """Lose the answer, and reset the connection."""
    await proxy.forward(x.request)
    x.writer.transport.abort()
    return False


async def delayed(proxy: Misbehaving, x: Exchange) -> bool:
    """Forward a little later."""
    await asyncio.sleep(x.random.uniform(0, _SHORT_S))
    return await regular(proxy, x)


async def forwarded_too_late(proxy: Misbehaving, x: Exchange) -> bool:
    """Forward when the client has given up, and maybe sent the request again."""
    proxy.later(x.request, proxy.slow_s)
    await asyncio.sleep(proxy.slow_s)
    return False


async def answered_too_late(proxy: Misbehaving, x: Exchange) -> bool:
    """Forward at once, and answer when the client has given up."""
    found = await proxy.forward(x.request)
    await asyncio.sleep(proxy.slow_s)
    await x.say(found.text())
    return True


async def twice(proxy: Misbehaving, x: Exchange) -> bool:
    """Forward twice at the same time."""
    found = await asyncio.gather(proxy.forward(x.request), proxy.forward(x.request))
    await x.say(x.random.choice(found).text())
    return True


async def again_later(proxy: Misbehaving, x: Exchange) -> bool:
    """Answer, and forward again later."""
    proxy.later(x.request, x.random.uniform(_SHORT_S, proxy.slow_s))
    return await regular(proxy, x)


async def cut_in_the_head(proxy: Misbehaving, x: Exchange) -> bool:
    """Close the connection within the head of the answer."""
    found = (await proxy.forward(x.request)).text()
    await x.say(found[: x.random.randrange(1, found.index(b"\r\n\r\n"))])
    return False


async def cut_in_the_body(proxy: Misbehaving, x: Exchange) -> bool:
    """Close the connection within the body of the answer."""
    found = await proxy.forward(x.request)
    text = found.text()
    await x.say(text[: len(text) - x.random.randrange(1, max(2, len(found.body)))])
    return False


async def too_long(proxy: Misbehaving, x: Exchange) -> bool:
    """Announce more bytes than there are, and close the connection."""
    found = await proxy.forward(x.request)
    await x.say(found.text(length=len(found.body) + x.random.randrange(1, 1_000)))
    return False


async def too_long_and_open(proxy: Misbehaving, x: Exchange) -> bool:
    """The same, and leave the connection open."""
    found = await proxy.forward(x.request)
    await x.say(found.text(length=len(found.body) + 1))
    await asyncio.sleep(proxy.slow_s)
    return False


async def too_short(proxy: Misbehaving, x: Exchange) -> bool:
    """Announce fewer bytes than there are: the rest looks like the start of the next answer."""
    found = await proxy.forward(x.request)
    await x.say(found.text(length=max(0, len(found.body) - x.random.randrange(1, 50))))
    return True


async def surplus(proxy: Misbehaving, x: Exchange) -> bool:
    """Answer, and add a second answer that nothing asked for."""
    found = (await proxy.forward(x.request)).text()
    await x.say(found + found)
    return True


async def another_protocol(_: Misbehaving, x: Exchange) -> bool:
    """Answer with bytes that are not HTTP."""
    await x.say(x.random.randbytes(200))
    return False


async def garbage(proxy: Misbehaving, x: Exchange) -> bool:
    """Answer with a body of random bytes."""
    await proxy.forward(x.request)
    await x.say(answer("200 OK", x.random.randbytes(200), content_type="application/json"))
    return True


async def a_page(proxy: Misbehaving, x: Exchange) -> bool:
    """Forward, and answer with a page that says it worked."""
    await proxy.forward(x.request)
    await x.say(answer("200 OK", _PAGE, content_type="text/html"))
    return True


async def a_page_in_json(_: Misbehaving, x: Exchange) -> bool:
    """Answer with JSON that says it worked, and forward nothing."""
    body = x.random.choice([b"{}", b"null", b"[]", b'{"status":"ok"}', b'{"results":[]}'])
    await x.say(answer("200 OK", body, content_type="application/json"))
    return True


async def answered_as_another(proxy: Misbehaving, x: Exchange) -> bool:
    """Answer what the service answered to another request, and forward nothing."""
    await x.say(answer("200 OK", proxy.last, content_type="application/json"))
    return True


async def another_type(proxy: Misbehaving, x: Exchange) -> bool:
    """Answer properly, with another content type."""
    await x.say((await proxy.forward(x.request)).text(content_type="text/plain"))
    return True


async def oversized(proxy: Misbehaving, x: Exchange) -> bool:
    """Answer with a proper body after more white space than any answer has."""
    found = await proxy.forward(x.request)
    await x.say(Message(found.first, found.headers, b" " * _OVERSIZED_BYTES + found.body).text())
    return True


async def endless_body(proxy: Misbehaving, x: Exchange) -> bool:
    """Answer without an end."""
    await proxy.forward(x.request)
    await x.say(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
    for _ in range(_ENDLESS_PIECES):
        await x.say(_PIECE)
    return False


async def endless_head(proxy: Misbehaving, x: Exchange) -> bool:
    """Answer with headers without an end."""
    await proxy.forward(x.request)
    await x.say(b"HTTP/1.1 200 OK\r\n")
    for number in range(_ENDLESS_PIECES):
        await x.say(b"X-Header-%d: %s\r\n" % (number, b"x" * 1_000))
    return False


async def busy(_: Misbehaving, x: Exchange) -> bool:
    """Answer 429 or 503, as a proxy does, and ask to come again at once or in a moment."""
    asked = x.random.choice(["0", "1", formatdate(time.time() + 1, usegmt=True), "soon"])
    status = x.random.choice(["429 Too Many Requests", "503 Service Unavailable"])
    await x.say(answer(status, _PAGE, content_type="text/html", retry_after=asked))
    return True


async def bad_gateway(proxy: Misbehaving, x: Exchange) -> bool:
    """Forward, and answer 502 or 504."""
    await proxy.forward(x.request)
    await x.say(answer(x.random.choice(["502 Bad Gateway", "504 Gateway Timeout"]), _PAGE))
    return True


async def refused_by_the_proxy(proxy: Misbehaving, x: Exchange) -> bool:
    """Forward, and answer as if nothing had been: a page of 403 or 404, or a redirect."""
    await proxy.forward(x.request)
    status = x.random.choice(["302 Found", "307 Temporary Redirect", "403 Forbidden", "404 None"])
    await x.say(answer(status, _PAGE, location="/elsewhere", content_type="text/html"))
    return True


async def informed(proxy: Misbehaving, x: Exchange) -> bool:
    """Send 100 and 103 before the answer."""
    await x.say(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")
    return await regular(proxy, x)


async def informed_only(proxy: Misbehaving, x: Exchange) -> bool:
    """Send 100, and no answer."""
    await proxy.forward(x.request)
    await x.say(b"HTTP/1.1 100 Continue\r\n\r\n")
    return False


async def closed_silently(proxy: Misbehaving, x: Exchange) -> bool:
    """Answer, and close the connection without announcing it."""
    await regular(proxy, x)
    return False


#: A success that is none. A client that looks at the status alone loses the add.
LIES: Final[tuple[Fault, ...]] = (a_page_in_json, answered_as_another)
FAULTS: Final[tuple[Fault, ...]] = (
    *(lost_before, lost_after, reset_after, delayed, forwarded_too_late, answered_too_late),
    *(twice, again_later, cut_in_the_head, cut_in_the_body, too_long, too_long_and_open),
    *(too_short, surplus, another_protocol, garbage, a_page, another_type, oversized),
    *(endless_body, endless_head, busy, bad_gateway, refused_by_the_proxy, informed),
    *(informed_only, closed_silently),
)


@contextmanager
def misbehaving(
    upstream: str, seed: int, slow_s: float, deck: Sequence[Fault] = ()
) -> Iterator[Misbehaving]:
    """Run a proxy in a thread; at the end, wait until everything it holds back was forwarded.

    It deals every fault, unless *deck* has others.
    """
    proxy = Misbehaving(upstream, seed, slow_s, deck)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    server = run(proxy.listen())
    try:
        yield proxy
        run(proxy.drain())
    finally:
        run(_close(server))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _close(server: asyncio.Server) -> None:
    server.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for each in others:
        each.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upstream", required=True, help="base URL of the service")
    parser.add_argument("--seed", type=int, default=time.time_ns())
    parser.add_argument("--slow", type=float, default=1.0, help="seconds of the longest delays")
    given = parser.parse_args()
    proxy = Misbehaving(given.upstream, given.seed, given.slow)
    server = await proxy.listen()
    sys.stdout.write(f"{proxy.url}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
