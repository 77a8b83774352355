"""The TypeScript client in a real browser, in a page of another origin than the service."""

import functools
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from playwright.sync_api import Browser

from clients.conformance.misbehaving import Exchange, Misbehaving, lost_after, misbehaving, regular
from counter.api_keys import Scope
from tests.browser.conftest import FOREIGN, served
from tests.clients.programs import TYPESCRIPT, typescript

Json = Any
HASTY = {"deadlineMs": 20_000, "attemptTimeoutMs": 600, "backoffFirstMs": 5, "backoffMaxMs": 50}
SLOW_S = 0.7
#: One for each bit of the count. A browser has six connections to a service.
ADDS = 48

#: Runs the body of a function with a client, the module, and arguments of the test.
RUN = """async ([body, settings, given]) => {
  const sdk = await import("/index.js");
  const client = new sdk.CounterClient({ namespace: "lab", ...settings });
  const work = new Function("sdk", "client", "given", `return (async () => {${body}})()`);
  const found = await work(sdk, client, given);
  return JSON.stringify(found, (_, each) => typeof each === "bigint" ? Number(each) : each);
}"""


class Modules(SimpleHTTPRequestHandler):
    """The built package, and an empty page for all that is not in it."""

    def send_error(self, *_: Any, **__: Any) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


@contextmanager
def origin() -> Iterator[str]:
    """A page's origin, which has the built package too."""
    handler = functools.partial(Modules, directory=str(TYPESCRIPT / "dist" / "src"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{FOREIGN}:{server.server_port}"
        server.shutdown()


class Listed(NamedTuple):
    """A service, the one origin of pages that can read its responses, and a key."""

    url: str
    origin: str
    key: str

    def counts(self, *counters: str) -> list[int]:
        headers = {"authorization": f"Bearer {self.key}"}
        body = {"counters": counters, "max_staleness": "0s"}
        url = f"{self.url}/v1/namespaces/lab/batch/get"
        answer = httpx.post(url, json=body, headers=headers, timeout=30, trust_env=False)
        return [each["count"] for each in answer.json()["results"]]


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory, chromium: Browser) -> Iterator[Listed]:
    typescript(Path())
    home = tmp_path_factory.mktemp("listed")
    with origin() as page, served(home, Scope.ADMIN, Scope.WRITE, cors_origins=page) as (url, keys):
        for name, settings in (("lab", {}), ("lab-slow", {"requests_per_s": 1})):
            made = httpx.put(
                f"{url}/v1/namespaces/{name}",
                json={"counter_type": "ACCURATE", **settings},
                headers={"authorization": f"Bearer {keys[0]}"},
                timeout=100,
                trust_env=False,
            )
            assert made.status_code == 201, made.text
        yield Listed(url, page, keys[1])


Run = Callable[..., Json]


@pytest.fixture
def run(chromium: Browser, listed: Listed) -> Iterator[Run]:
    """Runs JavaScript in a page: ``run(body, url=..., origin=..., given=..., option=...)``."""
    context = chromium.new_context()
    page = context.new_page()

    def run(body: str, url: str, given: Json = None, of: str = listed.origin, **more: Any) -> Json:
        page.goto(f"{of}/page")
        settings = {"url": url, "apiKey": listed.key, **more}
        return json.loads(page.evaluate(RUN, [body, settings, given]))

    yield run
    context.close()


def test_a_page_of_another_origin_counts_exactly(run: Run, listed: Listed) -> None:
    found = run(
        """
        const token = sdk.Token.new();
        const first = await client.add("c", 2, { token });
        const again = await client.add("c", 2, { token });
        const key = await client.addAndGet("c", 3, { token: sdk.Token.fromKey("order-1") });
        const refused = await client.add("c", 4, { token }).catch((error) => error);
        const { count } = await client.get("c");
        return [first.replayed, again.replayed, key.count, refused.code, count];
        """,
        listed.url,
    )
    assert found == [False, True, 5, "token_conflict", 5]
    assert listed.counts("c") == [5]


def test_a_page_follows_a_count_to_which_its_buffer_adds(run: Run, listed: Listed) -> None:
    """The headers of a stream, of reads and of the changes of a namespace pass, too."""
    found = run(
        """
        const buffer = client.buffer();
        const ended = new AbortController();
        const counts = [];
        for await (const { count } of client.live("buffered", { signal: ended.signal })) {
          if (counts.push(count) === 1) for (let add = 0; add < 3; add++) buffer.add("buffered");
          if (count === 3n) ended.abort();
        }
        await buffer.close();
        const [many] = await client.getMany(["buffered"]);
        const names = [];
        for await (const name of client.names({ prefix: "buff" })) names.push(name);
        const refused = await client.changeNamespace({ cache_ttl: "1s" }).catch((error) => error);
        return [counts[0], counts.at(-1), many.count, names, refused.code];
        """,
        listed.url,
    )
    assert found == [0, 3, 3, ["buffered"], "scope_insufficient"]


async def the_adds_answer_is_lost(proxy: Misbehaving, x: Exchange) -> bool:
    """The preflight request of a browser passes."""
    is_add = x.request.first.startswith(b"POST")
    return await (lost_after if is_add else regular)(proxy, x)


def test_an_add_whose_response_is_lost_is_resolved(run: Run, listed: Listed) -> None:
    with misbehaving(listed.url, 1, SLOW_S, [the_adds_answer_is_lost]) as proxy:
        found = run(
            """
            const error = await client.add("lost", 7).catch((error) => error);
            const kept = String(error.unfinished);
            const direct = new sdk.CounterClient({ ...given, namespace: "lab" });
            const { applied } = await direct.resolve(kept);
            const again = await direct.add("lost", 7, { token: error.token });
            return [error.name, applied, again.replayed];
            """,
            proxy.url,
            {"url": listed.url, "apiKey": listed.key},
            # On a busy machine one attempt, with its preflight request, takes half a second.
            deadlineMs=3_000,
        )
        sent = proxy.dealt["the_adds_answer_is_lost"]
    assert found == ["UnknownOutcomeError", True, True]
    assert sent > 2, "it was sent once: there was no retry"
    assert listed.counts("lost") == [7]


def test_counts_are_exact_through_any_fault(run: Run, listed: Listed) -> None:
    """A browser hides the responses of a proxy that lack the permission to read them."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    with misbehaving(listed.url, seed, SLOW_S) as proxy:
        ends = run(
            """
            const ends = [];
            const work = async () => {
              while (ends.length < given) {
                const at = ends.push(true) - 1;
                await client.add("faults", 2 ** at).catch((error) => {
                  ends[at] = String(error.unfinished);
                });
              }
            };
            await Promise.all([1, 2, 3, 4, 5, 6].map(work));
            return ends;
            """,
            proxy.url,
            ADDS,
            retriesAtOnce=10_000,
            **HASTY,
        )
        assert len(proxy.dealt) > 10
    unknown = [each for each in ends if each is not True]
    applied = run(
        "return Promise.all(given.map(async (each) => (await client.resolve(each)).applied));",
        listed.url,
        unknown,
    )
    resolved = dict(zip(unknown, applied, strict=True))
    expected = sum(2**at for at, end in enumerate(ends) if end is True or resolved[end])
    assert listed.counts("faults") == [expected]
    assert ends.count(True) > 0


def test_a_page_reads_retry_after_and_the_accept_limit(run: Run, listed: Listed) -> None:
    found = run(
        """
        const answers = [];
        const seen = async (...sent) => (answers.push(await fetch(...sent)), answers.at(-1));
        const slow = new sdk.CounterClient({ ...given, namespace: "lab-slow", fetch: seen });
        const of = (status) => answers.find((each) => each.status === status)?.headers;
        // Several at once: one after the other they may be slower than the rate.
        const add = () => slow.add("c", 1).catch(() => null);
        while (!of(200) || !of(429)) await Promise.all([add(), add(), add(), add()]);
        return [of(200).get("idempotency-ttl"), of(429).get("retry-after")];
        """,
        listed.url,
        {"url": listed.url, "apiKey": listed.key, "deadlineMs": 3_000},
    )
    assert [int(each) > 0 for each in found] == [True, True]


def test_a_page_of_any_other_origin_counts_nothing(run: Run, listed: Listed) -> None:
    """It has the key, and its browser neither sends the add nor shows a response."""
    with origin() as other:
        name = run(
            'return client.add("foreign", 1).catch((error) => error.name);',
            listed.url,
            of=other,
            deadlineMs=200,
        )
    assert name == "UnknownOutcomeError"
    assert listed.counts("foreign") == [0]
