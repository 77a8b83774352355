"""All the suites that every store must pass, for an adapter's test file to take from one place."""

from tests.contracts.atomic_cases import (
    AtomicCases,
    NonTransactionalCases,
    TransactionalCases,
    ViewCases,
)
from tests.contracts.audit_cases import AuditCases, SettledAuditCases
from tests.contracts.cases import StoreCases
from tests.contracts.control_cases import (
    LeaseCases,
    ListingCases,
    NamespaceCases,
    NewLifeCases,
    PurgeCases,
    WorkerLeaseCases,
)
from tests.contracts.decision_cases import DecisionCases, ReservationCases
from tests.contracts.event_cases import EventCases
from tests.contracts.fold_cases import FoldCases, ScanCases
from tests.contracts.key_cases import KeyCases
from tests.contracts.partition_size_cases import PartitionSizeCases
from tests.contracts.rollup_cases import CountsCases, MarkCases, WatermarkCases
from tests.contracts.service_cases import ServiceCases
from tests.contracts.slice_cases import SliceCases

__all__ = [
    "AtomicCases",
    "AuditCases",
    "CountsCases",
    "DecisionCases",
    "EventCases",
    "FoldCases",
    "KeyCases",
    "LeaseCases",
    "ListingCases",
    "MarkCases",
    "NamespaceCases",
    "NewLifeCases",
    "NonTransactionalCases",
    "PartitionSizeCases",
    "PurgeCases",
    "ReservationCases",
    "ScanCases",
    "ServiceCases",
    "SettledAuditCases",
    "SliceCases",
    "StoreCases",
    "TransactionalCases",
    "ViewCases",
    "WatermarkCases",
    "WorkerLeaseCases",
]
