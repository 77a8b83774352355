"""API keys for tests."""

from typing import Any

from counter.api_keys import ApiKey, Scope
from counter.security.keys import digest_of, key_text, new_id, new_secret
from tests.support.app import App
from tests.support.times import START_US


def made(scope: Scope, *namespaces: str, **more: Any) -> tuple[ApiKey, dict[str, str]]:
    """A key, and the header that its holder sends."""
    secret = new_secret()
    key = ApiKey(
        id=new_id(),
        label="",
        digest=digest_of(secret.encode()),
        namespaces=namespaces or ("*",),
        scope=scope,
        **{"created_at_us": START_US, **more},
    )
    return key, {"Authorization": f"Bearer {key_text(key.id, secret)}"}


async def hand_out(app: App, scope: Scope, *namespaces: str, **more: Any) -> dict[str, str]:
    """The header of a new key that *app* knows."""
    key, header = made(scope, *namespaces, **more)
    await app.store.keys.create_api_key(key)
    await app.application.keys.refresh()
    return header
