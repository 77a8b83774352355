"""Certificates for tests, made by openssl: an authority and its certificates."""

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.needs import miss

_CURVE = ("ec", "-pkeyopt", "ec_paramgen_curve:P-256")


@dataclass(frozen=True, slots=True)
class Signed:
    """A certificate and its key, as files."""

    cert: Path
    key: Path

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a service that shows it."""
        return {"https_cert": self.cert, "https_key": self.key}

    def install(self, other: "Signed") -> None:
        """Replace this one by *other*, as a renewal does: whole files, one after the other."""
        for theirs, ours in ((other.cert, self.cert), (other.key, self.key)):
            new = ours.with_suffix(".new")
            shutil.copy(theirs, new)
            new.replace(ours)


class Authority:
    """Signs certificates for this machine."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        if shutil.which("openssl") is None:
            miss("there is no openssl to make certificates with")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._made = 0
        self.cert, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        openssl(
            *("req", "-x509", "-newkey", *_CURVE, "-nodes", "-days", "2", "-subj", f"/CN={name}"),
            *("-keyout", self._key, "-out", self.cert),
        )

    def sign(self, name: str = "server", password: str | None = None) -> Signed:
        """A new certificate for *name*, localhost and 127.0.0.1."""
        self._made += 1
        stem = self._folder / f"{name}-{self._made}"
        made = Signed(stem.with_suffix(".pem"), stem.with_suffix(".key"))
        hidden = ("-nodes",) if password is None else ("-passout", f"pass:{password}")
        openssl(
            *("req", "-x509", "-newkey", *_CURVE, *hidden, "-days", "2", "-subj", f"/CN={name}"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
            *("-CA", self.cert, "-CAkey", self._key, "-keyout", made.key, "-out", made.cert),
        )
        made.key.chmod(0o600)
        return made

    def client(self, own: Signed | None = None) -> ssl.SSLContext:
        """A context that trusts this authority and shows its *own* certificate."""
        context = ssl.create_default_context(cafile=str(self.cert))
        if own is not None:
            context.load_cert_chain(own.cert, own.key)
        return context


def openssl(*words: str | Path) -> str:
    """Run openssl; return what it prints."""
    done = subprocess.run(["openssl", *words], check=True, capture_output=True, text=True)
    return done.stdout
