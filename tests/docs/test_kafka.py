"""docs/tutorials/kafka.md is run against a real Kafka, and its batches are broken off midway."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts import kafka
from tests.support.documents import page, save_programs
from tests.support.needs import miss
from tests.support.rest import Rest
from tests.support.server import Server, ports_in_a_row
from tests.support.waiting import eventually
from tests.test_readme import WRITTEN_URL, compare

TEXT = page("tutorials/kafka.md")
WRITTEN_KAFKA = "127.0.0.1:9092"
#: A step of the program for batches, and the code before which a crash is planted.
STEPS = ("    try:\n        client.atomic(", "    commit(partition, end)\n")
QUICK = '"enable.auto.commit": 0, "session.timeout.ms": 2000, "heartbeat.interval.ms": 300,'
COUNTS = {"home": 200, "about": 100, "prices": 100, "docs": 100}

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Tutorial:
    """The reader's environment: a service, a Kafka, and a folder with the programs."""

    service: Server
    kafka: str
    folder: Path

    @property
    def places(self) -> dict[str, str]:
        """The real addresses by the written ones; windows and time-outs are short."""
        return {
            WRITTEN_URL: self.service.url,
            WRITTEN_KAFKA: self.kafka,
            '"key_ttl": "3d"': '"key_ttl": "30m"',
            '"enable.auto.commit": False,': QUICK,
        }


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, minutes: None) -> Iterator[str]:
    """The address of a Kafka. It ends with this process, however that ends."""
    if problem := kafka.JARS.missing():
        miss(problem)
    port = ports_in_a_row(2)
    server = kafka.broker(tmp_path_factory.mktemp("kafka"), port)
    server.launch()
    command = ["sh", "-c", f"cat; kill -9 {server.pid()}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as watchdog:
        try:
            server.wait_ready()
            yield f"127.0.0.1:{port}"
        finally:
            watchdog.communicate()


@pytest.fixture(scope="module")
def tutorial(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tutorial]:
    folder = tmp_path_factory.mktemp("tutorial")
    server = Server(folder / "data", folder / "logs", {})
    try:
        asyncio.run(server.start())
        made = Tutorial(server, broker, folder)
        text = TEXT
        for written, real in made.places.items():
            text = text.replace(written, real)
        names = ["produce.py", "count_views.py", "rewind.py", "count_batches.py"]
        assert save_programs(text, folder) == names
        yield made
    finally:
        server.clean_up()


async def test_the_tutorial_counts_each_message_once(
    tutorial: Tutorial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its first command to its last; a crash, and a group that is set back, are among them."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    async with asyncio.timeout(300):  # some of its commands wait for what may never come
        await compare(TEXT, tutorial.places, tutorial.folder)


async def test_batches_that_are_interrupted_anywhere_count_once(tutorial: Tutorial) -> None:
    """One consumer dies before it sends, one before it commits; one decision is too late."""
    produce, program = (
        _of_its_own((tutorial.folder / name).read_text(encoding="utf-8"))
        for name in ("produce.py", "count_batches.py")
    )
    (tutorial.folder / "produce_more.py").write_text(produce, encoding="utf-8")
    for number, step in enumerate(STEPS):
        assert program.count(step) == 1
        dies = program.replace(step, f"    import os; os._exit({40 + number})\n{step}")
        (tutorial.folder / f"dies_{number}.py").write_text(dies, encoding="utf-8")
    (tutorial.folder / "lives.py").write_text(program, encoding="utf-8")

    async with tutorial.service.client("broken") as rest:
        made = await rest.http.put("/v1/namespaces/broken", json={"counter_type": "ACCURATE"})
        assert made.status_code == 201
        assert await asyncio.to_thread(_run, tutorial.folder, "produce_more.py") == 0
        for number in range(len(STEPS)):
            assert (
                await asyncio.to_thread(_run, tutorial.folder, f"dies_{number}.py") == 40 + number
            )
        both = [_start(tutorial.folder, "lives.py") for _ in range(2)]
        try:

            async def counted() -> bool:
                assert all(each.poll() is None for each in both)
                return sum((await _counts(rest)).values()) >= 500

            await eventually(counted, "all messages are counted")
        finally:
            for each in both:
                each.kill()
                each.wait()
        assert await _counts(rest) == COUNTS
        metrics = (await rest.http.get("/metrics")).text
    voided = re.search(r'counter_adds_total\{outcome="voided"\} (\d+)', metrics)
    assert voided is not None
    assert int(voided[1]) > 0


def _of_its_own(program: str) -> str:
    """A program with a topic, a group and a namespace that no other test has."""
    names = {'"views"': '"more-views"', "count-batches": "count-more", '"batched"': '"broken"'}
    for written, other in names.items():
        program = program.replace(written, other)
    return program


async def _counts(rest: Rest) -> dict[str, int]:
    names = [f"views:{each}" for each in COUNTS]
    answer = await rest.post(rest.path(verb="batch/get"), {"counters": names})
    return dict(zip(COUNTS, (each["count"] for each in answer.json()["results"]), strict=True))


def _start(folder: Path, program: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, program], cwd=folder, stdout=subprocess.DEVNULL)


def _run(folder: Path, program: str) -> int:
    """The exit code of a program that ends by itself."""
    process = _start(folder, program)
    try:
        return process.wait(60)
    finally:
        process.kill()
