"""Each drawing of the documentation is up to date, fits dark pages, and can be read aloud."""

import hashlib
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.server import ROOT

PICTURES = ROOT / "docs" / "pictures"
ASSETS = ROOT / "docs" / "assets"
STYLE = PICTURES / "style.d2"
DRAW = ROOT / "scripts" / "draw"
SHARED = [DRAW / "package.json", DRAW / "draw.mjs", STYLE]
DESCRIPTIONS = sorted(set(PICTURES.glob("*.d2")) - {STYLE})
_SVG = "{http://www.w3.org/2000/svg}"


def test_each_picture_has_a_description() -> None:
    assert {each.stem for each in ASSETS.glob("*.svg")} == {each.stem for each in DESCRIPTIONS}


@pytest.mark.parametrize("description", DESCRIPTIONS, ids=lambda path: path.stem)
def test_a_picture_is_drawn_from_its_description(description: Path) -> None:
    """Otherwise: ./scripts/pictures."""
    parts = [each.read_text(encoding="utf-8") for each in (*SHARED, description)]
    picture = ElementTree.parse(ASSETS / f"{description.stem}.svg").getroot()
    assert picture.get("data-source") == hashlib.sha256("\n".join(parts).encode()).hexdigest()


@pytest.mark.parametrize("description", DESCRIPTIONS, ids=lambda path: path.stem)
def test_a_picture_is_dark_in_a_dark_page_and_asks_no_other_host(description: Path) -> None:
    text = (ASSETS / f"{description.stem}.svg").read_text(encoding="utf-8")
    assert "prefers-color-scheme:dark" in text.replace(" ", "")
    assert set(re.findall(r"\w+://[\w.]+", text)) == {"http://www.w3.org"}
    picture = ElementTree.fromstring(text)
    assert picture.findtext(f"{_SVG}title")
    assert len(picture.findtext(f"{_SVG}desc") or "") > 100
