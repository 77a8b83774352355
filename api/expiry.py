"""When a certificate ends. The standard library reads that of a peer alone, and not of a file."""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

_BLOCK: Final = re.compile(
    r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL | re.ASCII
)
#: Tags of DER (X.690) that are met here.
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
#: Two digits of a year from here on are of the last century (RFC 5280, 4.1.2.5.1).
_CENTURY: Final = 50


def ends_at_s(path: Path) -> float:
    """The end of the first certificate in the PEM file *path*, in Unix time.

    Raises OSError, and ValueError where there is none.
    """
    found = _BLOCK.search(path.read_text(encoding="ascii", errors="replace"))
    if found is None:
        raise ValueError(f"{path} holds no certificate")
    der = ssl.PEM_cert_to_DER_cert(found[0])
    try:
        return _not_after(der).timestamp()
    except IndexError as error:
        raise ValueError(f"the certificate in {path} is cut off") from error


def _not_after(der: bytes) -> datetime:
    """The second time of ``tbsCertificate.validity`` (RFC 5280, 4.1)."""
    whole, _ = _content(der, 0)
    at, _ = _content(der, whole)
    if der[at] == _VERSION:
        at = _content(der, at)[1]
    for _ in ("serialNumber", "signature", "issuer"):
        at = _content(der, at)[1]
    validity, _ = _content(der, at)
    at = _content(der, validity)[1]
    start, end = _content(der, at)
    text = der[start:end].decode("ascii")
    if der[at] == _UTC_TIME:
        text = f"{'19' if int(text[:2]) >= _CENTURY else '20'}{text}"
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _content(der: bytes, at: int) -> tuple[int, int]:
    """Where the contents of the value at *at* begin and end."""
    length, start = der[at + 1], at + 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(der[at + 2 : start], "big")
    return start, start + length
