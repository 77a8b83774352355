"""All the suites, and which of them a store must pass."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import pytest

from counter.ports import Store
from counter.testing.atomic_cases import (
    AtomicCases,
    NonTransactionalCases,
    TransactionalCases,
    ViewCases,
)
from counter.testing.audit_cases import AuditCases, SettledAuditCases
from counter.testing.cases import StoreCases
from counter.testing.control_cases import (
    LeaseCases,
    ListingCases,
    NamespaceCases,
    NewLifeCases,
    PurgeCases,
    WorkerLeaseCases,
)
from counter.testing.decision_cases import CancelCases, DecisionCases, ReservationCases
from counter.testing.event_cases import EventCases
from counter.testing.fold_cases import FoldCases, ScanCases
from counter.testing.hold_cases import ServiceHoldCases
from counter.testing.key_cases import KeyCases
from counter.testing.rollup_cases import CountsCases, MarkCases, WatermarkCases
from counter.testing.service_cases import ServiceBoundCases, ServiceCancelCases, ServiceCases
from counter.testing.slice_cases import PartitionSizeCases, SliceCases


class DeclarationCases(StoreCases):
    """What the class of the test module says of the store is so, and no suite is missing."""

    async def test_the_store_is_what_is_said_of_it(self, store: Store) -> None:
        """By that the suites are chosen."""
        assert self.transactional is (store.separate_writes is None)
        assert self.partition_sizes is (store.capabilities.partition_sizes is not None)
        assert self.bounds is store.capabilities.bounds
        assert self.bounds is (store.capabilities.holds is not None)
        assert self.new_life is hasattr(store.control, "begin_new_life")

    def test_its_module_has_each_suite(self, request: pytest.FixtureRequest) -> None:
        """Under its usual name, and over this store, also if it is a class of the module's own."""
        on, classes = type(self).__bases__[0], vars(request.module)
        wanted = {name: {on, suite} for name, suite in suites_of(type(self))}
        assert [name for name, bases in wanted.items() if bases - {*classes[name].__mro__}] == []


#: By the name of the class for pytest.
EVERY_STORE: Final[Mapping[str, type[StoreCases]]] = {
    "TestDeclaration": DeclarationCases,
    "TestEvents": EventCases,
    "TestFolds": FoldCases,
    "TestScans": ScanCases,
    "TestAtomics": AtomicCases,
    "TestMarks": MarkCases,
    "TestWatermarks": WatermarkCases,
    "TestCounts": CountsCases,
    "TestDecisions": DecisionCases,
    "TestCancels": CancelCases,
    "TestReservations": ReservationCases,
    "TestNamespaces": NamespaceCases,
    "TestSlices": SliceCases,
    "TestService": ServiceCases,
    "TestServiceCancels": ServiceCancelCases,
    "TestListing": ListingCases,
    "TestLeases": LeaseCases,
    "TestWorkerLeases": WorkerLeaseCases,
    "TestKeys": KeyCases,
    "TestPurge": PurgeCases,
    "TestAudit": AuditCases,
    "TestSettledAudit": SettledAuditCases,
}


def suites_of(on: type[StoreCases]) -> Iterator[tuple[str, type[StoreCases]]]:
    """Yield each suite that the store which *on* describes must pass, after the name of the class
    for pytest. Raises AttributeError if *on* lacks an attribute that has no default."""
    yield from EVERY_STORE.items()
    if on.transactional:
        yield "TestTransactional", TransactionalCases
    else:
        yield "TestNonTransactional", NonTransactionalCases
    if on.one_moment:
        yield "TestViews", ViewCases
    if on.partition_sizes:
        yield "TestPartitionSizes", PartitionSizeCases
    if on.new_life:
        yield "TestNewLife", NewLifeCases
    if on.bounds:
        yield "TestServiceBounds", ServiceBoundCases
        yield "TestServiceHolds", ServiceHoldCases


def add_suites(module: dict[str, Any], on: type[StoreCases]) -> None:
    """Add a class for pytest of each suite that *on* must pass to *module*, the ``globals()`` of a
    test module.

    A class of the same name that the module has, before or after, takes its place: to add cases,
    or to replace some. It must derive from *on* and from the suite.
    """
    for name, suite in suites_of(on):
        members = {"__module__": module["__name__"], "__doc__": suite.__doc__}
        module.setdefault(name, type(name, (on, suite), members))
