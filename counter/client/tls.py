"""Whom a client trusts over HTTPS, and what it shows of itself."""

from __future__ import annotations

import ssl

from counter.client.options import Options
from counter.errors import InvalidParameterError


def context_of(options: Options) -> ssl.SSLContext | None:
    """The context of the files in *options*; None where there are none, and httpx's own will do.

    Raises InvalidParameterError, naming the files that cannot be used.
    """
    ca, cert, key = options.tls_ca, options.tls_cert, options.tls_key
    if ca is None and cert is None:
        return None
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            # Without a password of ours OpenSSL would ask the terminal for one.
            context.load_cert_chain(cert, key, password=lambda: "")
    except OSError as error:
        raise InvalidParameterError(
            f"tls_ca {ca}, tls_cert {cert} and tls_key {key} cannot be used:"
            f" {getattr(error, 'reason', None) or error.strerror}; they must be PEM files, and the"
            " key that of the certificate, with no password"
        ) from error
    return context
