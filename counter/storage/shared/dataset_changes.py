"""Which dataset settings may change after creation, in stores that keep them."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from counter.quantities import format_duration
from counter.types import Dataset

_FIXED: Final = ("retention_us", "slice_us", "write_timeout_us", "clock_skew_max_us")
#: A slice keeps the values that it was made with; the next one gets these.
_OF_NEW_SLICES: Final = ("time_bucket_us", "event_buckets", "event_buckets_max")


def changed_dataset(existing: Dataset, asked: Dataset) -> tuple[Dataset, list[str]]:
    """Return *existing* with what may become as *asked*, and a line for each setting that stays."""
    stays = [
        f"dataset {asked.name}: {name.removesuffix('_us')} stays"
        f" {format_duration(getattr(existing, name))} as it was first set, and does not become"
        f" {format_duration(getattr(asked, name))}"
        for name in _FIXED
        if getattr(existing, name) != getattr(asked, name)
    ]
    return replace(existing, **{name: getattr(asked, name) for name in _OF_NEW_SLICES}), stays


def change_of(dataset: Dataset) -> str:
    """Return the line for a dataset that was changed."""
    return (
        f"dataset {dataset.name}: time_bucket, event_buckets_max and event_buckets hold from the"
        " next slice that is made; restart the processes that roll up"
    )
