"""The page on scraping counts is followed: a real Prometheus scrapes a real service."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.documents import page
from tests.support.needs import miss
from tests.support.server import ports_in_a_row, serving
from tests.test_readme import WRITTEN_URL, compare

pytestmark = pytest.mark.usefixtures("child_processes")


PAGE = "how-to/scrape-counts.md"


async def test_prometheus_shows_what_a_short_job_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("prometheus") is None:
        miss("there is no prometheus (Debian: apt-get install prometheus)")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    text = page(PAGE)
    async with serving(tmp_path / "data", tmp_path / "logs") as server:
        places = {"127.0.0.1:8080": server.url.removeprefix("http://")}
        places["127.0.0.1:9090"] = f"127.0.0.1:{ports_in_a_row(1)}"
        [written] = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        config = written.replace("scrape_interval: 15s", "scrape_interval: 100ms")
        assert config != written
        for place, real in places.items():
            config = config.replace(place, real)
        (tmp_path / "prometheus.yml").write_text(config, encoding="utf-8")
        # Without this it waits 5 s for the first targets.
        places["--config.file"] = "--scrape.discovery-reload-interval=100ms --config.file"
        await compare(text, {WRITTEN_URL: server.url, **places}, tmp_path)
