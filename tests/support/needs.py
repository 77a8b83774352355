"""Requirements of tests: if one is missing, a test skips at a desk and fails in the gate."""

import importlib
import os
from types import ModuleType
from typing import NoReturn

import pytest


def in_ci() -> bool:
    """Whether the gate runs the tests: there nothing may be left out."""
    return os.environ.get("CI", "").lower() == "true"


def miss(reason: str) -> NoReturn:
    """Skip the test locally, fail it in the gate."""
    if in_ci():
        pytest.fail(f"{reason}; where CI=true every test must run", pytrace=False)
    pytest.skip(reason)


def need(module: str) -> ModuleType:
    """The *module*, or :func:`miss` if it does not exist. Its own import errors are raised."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            miss(f"there is no module {module} yet")
        raise
