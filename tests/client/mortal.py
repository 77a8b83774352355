"""A client that a test kills: it adds one by one, through a spool, and prints its progress.

Its arguments are the service's URL, the spool, and a seed: add n of the seed goes to one of a few
counters. On stdout: ``taken N`` before add N is made, ``durable N`` when the first N are on disk.
"""

import random
import sys
from itertools import count

from counter_client import CounterClient, Options

COUNTERS = 5


def add_of(seed: int, number: int) -> tuple[str, int]:
    """Counter and delta of add *number*, from 0."""
    draw = random.Random(f"{seed}-{number}")
    return f"mortal-{seed}-{draw.randrange(COUNTERS)}", draw.randrange(-9, 10)


def main(url: str, spool: str, seed: int, first: int) -> None:
    """Add from number *first* on, for ever."""
    options = Options(trust_env=False, attempt_timeout_s=1.0, backoff_first_s=0.01)
    client = CounterClient(url, options=options)
    with client.buffer(max_delay=0.002, spool=spool) as buffer:
        for number in count(first):
            print(f"taken {number + 1}", flush=True)
            buffer.add(*add_of(seed, number))
            if number % 7 == 0:
                buffer.sync()
                print(f"durable {number + 1}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
