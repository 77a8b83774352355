"""All the suites that every store must pass, for an adapter's test file to take from one place."""

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
from counter.testing.decision_cases import DecisionCases, ReservationCases
from counter.testing.event_cases import EventCases
from counter.testing.fold_cases import FoldCases, ScanCases
from counter.testing.key_cases import KeyCases
from counter.testing.partition_size_cases import PartitionSizeCases
from counter.testing.rollup_cases import CountsCases, MarkCases, WatermarkCases
from counter.testing.service_cases import ServiceCases
from counter.testing.slice_cases import SliceCases

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
