"""OpenMeter's client from npm, unchanged but for its base URL: every event counts exactly once."""

import json
import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from clients.conformance.misbehaving import misbehaving
from tests.clients.programs import CLIENTS, run_node
from tests.support.needs import miss
from tests.support.server import served

PROGRAM = CLIENTS / "generated" / "openmeter"
RULES = [
    {"type": "prompt", "counter": "tokens/{subject}/{data.model}", "delta": "data.tokens"},
    {"type": "prompt", "counter": "prompts", "delta": 1},
]
EVENTS, COPIES, BATCH = 300, 3, 6

pytestmark = pytest.mark.usefixtures("child_processes")


def test_its_events_count_once_over_a_connection_that_loses_replies(tmp_path: Path) -> None:
    """Copies arrive in other batches, in another order, at once, and after the accept limit."""
    if shutil.which("npm") is None:
        miss("there is no npm (nodejs 20 or newer)")
    run_node("bash", "-c", ". scripts/setup.sh; install_node clients/generated", at=CLIENTS.parent)
    seed = int(os.environ.get("FAULTS_SEED", "1"))
    rng = random.Random(seed)
    events: list[dict[str, Any]] = [
        {
            "id": str(number % 100),
            "source": f"app-{number // 100}",
            "type": "prompt",
            "subject": f"customer {rng.randrange(3)}",
            "data": {"tokens": rng.choice([7, "11", "13.0"]), "model": rng.choice("ab")},
        }
        for number in range(EVENTS)
    ]
    expected: Counter[str] = Counter(prompts=EVENTS)
    for each in events:
        name = f"tokens/{each['subject']}/{each['data']['model']}"
        expected[name] += int(float(each["data"]["tokens"]))
    sent = events * COPIES
    rng.shuffle(sent)
    batches = [sent[at : at + BATCH] for at in range(0, len(sent), BATCH)]
    with served(tmp_path) as server, misbehaving(server.url, seed, 0.6) as proxy:
        path = "/v1/namespaces/default"
        rules = {"event_rules": RULES}
        httpx.put(f"{server.url}{path}", json=rules, timeout=100).raise_for_status()
        (tmp_path / "batches").write_text("\n".join(map(json.dumps, batches)), encoding="utf-8")
        shutil.copytree(PROGRAM, tmp_path / "program")
        (tmp_path / "node_modules").symlink_to(CLIENTS / "generated" / "node_modules")
        (tmp_path / "package.json").write_text('{"type": "module"}', encoding="utf-8")
        command = f"node program/main.js {proxy.url}{path} ck_none < batches"
        printed = run_node("bash", "-c", command, at=tmp_path)
    # The proxy has forwarded by now all that it held back.
    with served(tmp_path) as server:
        found = {
            name: httpx.get(
                f"{server.url}{path}/counters/{quote(name, safe='')}",
                params={"max_staleness": "0s"},
                timeout=100,
            ).json()["count"]
            for name in expected
        }
    assert found == dict(expected), f"seed {seed}: {printed}, {proxy.dealt}"
    assert int(printed.split()[1]) > 0, "no reply was lost"
