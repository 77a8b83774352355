"""kill -9 in the middle of a stream of adds: lines that are sent again count once."""

import random
import time
from pathlib import Path

import h11
import pytest

from tests.support.add_stream import line, open_stream
from tests.support.server import Server, serving
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("child_processes")


LINES = 1_500
KILLS = 2


async def test_a_stream_is_sent_again_until_every_line_is_answered(fast_dir: Path) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    draw = random.Random(seed)
    # So long that a busy machine counts the first lines, and so short that some are too late.
    async with serving(fast_dir / "data", fast_dir / "logs", accept_limit="2s") as server:
        now_us = time.time_ns() // 1_000
        counted: dict[int, bool] = {}
        for _ in range(KILLS):
            await send_rest(server, counted, now_us, kill_after=draw.randrange(1, LINES // 4))
            await server.start()

        async def answered() -> bool:
            await send_rest(server, counted, now_us)
            return len(counted) == LINES

        await eventually(answered, "every line has a definite answer")
        # A line that came too late has a definite answer, too.
        expected = sum(delta(number) for number, is_counted in counted.items() if is_counted)
        async with server.client() as rest:
            assert await rest.count("c") == expected > 0


def delta(number: int) -> int:
    return 1 + number % 7


async def send_rest(
    server: Server, counted: dict[int, bool], now_us: int, kill_after: int = LINES + 1
) -> None:
    """Send the open lines, kill the service after some responses, and note their outcomes."""
    port = int(server.url.rpartition(":")[2])
    left = [number for number in range(LINES) if number not in counted]
    answers = 0
    async with open_stream(port) as stream:
        try:
            for start in range(0, len(left), 500):
                some = left[start : start + 500]
                stream.send(*(line(each, delta(each), time_us=now_us) for each in some))
                for number in some:
                    answer = await stream.answer()
                    assert answer is not None
                    if "delta" in answer:
                        assert answer["delta"] == delta(number)
                        counted[number] = True
                    elif answer["code"] != "token_pending":
                        assert answer["applied"] is False, answer
                        counted[number] = False
                    answers += 1
                    if answers == kill_after:
                        server.kill()
            stream.end()
            assert await stream.answer() is None
        except (ConnectionError, h11.RemoteProtocolError):
            assert answers >= kill_after
