"""The vectors for clients agree with the service and the Python SDK."""

import pytest

from clients.conformance.make_vectors import VECTORS, vectors


@pytest.mark.parametrize("name", sorted(vectors()))
def test_vectors_are_what_the_code_does(name: str) -> None:
    written = (VECTORS / name).read_text(encoding="utf-8")
    assert written == vectors()[name], "run python -m clients.conformance.make_vectors"


def test_there_are_no_other_vectors() -> None:
    assert sorted(path.name for path in VECTORS.iterdir()) == sorted(vectors())
