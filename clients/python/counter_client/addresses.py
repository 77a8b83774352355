"""Base URLs, the API key header, and proxies from the environment."""

from __future__ import annotations

import ipaddress
import os
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Final
from urllib.request import getproxies, proxy_bypass

import httpx

from counter_client.errors import InvalidParameterError

_PORT_MAX: Final = 65_535


def checked_urls(url: str | Sequence[str]) -> list[str]:
    """Return *url* as a list of base URLs, no slash at the end. Raises InvalidParameterError."""
    if isinstance(url, str):
        urls = [url]
    elif isinstance(url, Sequence) and all(isinstance(each, str) for each in url):
        urls = list(url)
    else:
        raise InvalidParameterError(f"the base URL is {url!r}; give text, or a list of texts")
    if not urls:
        raise InvalidParameterError("no base URL is given; one is needed")
    for each in urls:
        if problem := _problem_of(each):
            shown = each.rpartition("@")[2]
            raise InvalidParameterError(f"the base URL {shown!r} {problem}")
    return [each.rstrip("/") for each in urls]


def _problem_of(url: str) -> str | None:
    """Return what is wrong with *url*, or None."""
    try:
        read = httpx.URL(url)
    except httpx.InvalidURL as error:
        return f"cannot be read: {error}"
    if read.scheme not in ("http", "https"):
        return "must begin with http:// or https://"
    if not read.host:
        return "names no host; give one, such as http://127.0.0.1:8080"
    if read.port is not None and not 1 <= read.port <= _PORT_MAX:
        return f"has the port {read.port}; 1 to {_PORT_MAX} are ports"
    if read.userinfo:
        return "contains a user or a password, which would appear in errors and logs: leave it out"
    if read.query or read.fragment:
        return "has a query or a fragment; give only the part before /v1"
    return None


def authorization(api_key: str | None) -> dict[str, str]:
    """Return the Authorization header for *api_key*. Raises InvalidParameterError."""
    if api_key is None:
        return {}
    if not isinstance(api_key, str):
        raise InvalidParameterError(f"the API key must be a string, not {type(api_key).__name__}")
    # A key read from a file ends with a newline. Errors never contain the key.
    api_key = api_key.strip()
    if not (api_key.isascii() and api_key.isprintable()) or not api_key or " " in api_key:
        raise InvalidParameterError(
            f"the API key of {len(api_key)} characters is empty or has invalid characters: give it"
            " as counter key create printed it"
        )
    return {"Authorization": f"Bearer {api_key}"}


def proxies(urls: Sequence[str]) -> dict[str, httpx.Proxy]:
    """Return the proxies from the environment, by the pattern of an httpx mount.

    httpx reads the environment itself, but a variable that it cannot use stops every client, also
    one that needs no proxy. Raises InvalidParameterError for a proxy that cannot be used.
    """
    found = {}
    for url in map(httpx.URL, urls):
        if (name := _proxy_name(url)) is not None:
            # A host with colons is an IPv6 address.
            host = f"[{url.host}]" if ":" in url.host else url.host
            found[f"{url.scheme}://{host}"] = _proxy(name, str(url))
    return found


def _proxy(name: str, url: str) -> httpx.Proxy:
    given = getproxies()[name]
    try:
        proxy = httpx.Proxy(given if "://" in given else f"http://{given}")
        if not proxy.url.host:
            raise ValueError("it names no host")
        # Only this looks for the package that SOCKS needs; the context is not used.
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        httpx.HTTPTransport(verify=tls, proxy=proxy).close()
    except (ValueError, ImportError, httpx.InvalidURL) as error:
        # The value may hold a password.
        lower, upper = f"{name}_proxy", f"{name}_proxy".upper()
        variable = lower if lower in os.environ else upper
        raise InvalidParameterError(
            f"{variable} names a proxy for {url} that cannot be used: give http://HOST:PORT"
            " (socks5://HOST:PORT needs the package httpx[socks]), or add the host to NO_PROXY"
        ) from error
    return proxy


def _proxy_name(url: httpx.URL) -> str | None:
    """Return the name of the proxy for *url* in the environment, or None.

    A proxy on another machine cannot reach this machine's loopback."""
    netloc = url.netloc.decode("ascii")
    if _is_loopback(url.host) or proxy_bypass(url.host) or proxy_bypass(netloc):
        return None
    found = getproxies()
    return next((each for each in (url.scheme, "all") if found.get(each)), None)


def by_proxy(url: str) -> str:
    """Return an error suffix if the environment names a proxy for *url*, else an empty string."""
    is_by_proxy = _proxy_name(httpx.URL(url)) is not None
    return " through the proxy from the environment" if is_by_proxy else ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


#: How long a base URL is skipped after it failed; then one attempt tries it again. Otherwise every
#: call would first fail on a server that is down and use up the shared retry budget.
_AWAY_S: Final = 1.0


class Endpoints:
    """Select base URLs and skip those that failed recently. Thread-safe."""

    def __init__(self, urls: Sequence[str], now_s: Callable[[], float] = time.monotonic) -> None:
        self._urls = tuple(urls)
        self._now_s = now_s
        self._away_until_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._urls)

    def pick(self, number: int) -> str:
        """Return the base URL for attempt *number*; if all failed recently, take each in turn."""
        count = len(self._urls)
        first = self._urls[number % count]
        if not self._away_until_s:
            return first
        now_s = self._now_s()
        for place in range(number, number + count):
            url = self._urls[place % count]
            until_s = self._away_until_s.get(url)
            if until_s is None:
                return url
            if until_s <= now_s:
                # Only this attempt probes the URL; others skip it until then.
                self._away_until_s[url] = now_s + _AWAY_S
                return url
        return first

    def mark_reachable(self, url: str) -> None:
        """Record that *url* answered, with any status."""
        if self._away_until_s:
            self._away_until_s.pop(url, None)

    def failed(self, url: str) -> None:
        """Record that *url* did not answer."""
        self._away_until_s[url] = self._now_s() + _AWAY_S
