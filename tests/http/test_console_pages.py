"""The console's files: served as they lie in the package, and allowed nothing but themselves."""

import hashlib
import re
from pathlib import Path

import pytest

from api.console.pages import files
from counter.api_keys import Scope
from tests.support.app import App, running
from tests.support.keys import hand_out
from tests.support.problems import assert_problem
from tests.support.rest import Rest
from tests.support.server import ROOT

STATIC = ROOT / "api" / "console" / "static"


@pytest.fixture
def storage() -> str:
    """Nothing here depends on the store."""
    return "memory"


@pytest.mark.parametrize("path", ["", *(f"/{each}" for each in sorted(files()))])
async def test_each_file_has_its_type_and_a_strict_policy(rest: Rest, path: str) -> None:
    answer = await rest.http.get(f"/console{path}")
    assert answer.status_code == 200
    assert answer.content == (STATIC / (path[1:] or "index.html")).read_bytes()
    kinds = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    assert answer.headers["content-type"].startswith(
        kinds.get(path.rpartition(".")[2], "text/html")
    )
    assert answer.headers["cache-control"] == "no-cache"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert "://" not in policy


async def test_a_file_that_did_not_change_is_not_sent_again(rest: Rest) -> None:
    first = await rest.http.get("/console")
    again = await rest.http.get("/console", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert "content-length" not in again.headers


async def test_a_trailing_slash_leads_to_the_page(rest: Rest) -> None:
    answer = await rest.http.get("/console/")
    assert answer.status_code == 308
    assert answer.next_request is not None
    assert answer.next_request.url.path == "/console"


async def test_the_root_leads_a_browser_to_the_page_and_no_other_client(rest: Rest) -> None:
    accepts = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
    answer = await rest.http.get("/", headers={"accept": accepts})
    assert (answer.status_code, answer.headers["location"]) == (303, "console")
    assert answer.headers["vary"] == "Accept"
    for accept in ("*/*", "application/json"):
        answer = await rest.http.get("/", headers={"accept": accept})
        assert_problem(answer, "not_found")


async def test_the_console_answers_head_and_rejects_writes(rest: Rest) -> None:
    head = await rest.http.head("/console")
    assert (head.status_code, head.content) == (200, b"")
    assert int(head.headers["content-length"]) > 0
    answer = await rest.http.post("/console")
    assert_problem(answer, "method_not_allowed")
    assert answer.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", ["nothing.js", "../pages.py", "uplot/README.md", "uplot", "%2e/"])
async def test_nothing_else_lies_below_it(rest: Rest, path: str) -> None:
    answer = await rest.http.get(f"/console/{path}")
    assert_problem(answer, "not_found")


async def test_the_page_itself_needs_no_key(tmp_path: Path) -> None:
    async with running("memory", tmp_path) as app:
        await hand_out(app, Scope.ADMIN)
        assert (await app.http.get("/console")).status_code == 200
        assert (await app.http.get("/v1/namespaces")).status_code == 401


async def test_the_page_wants_nothing_from_elsewhere(app: App) -> None:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    wanted = re.findall(r"(?:src|href)=\"([^\"#]+)\"", page)
    assert len(wanted) >= 5
    for each in wanted:
        assert (await app.http.get(f"/{each}")).status_code == 200, each
    scripts = [each.read_text(encoding="utf-8") for each in STATIC.glob("*.js")]
    for name in re.findall(r"from \"\./([^\"]+)\"", "".join(scripts)):
        assert (STATIC / name).is_file(), name
    assert not re.findall(r"https?://", "".join([page, *scripts]))
    assert "localStorage" not in "".join(scripts)
    # The key of those who ask for it, in one place.
    keeps = {each.name for each in STATIC.glob("*.js") if "sessionStorage" in each.read_text()}
    assert keeps == {"api.js"}


def test_third_party_files_are_unchanged() -> None:
    """The chart library matches the name and the checksums beside it."""
    notes = (STATIC / "uplot" / "README.md").read_text(encoding="utf-8")
    noted = dict(re.findall(r"^\| (\S+) \| ([0-9a-f]{64}) \|$", notes, re.MULTILINE))
    vendored = {
        each.name: hashlib.sha256(each.read_bytes()).hexdigest()
        for each in (STATIC / "uplot").iterdir()
        if each.suffix in (".js", ".css")
    }
    assert vendored == noted
    assert (STATIC / "uplot" / "LICENSE").is_file()
