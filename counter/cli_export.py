"""The command ``counter export``: the counts of a namespace into a file."""

from __future__ import annotations

import json as json_module
import sys
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter

from counter.cli import printing, remark, tell
from counter.cli_progress import progress
from counter.cli_service import EXIT_NO, ServiceFlags, ended, fail, opened
from counter.client import CounterClient
from counter.errors import StartupError
from counter.export_file import CountLine, ExportWriter, PartFile, header_of
from counter.limits import PAGE_ITEMS_MAX

#: In place of a file.
STDOUT: Final = "-"


def export(
    file: Annotated[
        str,
        Parameter(
            help="A file that is not there yet; - for standard output.", allow_leading_hyphen=True
        ),
    ],
    flags: ServiceFlags | None = None,
    *,
    prefix: Annotated[str, Parameter(help="Only counters whose names begin so.")] = "",
    json: Annotated[bool, Parameter(help="Print what was exported as JSON.", negative="")] = False,
) -> None:
    """Write the exact counts of a namespace to a file; see ``counter export --help``."""
    flags = flags or ServiceFlags()
    with ended(flags), opened(flags) as client:
        check_file_name(file)
        namespace = client.namespace()
        refuse_best_effort(namespace, "export")
        header = header_of(namespace, str(uuid.uuid4()), prefix, _now())
        if file == STDOUT:
            if json:
                raise StartupError("--json: standard output is the export itself; leave one out")
            writer = ExportWriter(sys.stdout.buffer, header)
            with printing():
                writer.begin()
                trailer = _copied(client, writer)
            remark(_said(trailer, "standard output"))
            return
        path = Path(file)
        with PartFile(path) as part:
            writer = ExportWriter(part.file, header)
            if part.begin(writer):
                remark(
                    f"going on with {part.part}, begun at {writer.header['begun_at']}: it has"
                    f" {writer.lines:,} counters"
                )
            try:
                trailer = _copied(client, writer)
            except KeyboardInterrupt:
                remark(f"{part.part} is kept: the same command goes on with it")
                raise
            part.whole()
        document = {"file": str(path), "export_id": writer.header["export_id"], **trailer}
        tell(json_module.dumps(document, ensure_ascii=False) if json else _said(trailer, file))


def check_file_name(file: str) -> None:
    """Raise StartupError for what looks like a flag: only - may, in place of a file."""
    if file.startswith("-") and file != STDOUT:
        raise StartupError(f"{file} is no flag of this command; a file of that name is ./{file}")


def refuse_best_effort(namespace: Mapping[str, Any], what: str) -> None:
    """End with EXIT_NO where the counts are no exact ones."""
    if namespace["counter_type"] == "BEST_EFFORT":
        fail(
            f"namespace {namespace['namespace']!r} is BEST_EFFORT: its counts may be lost or"
            f" counted twice, and nothing lists its counters, so no {what} of it could be exact;"
            " use an ACCURATE or EVENTUAL namespace",
            EXIT_NO,
        )


def batches(names: Iterator[str]) -> Iterator[list[str]]:
    """*names*, as many at a time as one request may ask for."""
    while batch := list(islice(names, PAGE_ITEMS_MAX)):
        yield batch


def _copied(client: CounterClient, writer: ExportWriter) -> Mapping[str, Any]:
    """Write all counters that come after the last one of *writer*; the trailer."""
    with progress("exporting", None) as bar:
        bar.go_on(writer.lines)
        for batch in batches(_names(client, writer)):
            for each in client.get_many(batch, max_staleness="0s"):
                writer.put(CountLine(each.counter, each.count, _rfc3339(each.as_of)))
            bar.go_on(len(batch))
    return writer.end(_now())


def _names(client: CounterClient, writer: ExportWriter) -> Iterator[str]:
    last = writer.last
    names = client.counters(writer.header["prefix"] or None)
    return (name for name in names if last is None or name > last)


def _said(trailer: Mapping[str, Any], where: str) -> str:
    if trailer["lines"] == 0:
        return f"there are no counters; {where} has none"
    return (
        f"{where} has {trailer['lines']:,} counters that come to {trailer['sum']:,}, each exact as"
        f" of its own instant, from {trailer['first_as_of']} to {trailer['last_as_of']}"
    )


def _now() -> str:
    return _rfc3339(datetime.now(UTC))


def _rfc3339(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
