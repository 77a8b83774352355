"""Who does an administrative act over HTTP, for the audit log."""

from __future__ import annotations

from typing import Final

from api.http.call import Call
from counter.security.audit_log import Who

#: Who it is where no key is asked for.
_ANYONE: Final = "anyone"


def who_of(call: Call) -> Who:
    """The key that *call* came with, never its secret, and where it came from."""
    caller, client = call.caller, call.scope.get("client")
    key = None if caller is None else caller.key
    return Who(
        _ANYONE if key is None else f"key:{key.id}",
        remote=None if client is None else f"{client[0]}:{client[1]}",
        request_id=call.request_id,
    )
