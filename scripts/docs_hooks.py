"""Generate pages of the documentation from the code at each build."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from properdocs.config.defaults import ProperDocsConfig
from properdocs.structure.files import File, Files
from properdocs.structure.pages import Page

from scripts.docs_commands import commands_page
from scripts.docs_errors import errors_page
from scripts.docs_routes import routes_page
from scripts.docs_sdk import sdk_page
from scripts.docs_settings import settings_page

_ROOT: Final = Path(__file__).parent.parent


def _readme_of(client: str) -> Callable[[], str]:
    """The page of a client in another language: its package's description."""
    return lambda: (_ROOT / "clients" / client / "README.md").read_text(encoding="utf-8")


PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "reference/go.md": _readme_of("go"),
    "reference/typescript.md": _readme_of("typescript"),
    "reference/commands.md": commands_page,
    "reference/errors.md": errors_page,
    "reference/routes.md": routes_page,
    "reference/sdk.md": sdk_page,
    "reference/settings.md": settings_page,
}
#: A link with its file's name as text, for readers of the file itself.
_NAMED: Final = re.compile(r"\[([\w/-]+\.md)\]\(([\w/.-]+\.md)")

#: A heading that is a route, too long for the margin: it has room for the method and two segments.
_ROUTE: Final = re.compile(
    r"^(#+ `(\w+) /v1/namespaces/(?:\S+/)?([^/\s]+/[^/\s]+|\{namespace\})`)$", re.MULTILINE
)
#: A list of nothing but links to headings of the page: the site has one in the margin.
_LINK: Final = r"\[[^\]]+\]\(#[\w-]+\)"
_CONTENTS: Final = re.compile(rf"^(?:- {_LINK}(?:,\s+{_LINK})*\n)+\n", re.MULTILINE)


def on_files(files: Files, config: ProperDocsConfig) -> Files:
    """Put the pages among those that lie in docs/."""
    for path, text_of in PAGES.items():
        files.append(File.generated(config, path, content=text_of()))
    return files


def on_page_markdown(markdown: str, page: Page, config: ProperDocsConfig, files: Files) -> str:
    """Replace file names in links by page titles, shorten routes in the margin, and leave out lists
    of contents."""
    titles = dict(_titles(config.nav))
    folder = posixpath.dirname(page.file.src_uri)

    def titled(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, found[2]))
        return f"[{titles.get(path, found[1])}]({found[2]}"

    shortened = _ROUTE.sub(r'\1 { data-toc-label="\2 …/\3" }', _CONTENTS.sub("", markdown))
    return _NAMED.sub(titled, shortened)


def _titles(nav: Any) -> Iterator[tuple[str, str]]:
    """The title of each page of the navigation, by its path."""
    for each in nav:
        for title, inner in each.items():
            if isinstance(inner, str):
                yield inner, title
            else:
                yield from _titles(inner)
