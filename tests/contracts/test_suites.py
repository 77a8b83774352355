"""A store cannot miss a suite unnoticed, and a suite that fails shows its values."""

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast

import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook

from counter import testing
from counter.storage.memory import MemoryStore
from counter.testing import suites
from counter.testing.cases import DATASET, NOW, StoreCases
from counter.testing.clock import FakeClock
from counter.testing.event_cases import EventCases


def modules() -> Iterator[Any]:
    for each in pkgutil.iter_modules(testing.__path__):
        yield import_module(f"{testing.__name__}.{each.name}")


def all_suites() -> set[type]:
    found = [each for module in modules() for each in vars(module).values()]
    classes = {each for each in found if isinstance(each, type) and issubclass(each, StoreCases)}
    return classes - {StoreCases}


class OnEverything(StoreCases):
    """A store with all parts and capabilities."""

    transactional = False
    one_moment = True
    partition_sizes = True
    new_life = True
    bounds = True


class OnLittle(StoreCases):
    """A transactional store without any capability."""

    transactional = True
    one_moment = False


def test_each_suite_is_for_some_store() -> None:
    """A suite that the table lacks would never run."""
    given = {suite for on in (OnEverything, OnLittle) for _, suite in suites.suites_of(on)}
    assert given == all_suites()


def test_a_store_gets_what_its_declaration_calls_for() -> None:
    module: dict[str, Any] = {"__name__": "somewhere"}
    suites.add_suites(module, OnLittle)
    some = {"TestEvents", "TestTransactional", "TestAudit", "TestDeclaration"}
    none = {"TestNonTransactional", "TestViews", "TestPartitionSizes", "TestNewLife"}
    none |= {"TestServiceBounds", "TestServiceHolds"}
    assert some < module.keys()
    assert not none & module.keys()
    assert issubclass(module["TestEvents"], OnLittle)
    assert module["TestEvents"].__module__ == "somewhere"


def test_a_declaration_without_what_has_no_default_is_refused() -> None:
    class OnNothing(StoreCases):
        """It says nothing of its store."""

    with pytest.raises(AttributeError, match="transactional"):
        suites.add_suites({"__name__": "somewhere"}, OnNothing)


def declared(on: type[StoreCases], **own: Any) -> Any:
    """Return a check of the suites of a module with the classes *own* besides."""
    module: dict[str, Any] = {"__name__": "somewhere"}
    suites.add_suites(module, on)
    request = SimpleNamespace(module=SimpleNamespace(**{**module, **own}))
    check = module["TestDeclaration"]()
    return lambda: check.test_its_module_has_each_suite(cast(pytest.FixtureRequest, request))


def test_a_class_of_the_module_that_is_no_suite_is_noticed() -> None:
    class TestEvents(OnLittle, EventCases):
        """One of the module's own."""

    declared(OnLittle)()
    declared(OnLittle, TestEvents=TestEvents)()
    for wrong in (EventCases, type("TestEvents", (OnLittle,), {})):
        with pytest.raises(AssertionError, match="TestEvents"):
            declared(OnLittle, TestEvents=wrong)()


@pytest.mark.parametrize("on", [OnEverything, OnLittle])
async def test_a_declaration_that_does_not_fit_the_store_is_noticed(on: type[StoreCases]) -> None:
    """The memory store has separate writes and partition sizes, and no new life."""
    check = type("TestDeclaration", (on, suites.DeclarationCases), {})()
    with pytest.raises(AssertionError):
        await check.test_the_store_is_what_is_said_of_it(MemoryStore(FakeClock(NOW), [DATASET]))


def test_pytest_rewrites_the_assertions_of_each_module() -> None:
    """Else a suite that fails would not show the values."""
    assert [
        module.__name__
        for module in modules()
        if not isinstance(module.__spec__.loader, AssertionRewritingHook)
    ] == []
