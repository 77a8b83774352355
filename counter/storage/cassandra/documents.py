"""Records of the control plane as the JSON documents that are stored of them.

A document is one cell: what must agree is written at once, by one compare-and-set.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from counter.types import (
    CounterType,
    Dataset,
    Era,
    Namespace,
    NamespaceSettings,
    PayloadCheck,
    Placement,
    Slice,
)


def dataset_text(dataset: Dataset, placement: Placement) -> str:
    """What is stored of a dataset beside its id and name."""
    body = {name: value for name, value in asdict(dataset).items() if name not in ("id", "name")}
    return json.dumps(body | {"placement": asdict(placement)})


def dataset_of(name: str, dataset_id: int, text: str) -> tuple[Dataset, Placement]:
    """The dataset and how it is placed."""
    body: dict[str, Any] = json.loads(text)
    placement = body.pop("placement")
    placement["replication"] = tuple((center, n) for center, n in placement["replication"])
    return Dataset(id=dataset_id, name=name, **body), Placement(**placement)


def slice_text(each: Slice) -> str:
    """What is stored of a slice beside its start."""
    return json.dumps({name: value for name, value in asdict(each).items() if name != "start_us"})


def slice_from(start_us: int, text: str) -> Slice:
    """The slice that starts at *start_us*."""
    return Slice(start_us=start_us, **json.loads(text))


def namespace_text(namespace: Namespace, *, deleted: bool = False) -> str:
    """What is stored of a namespace beside its name, id and version."""
    document = {
        "settings": asdict(namespace.settings),
        "eras": namespace.eras,
        "dataset": namespace.dataset.id,
        "created_at_us": namespace.created_at_us,
    }
    return json.dumps(document | {"deleted": True} if deleted else document)


def is_deleted(text: str) -> bool:
    """Whether a namespace's document is of one that was deleted, and keeps its name for a while."""
    return "deleted" in json.loads(text)


def dataset_id_in(text: str) -> int:
    """The id of the dataset that a namespace's document names."""
    dataset_id: int = json.loads(text)["dataset"]
    return dataset_id


def namespace_of(row: tuple[str, int, int, str], dataset: Dataset) -> Namespace:
    """The namespace of a row: name, id, version, document."""
    name, namespace_id, version, text = row
    body = json.loads(text)
    settings = body["settings"]
    settings["counter_type"] = CounterType(settings["counter_type"])
    settings["payload_check"] = PayloadCheck(settings["payload_check"])
    return Namespace(
        id=namespace_id,
        name=name,
        settings=NamespaceSettings(**settings),
        eras=tuple(Era(*era) for era in body["eras"]),
        dataset=dataset,
        created_at_us=body["created_at_us"],
        version=version,
    )
