"""``counter export`` and ``counter import`` at a real service: exact, and taken up anywhere."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from counter.errors import StartupError
from counter.limits import INT64_MAX, INT64_MIN
from counter.ops.importing import COUNT_MAX, examine
from counter_client import CounterClient, Options, Token
from tests.cli.shell import Shell, exit_code
from tests.support.in_thread import Service, in_thread
from tests.support.seeds import seed_of
from tests.support.server import ROOT
from tests.support.waiting import eventually

OPTIONS = Options(trust_env=False)
COUNTS = {
    "plain": 5,
    "negative": -7,
    "zero": 0,
    "greatest": 3 * INT64_MAX,
    "least": 2 * INT64_MIN,
    "a/b, \"c\" 'd'": 11,
    "日本語 👍": 13,
    **{f"many-{number:04}": number for number in range(1_010)},
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with all of COUNTS in the namespace ``default``."""
    # Tokens in time on a machine that has much to do.
    with in_thread(tmp_path_factory.mktemp("service") / "data", accept_limit="5s") as server:
        with CounterClient(server.url, options=OPTIONS) as client:
            small = iter([each for each in COUNTS.items() if abs(each[1]) < INT64_MAX])
            while part := list(islice(small, 1_000)):
                client.batch(part)
            client.atomic([("greatest", INT64_MAX)] * 3 + [("least", INT64_MIN)] * 2)
        yield server


@pytest.fixture(scope="module")
def exported(service: Service, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An export of the namespace ``default``."""
    path = tmp_path_factory.mktemp("export") / "whole.ndjson"
    assert exit_code("export", str(path), "--url", service.url) == 0
    return path.read_bytes()


@pytest.fixture(autouse=True)
def here(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of its own, and the default service of commands."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COUNTER_URL", service.url)


@pytest.fixture
def target(service: Service, request: pytest.FixtureRequest) -> str:
    """An empty namespace."""
    name = f"t{abs(hash(request.node.nodeid)) % 10**12}"
    with CounterClient(service.url, name, options=OPTIONS) as client:
        client.create_namespace(counter_type="EVENTUAL")
    return name


def counts(service: Service, namespace: str) -> dict[str, int]:
    """All counts of a namespace, with the counters of first keys."""
    with CounterClient(service.url, namespace, options=OPTIONS) as client:
        names = list(client.counters())
        found: dict[str, int] = {}
        for first in range(0, len(names), 1_000):
            part = names[first : first + 1_000]
            found |= {x.counter: x.count for x in client.get_many(part, max_staleness="0s")}
    return found


def without_marks(found: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in found.items() if not name.startswith("imported:")}


def written() -> list[dict[str, object]]:
    return [json.loads(line) for line in Path("out.ndjson").read_text("utf-8").splitlines()]


def test_an_export_comes_to_the_same_counts_elsewhere_and_is_counted_once(
    service: Service, target: str, shell: Shell
) -> None:
    """Names in any script, counts past 64 bits, zeros; a second and a third import do nothing."""
    (report,) = shell.documents("export", "out.ndjson")
    header, *lines, trailer = written()
    assert [each["counter"] for each in lines] == sorted(COUNTS)
    assert report["lines"] == trailer["lines"] == len(COUNTS)
    assert report["sum"] == trailer["sum"] == sum(COUNTS.values())
    for _ in range(3):
        (report,) = shell.documents("import", "out.ndjson", "--namespace", target, "--verify")
        assert (report["lines"], report["verified"]) == (len(COUNTS), True)
    assert report["id"] == header["export_id"]
    assert without_marks(counts(service, target)) == COUNTS


@pytest.mark.parametrize("kind", ["symlink", "dangling", "hard link", "pipe"])
def test_an_export_replaces_nothing_and_writes_through_no_link(kind: str, shell: Shell) -> None:
    """Regression: it wrote to the file that the link led to."""
    victim, out = Path("victim"), Path("out.ndjson")
    if kind != "dangling":
        victim.touch()
    if kind == "pipe":
        os.mkfifo(out)
    elif kind == "hard link":
        out.hardlink_to(victim)
    else:
        out.symlink_to(victim)
    assert shell.run("export", "out.ndjson")[0] == (0 if kind == "dangling" else 2)
    assert ("is there already" in shell.err) == (kind != "dangling")
    assert victim.exists() == (kind != "dangling")
    assert kind == "dangling" or victim.stat().st_size == 0


def test_only_its_owner_may_read_an_export() -> None:
    """Regression: with the usual umask every user could read the exported data."""
    assert exit_code("export", "out.ndjson") == 0
    assert oct(Path("out.ndjson").stat().st_mode)[-3:] == "600"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: text[: text.rindex("\n", 0, -1) + 1], "has no trailer"),
        (lambda text: text.replace('"count":13', '"count":14'), "was changed after"),
        (lambda text: text.replace('"many-0001"', '"many-0000"', 1), "was changed after"),
        (lambda text: text + "{}\n", "and not after a trailer"),
        (lambda text: text.replace('"version":1', '"version":2'), "of version 2"),
    ],
    ids=["no trailer", "another count", "a name twice", "more after it", "a newer format"],
)
def test_an_export_that_was_changed_is_refused_whole(
    exported: bytes, change: Callable[[str], str], why: str, shell: Shell
) -> None:
    Path("out.ndjson").write_text(change(exported.decode()), "utf-8")
    assert why in shell.fails(2, "import", "out.ndjson")


def test_foreign_files_are_identified_by_their_content(service: Service, target: str) -> None:
    """CSV with or without header, NDJSON, and byte order marks; equal content is one import."""
    Path("a.csv").write_text("\ufeffname,count,counter\r\nx,3,c\r\ny,-1,d\r\n")
    Path("b.csv").write_text('c,4\n"d, e",5\nc,6\n')
    Path("c.ndjson").write_text('\ufeff{"count": 7, "counter": "c", "by": "us"}\n\n')
    for name in ("a.csv", "b.csv", "c.ndjson", "a.csv"):
        assert exit_code("import", name, "--namespace", target, "--add") == 0
    Path("a.csv").rename("again.csv")
    assert exit_code("import", "again.csv", "--namespace", target, "--add") == 0
    assert without_marks(counts(service, target)) == {"c": 20, "d": -1, "d, e": 5}
    # Empty lines are ignored, and make it other content: another import.
    Path("again.csv").write_text(Path("again.csv").read_text() + "\n")
    assert exit_code("import", "again.csv", "--namespace", target, "--add") == 0
    assert counts(service, target)["c"] == 23


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"counter": "a", "count": 1}\n{"counter": "b", "count": 1.5}\n', ":2: it must be"),
        ('{"counter": "a", "count": true}\n', ":1: it must be"),
        ('{"counter": "a", "count": 1}\n\ufeff{"counter": "b", "count": 1}\n', ":2: it must be"),
        ('{"counter": ' + "[" * 30_000 + "}\n", ":1: it must be"),
        ("counter,count\na,1\nb,x\n", ":3: it must be name,count"),
        ("a,1\n,2\n", ":2: a counter's name has 1 to 256"),
        (f"a,{COUNT_MAX + 1}\n", f"at most {COUNT_MAX}"),
        ("a\x00b,1\n", "holds U+0000"),
    ],
    ids=[
        "a fraction",
        "no number",
        "a mark in the middle",
        "too deep",
        "no number in CSV",
        "no name",
        "too many",
        "no text",
    ],
)
def test_an_invalid_line_is_named_and_nothing_is_counted(
    service: Service, text: str, why: str, shell: Shell
) -> None:
    Path("in").write_text(text)
    assert why in shell.fails(2, "import", "in")
    with CounterClient(service.url, options=OPTIONS) as client:
        assert list(client.counters(prefix="import")) == []


def test_a_directory_is_refused_as_an_export_file(shell: Shell) -> None:
    """Regression: it ended with a traceback."""
    assert "is there already" in shell.fails(2, "export", ".")


def test_a_file_that_cannot_be_reread_is_refused(shell: Shell) -> None:
    os.mkfifo("pipe")
    writer = os.open("pipe", os.O_RDWR)
    try:
        assert "read" in shell.fails(2, "import", "pipe")
    finally:
        os.close(writer)
    # Regression: without a writer it waited for one.
    for name in ("pipe", "/dev/zero", "-", "."):
        assert "read" in shell.fails(2, "import", name)


def test_counters_with_other_adds_need_a_flag(service: Service, target: str, shell: Shell) -> None:
    Path("in.csv").write_text("a,1\nb,2\n")
    with CounterClient(service.url, target, options=OPTIONS) as client:
        client.add("b", 40)
        assert "'b', which is in the file, is 40 in the target" in shell.fails(
            1, "import", "in.csv", "--namespace", target
        )
        assert "a" not in counts(service, target)
        assert exit_code("import", "in.csv", "--namespace", target, "--add") == 0
        client.add("a", 1)
    assert without_marks(counts(service, target)) == {"a": 2, "b": 42}
    code, _ = shell.run("import", "in.csv", "--namespace", target, "--verify")
    assert (code, "'b' is 42, and 2 in the file" in shell.err) == (1, True)


def test_a_missing_namespace_is_created_if_it_is_asked_for(
    service: Service, exported: bytes, shell: Shell
) -> None:
    """Run again, it finds the namespace, and counts nothing twice."""
    Path("in.ndjson").write_bytes(exported)
    assert "counter import --create makes it" in shell.fails(
        1, "import", "in.ndjson", "-n", "new-one"
    )
    for is_first in (True, False):
        shell.said("import", "in.ndjson", "-n", "new-one", "--create", "--verify")
        assert ("did not exist: created, ACCURATE" in shell.err) is is_first


def test_best_effort_counters_are_not_moved(service: Service, shell: Shell) -> None:
    with CounterClient(service.url, "rough", options=OPTIONS) as client:
        client.create_namespace(counter_type="BEST_EFFORT")
    Path("in.csv").write_text("a,1\n")
    for words in (("export", "out.ndjson"), ("import", "in.csv")):
        assert "is BEST_EFFORT" in shell.fails(1, *words, "--namespace", "rough")
    assert not Path("out.ndjson").exists()


def test_nothing_is_imported_into_bounds(service: Service, shell: Shell) -> None:
    """Regression: a line that was refused was refused in each further run, also with room."""
    with CounterClient(service.url, "bounded", options=OPTIONS) as client:
        client.create_namespace(counter_type="ACCURATE", bounds={"at_most": 5})
        Path("in.csv").write_text("a,1\nb,9\n")
        assert "has bounds" in shell.fails(1, "import", "in.csv", "--namespace", "bounded")
        client.change_namespace(bounds={})
        shell.said("import", "in.csv", "--namespace", "bounded")
        assert client.get("b").count == 9


def test_after_an_interrupt_an_import_goes_on(
    service: Service,
    target: str,
    monkeypatch: pytest.MonkeyPatch,
    shell: Shell,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(CounterClient, "get_many", interrupted(CounterClient.get_many, after=1))
        assert shell.run("export", "out.ndjson")[0] == 130
    # Half an export is of no use.
    assert list(Path().iterdir()) == []
    shell.said("export", "out.ndjson")
    with monkeypatch.context() as patch:
        patch.setattr(CounterClient, "atomic", interrupted(CounterClient.atomic, after=2))
        assert shell.run("import", "out.ndjson", "--namespace", target)[0] == 130
    # The third piece was counted, and its response was lost.
    assert "197 of 1,017 lines are known to be counted" in shell.err
    assert exit_code("import", "out.ndjson", "--namespace", target) == 0
    assert without_marks(counts(service, target)) == COUNTS


def test_a_file_that_changes_during_an_import_ends_it(
    service: Service,
    target: str,
    monkeypatch: pytest.MonkeyPatch,
    shell: Shell,
) -> None:
    """Regression: it ended with 2, which says that nothing is counted."""
    lines = "".join(f"n-{number:03},1\n" for number in range(300))
    Path("in.csv").write_text(lines)

    def changing(client: CounterClient, *given: Any, **named: Any) -> Any:
        answer = atomic(client, *given, **named)
        with Path("in.csv").open("a") as file:
            file.write("late,1\n")
        return answer

    atomic = CounterClient.atomic
    with monkeypatch.context() as patch:
        patch.setattr(CounterClient, "atomic", changing)
        said = shell.fails(4, "import", "in.csv", "--namespace", target)
    assert "was changed while it was imported: " in said
    assert "\ncounter: 100 of 300 " in said
    Path("in.csv").write_text(lines)
    assert exit_code("import", "in.csv", "--namespace", target, "--verify") == 0


def test_an_import_whose_keys_may_have_expired_counts_nothing(
    service: Service, target: str, shell: Shell
) -> None:
    """The first key counts a second time, as it does when it was forgotten."""
    Path("in.csv").write_text("a,1\nb,2\n")
    mark = "imported:" + examine(Path("in.csv")).id
    with CounterClient(service.url, target, options=OPTIONS) as client:
        client.add(mark, 1)
    assert "longer ago than half of key_ttl" in shell.fails(
        1, "import", "in.csv", "--namespace", target
    )
    assert without_marks(counts(service, target)) == {}


def test_an_import_skips_cancelled_lines_and_stays_so(
    service: Service, target: str, shell: Shell
) -> None:
    Path("in.csv").write_text("".join(f"line-{number},1\n" for number in range(1, 301)))
    words = ("import", "in.csv", "--namespace", target)
    shell.said(*words)
    with CounterClient(service.url, target, options=OPTIONS) as client:
        (event,) = client.events("line-101")
        token = Token.parse(f"{event.event_id}@{event.event_time.isoformat()}")
        client.cancel_atomic([(f"line-{number}", 1) for number in range(101, 201)], token=token)
    for _ in range(2):
        assert "all are counted but 101 to 200, " in shell.fails(1, *words)
    assert sum(without_marks(counts(service, target)).values()) == 200


def test_an_import_whose_first_key_is_cancelled_cannot_continue(
    service: Service, target: str, shell: Shell
) -> None:
    Path("in.csv").write_text("a,1\n")
    words = ("import", "in.csv", "--namespace", target)
    shell.said(*words)
    import_id = examine(Path("in.csv")).id
    with CounterClient(service.url, target, options=OPTIONS) as client:
        client.cancel(f"imported:{import_id}", 1, token=Token.from_key(f"import:{import_id}"))
    assert "cannot continue: 0 lines are known" in shell.fails(1, *words, "--add")
    assert without_marks(counts(service, target)) == {"a": 1}


def test_a_file_that_is_truncated_during_an_import_ends_it() -> None:
    """Regression: the lines up to the cut were counted in another atomic add."""
    line = b'{"counter": "c", "count": 1}'.ljust(4_095) + b"\n"
    Path("in.ndjson").write_bytes(line * 60)
    found = examine(Path("in.ndjson"))
    counts = found.counts()
    next(counts)
    os.truncate("in.ndjson", 20 * len(line))
    with pytest.raises(StartupError, match="was changed"):
        list(counts)


def interrupted(method: Callable[..., Any], after: int) -> Callable[..., Any]:
    """*method*, with Ctrl-C when its call number *after* has had its effect."""
    left = iter(range(after))

    def call(*arguments: Any, **named: Any) -> Any:
        answer = method(*arguments, **named)
        if next(left, None) is None:
            raise KeyboardInterrupt
        return answer

    return call


@pytest.mark.usefixtures("child_processes")
async def test_imports_that_are_killed_and_run_side_by_side_count_each_line_once(
    service: Service, target: str, tmp_path: Path
) -> None:
    """kill -9 as soon as some of it is counted; then two at once, one of them killed as well."""
    draw = random.Random(seed_of("CRASH_SEED"))
    lines = {f"c{number}": number for number in range(3_000)}
    path = tmp_path / "in.csv"
    path.write_text("".join(f"{name},{count}\n" for name, count in lines.items()))
    with CounterClient(service.url, target, options=OPTIONS) as client:

        async def kill_at(process: subprocess.Popen[bytes], at: int) -> None:
            async def has_come_so_far() -> bool:
                ended = process.poll() is not None
                return ended or client.get(f"c{at}", max_staleness="0s").count == at

            await eventually(has_come_so_far, f"line {at} is counted")
            process.kill()
            process.wait()

        await kill_at(importing(path, target), draw.randrange(1, 1_000))
        first, second = importing(path, target), importing(path, target)
        await kill_at(first, draw.randrange(1_000, 2_900))
        assert second.wait(300) == 0
    assert without_marks(counts(service, target)) == lines


def importing(path: Path, namespace: str) -> subprocess.Popen[bytes]:
    words = ["-m", "counter", "import", str(path), "--namespace", namespace]
    return subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL)
