"""Run ``counter export`` and ``counter import``, which copy counts to a file and back."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter

from counter.cli.client import (
    DEFAULT_SERVICE,
    EXIT_NO,
    EXIT_UNKNOWN,
    ServiceFlags,
    duration_us,
    exit_code,
    exit_codes,
    explain,
    fail,
    open_client,
)
from counter.cli.progress import progress
from counter.cli.terminal import (
    EXIT_INTERRUPTED,
    exiting,
    flag,
    output_bytes,
    print_answer,
    printing,
    remark,
)
from counter.durations import parse_iso_duration
from counter.errors import StartupError
from counter.limits import MINUTE, PAGE_ITEMS_MAX
from counter.ops.export_file import CountLine, ExportWriter, PartFile, header_of
from counter.ops.importing import CountsFile, Importer, ImportRefusedError, examine
from counter.quantities import plural
from counter_client import Count, CounterClient, UnknownOutcomeError
from counter_client.errors import (
    CounterError,
    NamespaceUnknownError,
    PreconditionFailedError,
)

#: In place of a file.
STDOUT: Final = "-"


def export(
    file: Annotated[
        str,
        flag("A file that does not exist yet; - for standard output", allow_leading_hyphen=True),
    ],
    flags: ServiceFlags = DEFAULT_SERVICE,
    *,
    prefix: Annotated[str, flag("Only counters with this prefix", "TEXT")] = "",
    json: Annotated[bool, flag("Print a summary of the export as JSON")] = False,
) -> None:
    """Write the exact counts of a namespace to a file; see ``counter export --help``."""
    with exit_codes(flags), open_client(flags) as client:
        check_file_name(file)
        namespace = client.namespace()
        refuse_best_effort(namespace, "export")
        header = header_of(namespace, str(uuid.uuid4()), prefix, _now())
        if file == STDOUT:
            if json:
                raise StartupError("--json: standard output is the export itself; omit one of them")
            writer = ExportWriter(output_bytes(), header)
            with printing():
                writer.begin()
                trailer = _copied(client, writer)
            remark(_summary(trailer, "standard output"))
            return
        path = Path(file)
        with PartFile(path) as part:
            writer = ExportWriter(part.file, header)
            if part.begin(writer):
                remark(
                    f"resuming {part.part}, begun at {writer.header['begun_at']}: it has"
                    f" {plural(writer.lines, 'counter')}"
                )
            try:
                trailer = _copied(client, writer)
            except KeyboardInterrupt:
                remark(f"{part.part} is kept: run the same command to resume")
                raise
            part.whole()
        document = {"file": str(path), "export_id": writer.header["export_id"], **trailer}
        print_answer(_summary(trailer, file), document, json=json)


def check_file_name(file: str) -> None:
    """Raise StartupError for a name that looks like a flag: only ``-`` is allowed in place of a
    file."""
    if file.startswith("-") and file != STDOUT:
        raise StartupError(
            f"{file} is not a flag of this command; for a file of that name write ./{file}"
        )


def refuse_best_effort(namespace: Mapping[str, Any], what: str) -> None:
    """Exit with EXIT_NO if the namespace's counts are not exact."""
    if namespace["counter_type"] == "BEST_EFFORT":
        fail(
            f"namespace {namespace['namespace']!r} is BEST_EFFORT: its counts may be lost or"
            f" counted twice, and nothing lists its counters, so no {what} of it could be exact;"
            " use an ACCURATE or EVENTUAL namespace",
            EXIT_NO,
        )


def batches(names: Iterator[str]) -> Iterator[list[str]]:
    """Split *names* into the largest batches that one request allows."""
    while batch := list(islice(names, PAGE_ITEMS_MAX)):
        yield batch


def _copied(client: CounterClient, writer: ExportWriter) -> Mapping[str, Any]:
    """Write all counters that come after the last one of *writer*; return the trailer."""
    with progress("exporting", None) as bar:
        bar.advance(writer.lines)
        for batch in batches(_names(client, writer)):
            for each in client.get_many(batch, max_staleness="0s"):
                writer.put(CountLine(each.counter, each.count, _rfc3339(each.as_of)))
            bar.advance(len(batch))
    return writer.end(_now())


def _names(client: CounterClient, writer: ExportWriter) -> Iterator[str]:
    last = writer.last
    names = client.counters(writer.header["prefix"] or None)
    return (name for name in names if last is None or name > last)


def _summary(trailer: Mapping[str, Any], where: str) -> str:
    if trailer["lines"] == 0:
        return f"there are no counters; {where} has none"
    counters = plural(trailer["lines"], "counter that comes", "counters that come")
    return (
        f"{where} has {counters} to {trailer['sum']:,}, each exact as"
        f" of its own instant, from {trailer['first_as_of']} to {trailer['last_as_of']}"
    )


def _now() -> str:
    return _rfc3339(datetime.now(UTC))


def _rfc3339(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


#: How long to wait for late tokens, which are decided when their window is closed.
_PATIENCE: Final = "2m"
_SHOWN_MAX: Final = 5
#: The most differing counters that are examined in detail.
_DIFFERENT_MAX: Final = 10_000


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ImportFlags:
    """How to handle counters that exist, and whether to verify."""

    add: Annotated[bool, flag("Count on top of counters that are not 0")] = False
    create: Annotated[bool, flag("Create the namespace if it does not exist")] = False
    verify: Annotated[bool, flag("Read all counters at the end and compare them")] = False
    id: Annotated[
        str | None,
        flag("Distinguishes two imports of files with the same content", "TEXT"),
    ] = None
    json: Annotated[bool, flag("Print a summary of the import as JSON")] = False


@dataclass(slots=True)
class _Import:
    """One run of the command."""

    file: CountsFile
    what: ImportFlags
    client: CounterClient
    importer: Importer
    different: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> None:
        """Count the file, and verify the result."""
        if not self.what.add and not self.importer.find_begun():
            self._refuse_others()
        with progress("importing", self.file.lines) as bar:
            self.importer.run(self.file.chunks(), lambda done: bar.update(done, self.file.lines))
        if self.what.verify:
            self._verify()

    def _refuse_others(self) -> None:
        """Exit with EXIT_NO if a counter of the file is not 0, other than by this import."""
        shown: list[str] = []
        number = 0
        for _, each in self._counts("looking at the target"):
            if each.count:
                number += 1
                shown += [f"  {each.counter}: {each.count}"] * (len(shown) < _SHOWN_MAX)
        if number and not self.importer.find_begun():
            more = [f"  and {number - len(shown):,} more"] if number > len(shown) else []
            listed = "\n".join([*shown, *more])
            fail(
                f"{plural(number, 'counter of the file is', 'counters of the file are')} not 0 in"
                f" the target; nothing was imported:\n{listed}\nto count on top of what is there,"
                " give --add",
                EXIT_NO,
            )

    def _verify(self) -> None:
        """Compare all counters with the file."""
        found: dict[str, int] = {}
        for expected, each in self._counts("verifying"):
            if each.count != expected:
                found[each.counter] = each.count
            if len(found) > _DIFFERENT_MAX:
                break
        if not found:
            return
        # A counter may have several lines, which may be in different batches.
        wanted = dict.fromkeys(found, 0)
        for counter, count in self.file.counts():
            if counter in wanted:
                wanted[counter] += count
        self.different = [
            {"counter": counter, "count": count, "expected": wanted[counter]}
            for counter, count in found.items()
            if count != wanted[counter]
        ]

    def _counts(self, what: str) -> Iterator[tuple[int, Count]]:
        """Yield the counters of the target with their sums in the file, in the largest batches
        that one request allows; lines of one name in one batch are summed."""
        lines = self.file.counts()
        with progress(what, self.file.lines) as bar:
            while part := list(islice(lines, PAGE_ITEMS_MAX)):
                batch: dict[str, int] = {}
                for counter, count in part:
                    batch[counter] = batch.get(counter, 0) + count
                for each in self.client.get_many(list(batch), max_staleness="0s"):
                    yield batch[each.counter], each
                bar.advance(len(batch))

    def document(self) -> dict[str, Any]:
        """Return the document of ``--json``."""
        document = {"id": self.file.id, "lines": self.file.lines, "sum": self.file.sum}
        if self.what.verify:
            document |= {"verified": not self.different, "different": self.different}
        return document

    def text(self) -> str:
        """Return the summary for people."""
        lines = plural(
            self.file.lines, "line is counted, which comes", "lines are counted, which come"
        )
        text = f"{lines} to {self.file.sum:,}"
        if self.what.verify and not self.different:
            text += "\nall counters equal the file"
        return text


def import_(
    file: Annotated[
        Path,
        flag(
            "What counter export wrote, or other NDJSON or CSV of counts", allow_leading_hyphen=True
        ),
    ],
    what: ImportFlags | None = None,
    flags: ServiceFlags = DEFAULT_SERVICE,
) -> None:
    """Count the lines of a file, each exactly once; see ``counter import --help``."""
    what = what or ImportFlags()
    with exit_codes(flags):
        if what.add and what.verify:
            raise StartupError(
                "--verify: with --add the earlier counts are unknown; omit one of them"
            )
        check_file_name(str(file))
        if str(file) == STDOUT:
            raise StartupError(
                "standard input is read once, and a file twice: whole, before anything is counted."
                " Give a file"
            )
        with progress(f"reading {file}", None) as bar:
            found = examine(file, bar.update, what.id)
        with open_client(flags) as client:
            namespace = _target(client, found.header, create=what.create)
        refuse_best_effort(namespace, "import")
        key_ttl_us = parse_iso_duration(namespace["key_ttl"])
        with open_client(_patient(flags)) as client:
            importer = Importer(client, found.id, key_ttl_us)
            _run(_Import(found, what, client, importer), flags)


def _target(client: CounterClient, header: Mapping[str, Any], *, create: bool) -> Mapping[str, Any]:
    """Return the settings of the namespace; if it is missing and *create*, make it with the type
    that the export has in its *header*."""
    try:
        return client.namespace()
    except NamespaceUnknownError as error:
        if not create:
            error.detail += "; counter import --create makes it"
            raise
    kind = str(header.get("settings", {}).get("counter_type", "ACCURATE"))
    try:
        made = client.create_namespace(counter_type=kind)
    except PreconditionFailedError:
        # Another import has just created it.
        return client.namespace()
    remark(f"namespace {made['namespace']!r} did not exist: created, {kind}")
    return made


def _run(run: _Import, flags: ServiceFlags) -> None:
    try:
        run.run()
    except ImportRefusedError as error:
        fail(str(error), EXIT_NO)
    except (StartupError, OSError) as error:
        # The file was changed or removed before it was read a second time.
        if not run.importer.has_begun:
            raise
        fail(f"{error}\n{_resume(run)}, with the file as it was", EXIT_UNKNOWN)
    except KeyboardInterrupt:
        fail(f"interrupted: {_resume(run)}", EXIT_INTERRUPTED)
    except CounterError as error:
        # Nothing is changed before the first line.
        begun = run.importer.has_begun or isinstance(error, UnknownOutcomeError)
        code = EXIT_UNKNOWN if begun else exit_code(error)
        fail(f"{explain(error, flags)}\n{_resume(run)}", code)
    for each in run.different[:_SHOWN_MAX]:
        remark(f"{each['counter']!r} is {each['count']}, and {each['expected']} in the file")
    if run.different:
        remark(
            f"{plural(len(run.different), 'counter differs', 'counters differ')} from the file: did"
            " a client add to them?"
        )
    with exiting(EXIT_NO if run.different else 0):
        print_answer(run.text(), run.document(), json=run.what.json)


def _resume(run: _Import) -> str:
    lines = plural(run.file.lines, "line is known", "lines are known")
    return (
        f"{run.importer.counted:,} of {lines} to be counted; run the same command to resume: it"
        " counts no line twice"
    )


def _patient(flags: ServiceFlags) -> ServiceFlags:
    """Wait long enough for the decision of a late token."""
    given_us = duration_us("timeout", flags.timeout)
    return flags if given_us >= 2 * MINUTE else replace(flags, timeout=_PATIENCE)
