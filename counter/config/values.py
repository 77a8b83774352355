"""Convert the values of settings between text and their internal form."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar
from urllib.parse import parse_qs, urlsplit

from pydantic import AfterValidator, BeforeValidator, PlainSerializer
from pydantic_settings import NoDecode

from counter.config.store_kinds import check_store, store_kind
from counter.quantities import format_duration, parse_duration

MEMCACHED_PORT: Final = 11211
REDIS_PORT: Final = 6379
PORT_MAX: Final = 65_535
_MEMCACHED: Final = "memcached://"
#: The schemes of Redis and Valkey, which speak one protocol, with those that the driver knows.
_REDIS: Final[Mapping[str, str]] = {
    "redis": "redis",
    "valkey": "redis",
    "rediss": "rediss",
    "valkeys": "rediss",
}
#: Options of a URL of Redis, which are those of the driver.
_REDIS_OPTIONS: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_REDIS_DATABASE: Final = re.compile(r"/?|/\d{1,9}", re.ASCII)
_HOST: Final = re.compile(r"[\w.-]{1,253}|\[[0-9a-fA-F:.]{2,45}(%\w+)?\]", re.ASCII)
#: A name as in the header Host, without a port.
_HOST_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9._-]{0,252}[a-z0-9])?|\[[0-9a-f:.]+\]")
#: An origin as browsers send it: no default port, no path, no upper case.
_ORIGIN: Final = re.compile(
    r"(?!http://.*:80$|https://.*:443$)https?://([a-z0-9.-]{1,253}|\[[0-9a-f:.]{2,45}\])(:\d{1,5})?"
)
_BEFORE_AT: Final = re.compile(r"^([a-z]*:?/{0,2}).*@", re.DOTALL)

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Word:
    """The word for the value of a setting in the help of its flag."""

    text: str


#: The name of a kind of store that is installed.
StoreName = Annotated[str, AfterValidator(check_store), Word("STORE")]


def _to_us(value: Any) -> Any:
    if isinstance(value, bool | int | float):
        raise ValueError("a duration needs a unit; write it like 5s, 250ms, 1h30m or 7d")
    return parse_duration(value) if isinstance(value, str) else value


#: A duration, parsed from text like "5s" and kept in microseconds.
Duration = Annotated[int, BeforeValidator(_to_us), PlainSerializer(format_duration)]


def between(low_us: int, high_us: int) -> AfterValidator:
    """Return a validator that restricts a duration to ``[low_us, high_us]``; its error shows all
    three with units."""

    def check(value_us: int) -> int:
        if not low_us <= value_us <= high_us:
            raise ValueError(
                f"it is {format_duration(value_us)}; it must be from {format_duration(low_us)}"
                f" to {format_duration(high_us)}"
            )
        return value_us

    return AfterValidator(check)


def endpoint(text: str, default_port: int) -> tuple[str, int]:
    """Split ``host[:port]``; an IPv6 address is in brackets. Raises ValueError."""
    if text.count(":") > 1 and not text.startswith("["):
        text = f"[{text}]"
    host, colon, port = text.rpartition(":")
    if not colon or port.endswith("]"):
        host, port = text, str(default_port)
    plain = port.isascii() and port.isdigit() and len(port) <= len(str(PORT_MAX))
    if _HOST.fullmatch(host) is None or not (plain and 1 <= int(port) <= PORT_MAX):
        raise ValueError(f"{text[:80]!r} is not host or host:port")
    return host.strip("[]"), int(port)


def _split(value: Any) -> Any:
    return [each.strip() for each in value.split(",")] if isinstance(value, str) else value


#: A list, or text with commas between the items.
List = Annotated[tuple[_Item, ...], NoDecode, BeforeValidator(_split)]


def _check_cache(text: str) -> str:
    if redis_server(text) is None:
        memcached_servers(text)
    return text


def redis_server(text: str) -> tuple[str, str] | None:
    """Return the URL for the driver, and host:port, of ``redis://user:password@host:port/0``; None
    if *text* has another scheme. Raises ValueError, without the password."""
    scheme, _, rest = text.partition("://")
    if scheme not in _REDIS:
        return None
    shown = without_password(text)[:80]
    try:
        url = urlsplit(f"//{rest}")
        options = parse_qs(url.query, keep_blank_values=True)
        host, port = endpoint(url.netloc.rpartition("@")[2], REDIS_PORT)
    except ValueError:
        # Its message could show a part of a password.
        raise ValueError(
            f"{shown!r} is not like {scheme}://user:password@host:port/0, one host, with special"
            " characters of the password as %XX"
        ) from None
    if not _REDIS_DATABASE.fullmatch(url.path) or url.fragment:
        raise ValueError(f"{shown!r} has no number of a database after the host")
    for name in options:
        if _REDIS[scheme] != "rediss" or name not in _REDIS_OPTIONS:
            raise ValueError(
                f"{scheme}:// has no option {name[:80]!r}; rediss:// and valkeys:// have"
                f" {', '.join(_REDIS_OPTIONS)}"
            )
    return f"{_REDIS[scheme]}://{rest}", f"{host}:{port}"


def without_password(text: str) -> str:
    """Return the URL *text* with all before the last @ masked, well-formed or not."""
    return _BEFORE_AT.sub(r"\1********@", text)


def memcached_servers(text: str) -> tuple[tuple[str, int], ...]:
    """Return the servers of ``memcached://host:port,host:port``; none for ``memory``. Raises
    ValueError."""
    if text == "memory":
        return ()
    if not text.startswith(_MEMCACHED):
        raise ValueError(
            f"{without_password(text)[:80]!r} is neither memory nor memcached://host:port,host:port"
            " nor redis://host:port, rediss://, valkey:// or valkeys://"
        )
    named = text.removeprefix(_MEMCACHED).rstrip("/")
    if "/" in named or urlsplit(f"//{named}").username is not None:
        raise ValueError(f"{without_password(text)[:80]!r} has more than hosts and ports in it")
    return tuple(endpoint(each.strip(), MEMCACHED_PORT) for each in named.split(","))


#: ``memory``, ``memcached://host:port,host:port``, or ``redis://host:port``.
CacheAddress = Annotated[str, AfterValidator(_check_cache), Word("URL")]


def _check_file(path: Path) -> Path:
    try:
        with path.open("rb"):
            return path
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from error


#: A file that can be read.
ReadableFile = Annotated[Path, AfterValidator(_check_file)]


def read_secret(path: Path) -> str:
    """Return the content of the file *path* without surrounding white space. Raises OSError, and
    ValueError if it is not text."""
    try:
        return path.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError:
        # The codec's message would show a part of the secret.
        raise ValueError(f"{str(path)!r} is not text in UTF-8") from None


def _check_origin(text: str) -> str:
    if _ORIGIN.fullmatch(text) is None:
        raise ValueError(
            f"{text[:80]!r} is no origin as browsers send it: write https://host, or"
            " https://host:port if the port is not the scheme's own, in lower case, with nothing"
            " after it; there is no wildcard"
        )
    return text


def _check_host(text: str) -> str:
    if _HOST_NAME.fullmatch(text) is None:
        raise ValueError(
            f"{text[:80]!r} is no name of a host: write it in lower case and without a port, like"
            " counter.example; there is no wildcard"
        )
    return text


#: A list of host names.
Hosts = Annotated[List[Annotated[str, AfterValidator(_check_host)]], Word("HOSTS")]

#: A list of web origins.
Origins = Annotated[List[Annotated[str, AfterValidator(_check_origin)]], Word("ORIGINS")]

#: Computes a default from the values of the fields before it.
FromOthers = Callable[[dict[str, Any]], Any]


def by_store(name: str) -> FromOthers:
    """Return a default of the setting *name* that depends on the store."""
    return lambda data: getattr(store_kind(data["store"]).defaults, name)
