"""Where a client sends to, and as whom: base URLs, the API key, and proxies on the way."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Sequence
from typing import Final
from urllib.request import getproxies, proxy_bypass

import httpx

from counter.errors import InvalidParameterError

_PORT_MAX: Final = 65_535


def checked_urls(url: str | Sequence[str]) -> list[str]:
    """The base URLs that *url* names, without a slash at the end. Raises InvalidParameterError."""
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
    """What is wrong with *url*, if anything is."""
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
        return "has a user or a password in it, which would stand in errors and logs: leave it out"
    if read.query or read.fragment:
        return "has a query or a fragment; give what stands before /v1 in the paths of the API"
    return None


def authorization(api_key: str | None) -> dict[str, str]:
    """The header of *api_key*. Raises InvalidParameterError."""
    if api_key is None:
        return {}
    if not isinstance(api_key, str):
        raise InvalidParameterError(f"the API key is no text, but {type(api_key).__name__}")
    # As a file has it, with the end of its line. What it is, no error tells.
    api_key = api_key.strip()
    if not (api_key.isascii() and api_key.isprintable()) or not api_key or " " in api_key:
        raise InvalidParameterError(
            f"the API key of {len(api_key)} characters is empty, or has some that no key has: give"
            " it as counter key create printed it"
        )
    return {"Authorization": f"Bearer {api_key}"}


def direct(urls: Sequence[str]) -> dict[str, None]:
    """What httpx must reach without a proxy of the environment: a proxy on another machine cannot
    reach this one's loopback, which HTTP_PROXY is not meant for."""
    hosts = {httpx.URL(each).host for each in urls}
    # A host with colons is an IPv6 address.
    return {
        f"all://[{host}]" if ":" in host else f"all://{host}": None
        for host in hosts
        if _is_loopback(host)
    }


def by_proxy(url: str) -> str:
    """What to say of the way to *url* where the environment names a proxy for it."""
    read = httpx.URL(url)
    if _is_loopback(read.host) or proxy_bypass(read.host):
        return ""
    found = getproxies()
    return " by the proxy that the environment names" if {read.scheme, "all"} & set(found) else ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


#: How long a base URL that did not answer is passed by; then one attempt tries it again. Without
#: that every call would begin with a failure while the first server is away, and the retries that
#: calls share would soon be used up.
_AWAY_S: Final = 1.0


class Places:
    """Base URLs, and until when which of them is passed by. Threads may share it."""

    def __init__(self, urls: Sequence[str], now_s: Callable[[], float] = time.monotonic) -> None:
        self._urls = tuple(urls)
        self._now_s = now_s
        self._away_until_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._urls)

    def pick(self, number: int) -> str:
        """Where attempt *number* of a call goes; where none answers, to each in turn."""
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
                # This attempt finds out; others go by until it has.
                self._away_until_s[url] = now_s + _AWAY_S
                return url
        return first

    def answered(self, url: str) -> None:
        """*url* gave an answer, whatever it was."""
        if self._away_until_s:
            self._away_until_s.pop(url, None)

    def failed(self, url: str) -> None:
        """*url* gave none."""
        self._away_until_s[url] = self._now_s() + _AWAY_S
