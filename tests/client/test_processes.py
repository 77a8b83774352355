"""One client, several processes: forks, ends, and event loops that come and go."""

import asyncio
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import pytest

from counter_client import (
    AsyncCounterClient,
    ClosedError,
    CounterClient,
    Options,
    RejectedError,
    UnsentError,
)
from counter_client.errors import CounterError
from counter_client.failures import Rejected, Unfinished, UnknownOutcomeError, UnreachableError
from counter_client.spool import Spool
from tests.support.child import run_python
from tests.support.in_thread import Service
from tests.support.server import ROOT

pytestmark = pytest.mark.usefixtures("child_processes")


OPTIONS = Options(trust_env=False)
NOWHERE = "http://127.0.0.1:9"


#: Before each script.
BEGIN = """
import os, signal, sys, threading
from counter_client import ClosedError, CounterClient, Options
from counter_client.spool import Spool

def code_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


def run(script: str, *words: str | Path, code: int = 0, errors: Sequence[str] = ()) -> None:
    """Run a script in a process of its own: this one has threads, and goes on."""
    done = run_python("-W", "ignore::DeprecationWarning", "-c", BEGIN + script, *words)
    assert (done.returncode, bool(done.stderr)) == (code, bool(errors)), done.stderr
    assert [each for each in errors if each not in done.stderr] == []


def count_of(service: Service, name: str) -> int:
    with CounterClient(service.url, options=OPTIONS) as client:
        return client.get(name).count


def test_a_forked_child_leaves_what_is_in_the_spool_to_its_parent(
    service: Service, tmp_path: Path
) -> None:
    """Regression: a child that left the `with` block closed the file, and later adds were lost."""
    script = """
client = CounterClient("http://127.0.0.1:9", options=Options(trust_env=False, deadline_s=1.0))
with client.buffer(spool=sys.argv[1]) as buffer:
    buffer.add("spooled")
    buffer.sync()
    child = os.fork()
    if child == 0:
        for call in (buffer.sync, buffer.flush):
            try:
                call()
            except ClosedError:
                continue
            os._exit(1)
        sys.exit(7)
    assert code_of(child) == 7
    for _ in range(50):
        buffer.add("spooled")
    buffer.sync()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    run(script, tmp_path / "spool", code=-9)
    with (
        CounterClient(service.url, options=OPTIONS) as client,
        client.buffer(spool=tmp_path / "spool"),
    ):
        pass
    assert count_of(service, "spooled") == 51


def test_a_child_that_forgets_a_spool_leaves_its_log_alone(tmp_path: Path) -> None:
    """Regression: the child closed the file, and SQLite removed the log of the parent."""
    script = """
spool = Spool(sys.argv[1], "default")
spool.put({"before": 1})
child = os.fork()
if child == 0:
    del spool
    sys.exit(7)
assert code_of(child) == 7
spool.put({"after": 1})
os.kill(os.getpid(), signal.SIGKILL)
"""
    run(script, tmp_path / "spool", code=-9)
    left = Spool(tmp_path / "spool", "default")
    assert dict(left.unsent()) == {"before": 1, "after": 1}
    left.close()


def test_a_client_needs_no_import_to_connect() -> None:
    """Regression: a fork during an import left the child without the codec "idna"."""
    script = """
CounterClient("http://127.0.0.1:9").close()
assert "encodings.idna" in sys.modules
"""
    run(script)


#: A site's module with a buffer that is made when it is imported, under a server that forks three
#: workers before or after that; each is killed once what it added is on disk.
SITE = """

def site():
    client = CounterClient(sys.argv[1], options=Options(trust_env=False, deadline_s=1.0))
    return client.buffer(max_delay=60, spool=sys.argv[2])

buffer = site() if sys.argv[3] == "after" else None
if buffer is not None:
    buffer.add("master", 5)
    buffer.sync()
workers = []
for number in range(3):
    child = os.fork()
    if child == 0:
        buffer = buffer or site()
        for _ in range(10):
            buffer.add("views")
            buffer.add(f"worker-{number}")
        buffer.sync()
        os.kill(os.getpid(), signal.SIGKILL)
    workers.append(child)
for child in workers:
    assert code_of(child) == -9
if buffer is not None:
    buffer.add("master", 2)
    buffer.sync()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("forks", ["before", "after"])
def test_workers_that_fork_before_or_after_the_import_share_a_spool(
    forks: str, tmp_path: Path
) -> None:
    """Regression: the second worker could not open the spool. All are killed."""
    run(SITE, NOWHERE, tmp_path / "spool", forks, code=-9)
    expected = Counter({"views": 30, "worker-0": 10, "worker-1": 10, "worker-2": 10})
    if forks == "after":
        expected["master"] = 7
    spool = Spool(tmp_path / "spool", "default")
    found = Counter[str]()
    while piece := spool.seal():
        for item in piece:
            found[item.counter] += item.delta
        spool.finish()
    spool.close()
    assert found == expected


def test_the_end_of_a_forked_worker_sends_what_it_added(service: Service, tmp_path: Path) -> None:
    """And the adds of the parent are sent by the parent alone, once."""
    name = f"forked-{uuid4()}"
    script = """
client = CounterClient(sys.argv[1], options=Options(trust_env=False))
spool = sys.argv[3] or None
buffer = client.buffer(max_delay=60, spool=spool)
buffer.add(sys.argv[2], 100)
children = []
for _ in range(2):
    child = os.fork()
    if child == 0:
        buffer.add(sys.argv[2])
        if children:
            buffer.flush()
        sys.exit(7)
    children.append(child)
for child in children:
    assert code_of(child) == 7
"""
    for spool in (tmp_path / "spool", ""):
        run(script, service.url, name, spool)
    assert count_of(service, name) == 204


def test_a_buffer_that_was_empty_at_the_fork_can_be_flushed_in_the_child(tmp_path: Path) -> None:
    script = """
client = CounterClient("http://127.0.0.1:9", options=Options(trust_env=False))
with client.buffer(spool=sys.argv[1]) as buffer:
    child = os.fork()
    if child == 0:
        buffer.sync()
        buffer.flush()
        sys.exit(7)
    assert code_of(child) == 7
"""
    run(script, tmp_path / "spool")


#: Opens a spool on a line of input, and ends with its input.
OPENS = """
import sys
from counter_client.spool import Spool
print(flush=True)
sys.stdin.readline()
spool = Spool(sys.argv[1], "default")
spool.put({"opened": 1})
print("open", flush=True)
sys.stdin.read()
"""


def test_processes_that_open_a_new_spool_at_once_all_have_a_slot(tmp_path: Path) -> None:
    """Regression: two of them both failed, because the database was locked."""
    with ExitStack() as ending:
        openers = [
            ending.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", OPENS, tmp_path / "spool"],
                    cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                )
            )
            for _ in range(4)
        ]  # fmt: skip
        for each in openers:
            assert each.stdout is not None
            assert each.stdout.readline() == "\n"
        for each in openers:
            assert each.stdin is not None
            each.stdin.write("\n")
            each.stdin.flush()
        for each in openers:
            assert each.stdout is not None
            assert each.stdout.readline() == "open\n"
        for each in openers:
            each.kill()
    assert len(list((tmp_path / "spool").glob("default.?"))) == 4


def test_a_client_whose_threads_are_busy_goes_on_in_a_child(service: Service) -> None:
    """Regression: a lock that another thread held at the fork was held in the child for ever."""
    name = f"busy-{uuid4()}"
    script = """
client = CounterClient(sys.argv[1], options=Options(trust_env=False))
taken = threading.Thread(target=client._policy.budget.lock.here().acquire)
taken.start()
taken.join()
child = os.fork()
if child == 0:
    client.add(sys.argv[2])
    os._exit(0)
sys.exit(code_of(child))
"""
    run(script, service.url, name)
    assert count_of(service, name) == 1


def test_adds_left_in_a_buffer_are_sent_at_exit(service: Service) -> None:
    """Regression: it was lost without an error."""
    name = f"left-{uuid4()}"
    script = """
for url, deadline_s in ((sys.argv[1], 60.0), (sys.argv[2], 0.2)):
    client = CounterClient(url, options=Options(trust_env=False, deadline_s=deadline_s))
    client.buffer(max_delay=60).add(sys.argv[3])
"""
    errors = ("a buffer was left open until the program ended", NOWHERE)
    run(script, service.url, NOWHERE, name, errors=errors)
    assert count_of(service, name) == 1


def test_a_client_of_another_event_loop_says_so(service: Service) -> None:
    """Regression: it was a RuntimeError of a loop that is closed."""

    async def made() -> AsyncCounterClient:
        client = AsyncCounterClient(service.url, options=OPTIONS)
        await client.get("c")
        # A connection that stays would be warned of when its loop has ended.
        await client._transport._http.aclose()
        return client

    client = asyncio.run(made())

    async def again() -> None:
        with pytest.raises(ClosedError, match="another event loop"):
            await client.get("c")
        await client.close()
        await client.close()

    asyncio.run(again())


async def test_a_buffer_that_was_not_begun_says_so() -> None:
    """Regression: it waited for ever."""
    async with AsyncCounterClient(NOWHERE, options=OPTIONS) as client:
        buffer = client.buffer()
        for call in (buffer.add("c"), buffer.flush()):
            with pytest.raises(ClosedError, match="async with"):
                await call
        await buffer.close()
    with pytest.raises(ClosedError):
        client.buffer()


def test_a_buffer_that_outlives_its_client_says_why_it_sends_nothing() -> None:
    """Regression: that the client was closed was in none of its words."""
    client = CounterClient(NOWHERE, options=OPTIONS)
    buffer = client.buffer()
    buffer.add("c")
    client.close()
    with pytest.raises(UnsentError, match="the client is closed"):
        buffer.flush()
    with pytest.raises(UnsentError):
        buffer.close()
    with pytest.raises(ClosedError):
        client.buffer()


UNFINISHED = Unfinished("add", "default", (("c", 1),), "key:order-1")


@pytest.mark.parametrize(
    "error",
    [
        UnknownOutcomeError("why", UNFINISHED, sent=False),
        UnsentError("why", (UNFINISHED,), {"c": 1}),
        RejectedError((Rejected("c", 1, UnreachableError("why")),)),
        UnreachableError("why", sent=False),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_comes_out_of_another_process_as_it_was(error: CounterError) -> None:
    """Regression: those with arguments of their own could be pickled, and not read back."""
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert (str(found), repr(vars(found))) == (str(error), repr(vars(error)))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_process_of_multiprocessing_sends_its_adds_when_it_ends(
    method: str, service: Service, tmp_path: Path
) -> None:
    """Regression: it runs no atexit callbacks, so adds since the last flush were lost."""
    name = f"pool-{uuid4()}"
    program = tmp_path / "program.py"
    program.write_text(
        """
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
from counter_client import CounterClient, Options
client = CounterClient(sys.argv[1], options=Options(trust_env=False))
buffer = client.buffer(max_delay=60)
def work(number):
    buffer.add(sys.argv[2], number)
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[3])
    process = context.Process(target=work, args=(100,))
    process.start()
    process.join()
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        list(pool.map(work, range(5)))
""",
        encoding="utf-8",
    )
    command = ("-W", "ignore::DeprecationWarning", program, service.url, name, method)
    done = run_python(*command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT / "clients/python")})
    assert (done.returncode, done.stderr) == (0, "")
    assert count_of(service, name) == 110


@pytest.mark.parametrize("hedge", ["None", "0.5"])
def test_threads_of_a_forked_child_can_all_begin_at_once(hedge: str, service: Service) -> None:
    """Regression: with hedges, threads waited for the event loop of the parent for ever."""
    name = f"threads-{uuid4()}"
    script = """
client = CounterClient(sys.argv[1], options=Options(trust_env=False, hedge_after_s=HEDGE))
client.add(sys.argv[2])
child = os.fork()
if child == 0:
    together = threading.Barrier(8)
    def add():
        together.wait()
        client.add(sys.argv[2])
    threads = [threading.Thread(target=add, daemon=True) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(timeout=100)
    os._exit(sum(each.is_alive() for each in threads))
sys.exit(code_of(child))
"""
    run(script.replace("HEDGE", hedge), service.url, name)
    assert count_of(service, name) == 9


@pytest.mark.parametrize("hedge", ["None", "0.5"])
def test_a_client_goes_on_in_a_child_after_a_fork(hedge: str, service: Service) -> None:
    """With connections and threads of its own. Regression: hedged, a live count waited for ever."""
    script = f"""
client = CounterClient(sys.argv[1], options=Options(trust_env=False, hedge_after_s={hedge}))
client.add(sys.argv[2])
child = os.fork()
if child == 0:
    next(client.live(sys.argv[2]))
for _ in range(20):
    client.add(sys.argv[2])
if child == 0:
    os._exit(0)
assert code_of(child) == 0
client.close()
"""
    name = f"forked-{uuid4()}"
    run(script, service.url, name)
    assert count_of(service, name) == 41


def test_a_forked_process_begins_with_an_empty_buffer(service: Service) -> None:
    """Each process sends its own adds. Regression: a lock held at the fork stayed locked."""
    script = """
client = CounterClient(sys.argv[1], options=Options(trust_env=False))
buffer = client.buffer(max_delay=60)
buffer.add("forked")
buffer._lock.acquire()
child = os.fork()
if child == 0:
    buffer.add("forked", 10)
    buffer.close()
    os._exit(0)
buffer._lock.release()
assert code_of(child) == 0
buffer.close()
client.close()
"""
    run(script, service.url)
    assert count_of(service, "forked") == 11
