"""The pages under docs/: their programs and their commands, to be run."""

import re
from collections.abc import Sequence
from pathlib import Path

from tests.support.server import ROOT

DOCS = ROOT / "docs"
_SAVED = re.compile(
    r"[Ss]ave (?:this|it) as `(\w+\.(?:py|toml))`(?:(?!```).)*?```(?:python|toml)\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def page(name: str) -> str:
    """The text of a page, such as ``tutorials/kafka.md``."""
    return (DOCS / name).read_text(encoding="utf-8")


def programs_of(text: str) -> dict[str, str]:
    """The programs and files that a page says to save, by the names that it says."""
    return dict(_SAVED.findall(text))


def save_programs(text: str, folder: Path) -> list[str]:
    """Write each of them; their names."""
    found = programs_of(text)
    for name, program in found.items():
        (folder / name).write_text(program, encoding="utf-8")
    return [*found]


def python_of(text: str, without: Sequence[str] = ()) -> str:
    """All blocks of Python of a page, in order, except those saved as one of *without*."""
    for name, program in _SAVED.findall(text):
        if name in without:
            text = text.replace(program, "")
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
