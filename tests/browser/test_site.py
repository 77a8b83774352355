"""The documentation as ``scripts/docs`` builds it: whole, without a warning, fit for everybody."""

import functools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from cyclopts import App
from playwright.sync_api import expect

import counter_client as client
from api.document.problem_page import explained, problems_page
from api.http.problems import problem_types
from counter.cli.app import app
from counter.config.settings import settings_model
from scripts.docs_routes import anchor, openapi
from tests.browser.visits import Visits
from tests.support.server import ROOT

CONFIG = ROOT / "mkdocs.yml"
#: Findings of axe about the theme that are no hindrance.
_OF_THE_THEME = {"landmark-unique", "empty-table-header"}


def build(*flags: str, config: Path = CONFIG) -> subprocess.CompletedProcess[str]:
    """As scripts/docs does."""
    command = [sys.executable, "-m", "properdocs", "build", "--config-file", str(config), *flags]
    environment = {"PATH": os.environ["PATH"], "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, child_processes: None) -> Path:
    """The folder of the site."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = build("--strict", "--site-dir", str(folder))
    assert done.returncode == 0, done.stderr
    return folder


def anchors(site: Path, page: str) -> set[str]:
    """The link targets on a page."""
    return set(re.findall(r'\bid="([^"]+)"', (site / page).read_text(encoding="utf-8")))


def commands(of: App, name: str = "counter") -> Iterator[str]:
    """Every command and group of commands."""
    for each in of:
        if not each.startswith("-"):
            yield f"{name}-{each}"
            yield from commands(of[each], f"{name}-{each}")


def test_every_code_has_a_section(site: Path) -> None:
    """Here and at the service, under the same anchor: there a problem's ``type`` leads to it."""
    codes = {each.code for each in problem_types()}
    assert codes <= anchors(site, "reference/errors.html")
    assert codes == set(re.findall(r'<section id="(\w+)">', problems_page().decode()))


def test_a_problem_is_explained_alike_everywhere() -> None:
    """In docs/http.md, on the service's page and in the reference."""
    row = r"^\| `(\w+)` \| \d{3} \| \w+ \| \w+ \| (.*?) \| (.*?) \|$"
    document = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
    shown: dict[str, tuple[str, str]] = {}
    for code, when, do in re.findall(row, document, re.MULTILINE):
        shown.setdefault(code, (when, do))
    assert shown == {code: (each.when, each.do) for code, each in explained().items()}


def test_every_setting_has_a_section(site: Path) -> None:
    text = (site / "reference/settings.html").read_text(encoding="utf-8")
    # A section of the page describes further datasets.
    for name in set(settings_model().model_fields) - {"extra_datasets"}:
        assert f'id="{name}"' in text
        assert f"COUNTER_{name.upper()}" in text


def test_every_route_has_a_section(site: Path) -> None:
    document = openapi()
    routes = {
        anchor(f"{method} {path}") for path, each in document["paths"].items() for method in each
    }
    assert routes <= anchors(site, "reference/routes.html")


def test_every_command_has_a_section(site: Path) -> None:
    assert set(commands(app)) <= anchors(site, "reference/commands.html")


def test_every_name_of_the_sdk_has_a_section_and_a_docstring(site: Path) -> None:
    names = set(client.__all__)
    assert {f"counter_client.{name}" for name in names} <= anchors(site, "reference/sdk.html")
    undocumented = [
        f"{name}.{each}"
        for name in names
        for each, member in vars(getattr(client, name)).items()
        if not each.startswith("_")
        and (callable(member) or isinstance(member, property | classmethod | staticmethod))
        and not (getattr(member, "__func__", member).__doc__ or "").strip()
    ]
    assert undocumented == []


@pytest.mark.usefixtures("child_processes")
def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    """With the settings of the site, and nothing else of it."""
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "stray.md").write_text("# No part of the navigation\n")
    (folder / "index.md").write_text(
        "# One\n\n[page](gone.md) [anchor](#gone) [absolute](/gone) [unknown](gone/)\n"
    )
    ours = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    config = {key: ours[key] for key in ("site_name", "strict", "validation")}
    config |= {"nav": ["index.md"], "plugins": [], "theme": {"name": "material"}}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))
    done = build(config=tmp_path / "mkdocs.yml")
    assert done.returncode != 0
    for gone in ("stray.md", "'gone.md'", "'#gone'", "'/gone'", "'gone/'"):
        assert gone in done.stderr
    assert done.stderr.count("WARNING") == 5


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("phone", "dark"), [(False, False), (True, True)], ids=["desk", "phone"])
def test_the_site_is_accessible(visit: Visits, address: str, phone: bool, dark: bool) -> None:
    """axe finds nothing that hinders, no page is wider than its window, no other host is asked."""
    looked_over = {"index", "python" if phone else "http"}
    with visit(address, phone=phone, dark=dark) as at:
        for place in sorted({*looked_over, "reference/errors", "reference/sdk"}):
            at.page.goto(f"{address}/{place}.html")
            expect(at.page.locator("h1")).to_be_visible()
            assert at.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), place
            name = f"docs-{place.replace('/', '-')}-{'dark-phone' if phone else 'light-desk'}"
            at.shot(name, whole=False)
            # Further pages have the same parts, only more of them.
            if place in looked_over:
                at.check_access(beside=_OF_THE_THEME)


def test_the_site_works_from_a_folder(visit: Visits, site: Path) -> None:
    """All but the search: no browser gives a page of a folder the worker that it takes."""
    with visit(site.as_uri()) as at:
        at.is_down = True
        # The theme looks for the search's index all the same.
        with at.page.expect_event("pageerror"):
            at.page.goto(f"{site.as_uri()}/index.html")
        search = at.page.locator('[data-md-component="search"]')
        expect(search).to_have_attribute("aria-label", "Search")
        at.errors = [each for each in at.errors if not each.endswith("search/search_index.js")]


def test_it_is_searched_and_copied_from_without_a_network(visit: Visits, address: str) -> None:
    permissions = ["clipboard-read", "clipboard-write"]
    with visit(address, permissions=permissions) as at:
        page = at.page
        page.goto(f"{address}/index.html")
        page.locator("pre").first.hover()
        page.locator(".md-code__button").first.click()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert [line[:4] for line in copied.split("\n") if line] == ["curl"] * 3
        page.get_by_role("textbox", name="Search").click()
        page.keyboard.type("token_too_old")
        expect(page.locator(".md-search-result__link").first).to_be_visible()


def test_the_search_finds_the_page_for_a_common_word(visit: Visits, address: str) -> None:
    """Among the first three."""
    pages = {
        "billing": "how-to/choose-a-counter-type",
        "budget": "how-to/choose-a-counter-type",
        "docker": "how-to/deploy",
        "grafana": "how-to/scrape-counts",
        "rate limit": "how-to/secure-it",
        "reset": "http",
        "javascript": "reference/typescript",
        "flask": "how-to/count-in-web-applications",
        "django": "how-to/count-in-web-applications",
        "gunicorn": "how-to/count-in-web-applications",
        "fastapi": "how-to/count-in-web-applications",
        "uvicorn": "how-to/count-in-web-applications",
        "celery": "how-to/count-in-celery-tasks",
    }
    with visit(address) as at:
        for word, page in pages.items():
            at.page.goto(f"{address}/index.html")
            at.page.get_by_role("textbox", name="Search").click()
            # The box searches at each key: the last one is for the whole word.
            at.page.keyboard.insert_text(word[:-1])
            at.page.keyboard.type(word[-1])
            first = at.page.locator(".md-search-result__item:nth-child(-n + 3)")
            found = first.locator(f'.md-search-result__link[href*="/{page}.html"]')
            expect(found.first, word).to_be_visible()
