"""The attacks of this folder, short: they cost little memory, and others are answered meanwhile."""

from tests.abuse import tiny_headers
from tests.abuse.figures import measure


def test_unfinished_heads_of_many_tiny_headers() -> None:
    measure(tiny_headers.attack, 300, 1.0).check()
