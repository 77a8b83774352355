"""Seeds of tests that draw: random ones, or one to repeat from the environment."""

import os
import random


def seed_of(variable: str) -> int:
    """Return and print the seed of *variable*, or a random one."""
    seed = int(os.environ.get(variable, random.randrange(2**32)))
    print(f"{variable}={seed}")
    return seed
