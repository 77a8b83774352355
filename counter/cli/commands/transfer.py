"""Run ``counter export`` and ``counter import``, which copy counts to a file and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final

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
    instant,
    output_bytes,
    print_answer,
    printing,
    remark,
)
from counter.errors import StartupError
from counter.limits import MINUTE, PAGE_ITEMS_MAX
from counter.ops.export_file import ExportWriter
from counter.ops.importing import CountsFile, Importer, ImportRefusedError, cut, examine
from counter.quantities import parse_duration, plural
from counter.regular_file import replacing
from counter_client import Count, CounterClient, UnknownOutcomeError
from counter_client.errors import CounterError, NamespaceUnknownError, PreconditionFailedError

#: In place of a file.
STDOUT: Final = "-"
#: How long to wait for late tokens, which are decided when their window is closed.
_PATIENCE: Final = "2m"
_SHOWN_MAX: Final = 5
#: The most differing counters that are examined in detail.
_DIFFERENT_MAX: Final = 10_000


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
        begun_at = instant(datetime.now(UTC))
        if file == STDOUT:
            if json:
                raise StartupError("--json: standard output is the export itself; omit one of them")
            with printing():
                writer = ExportWriter(output_bytes(), namespace, prefix, begun_at)
                trailer = _copied(client, writer, prefix)
            remark(_summary(trailer, "standard output"))
            return
        if Path(file).exists():
            raise StartupError(f"{file} is there already; remove it, or give another name")
        with replacing(Path(file)) as part:
            writer = ExportWriter(part, namespace, prefix, begun_at)
            trailer = _copied(client, writer, prefix)
        document = {"file": file, "export_id": writer.export_id, **trailer}
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


def _copied(client: CounterClient, writer: ExportWriter, prefix: str) -> Mapping[str, Any]:
    """Write all counters; return the trailer."""
    names = client.counters(prefix or None)
    with progress("exporting", None) as bar:
        while batch := list(islice(names, PAGE_ITEMS_MAX)):
            for each in client.get_many(batch, max_staleness="0s"):
                writer.put(each.counter, each.count, instant(each.as_of))
            bar.advance(len(batch))
    return writer.end(instant(datetime.now(UTC)))


def _summary(trailer: Mapping[str, Any], where: str) -> str:
    if trailer["lines"] == 0:
        return f"there are no counters; {where} has none"
    counters = plural(trailer["lines"], "counter that comes", "counters that come")
    return (
        f"{where} has {counters} to {trailer['sum']:,}, each exact as"
        f" of its own instant, from {trailer['first_as_of']} to {trailer['last_as_of']}"
    )


def import_(
    file: Annotated[
        Path,
        flag(
            "What counter export wrote, or other NDJSON or CSV of counts", allow_leading_hyphen=True
        ),
    ],
    flags: ServiceFlags = DEFAULT_SERVICE,
    *,
    add: Annotated[bool, flag("Count on top of counters that are not 0")] = False,
    create: Annotated[bool, flag("Create the namespace if it does not exist")] = False,
    verify: Annotated[bool, flag("Read all counters at the end and compare them")] = False,
    json: Annotated[bool, flag("Print a summary of the import as JSON")] = False,
) -> None:
    """Count the lines of a file, each exactly once; see ``counter import --help``."""
    with exit_codes(flags):
        if add and verify:
            raise StartupError(
                "--verify: with --add the earlier counts are unknown; omit one of them"
            )
        check_file_name(str(file))
        if str(file) == STDOUT:
            raise StartupError(
                "standard input is read once, and a file twice: whole, before anything is counted."
                " Give a file"
            )
        found = examine(file)
        with open_client(flags) as client:
            namespace = _target(client, found.header, create=create)
        refuse_best_effort(namespace, "import")
        if namespace.get("bounds"):
            fail(
                f"namespace {namespace['namespace']!r} has bounds: lines that are refused once are"
                " refused for ever, so the import could not be finished; import first, and set the"
                " bounds then",
                EXIT_NO,
            )
        different: list[dict[str, Any]] = []
        with open_client(_patient(flags)) as client:
            importer = Importer(client, found.id, parse_duration(namespace["key_ttl"]))
            with _explained(importer, found.lines, flags):
                if not add and not importer.find_begun():
                    _refuse_others(client, found, importer)
                with progress("importing", found.lines) as bar:
                    importer.run(cut(found.counts()), lambda done: bar.update(done, found.lines))
                if verify:
                    different = _different(client, found)
        for each in different[:_SHOWN_MAX]:
            remark(f"{each['counter']!r} is {each['count']}, and {each['expected']} in the file")
        text = plural(found.lines, "line is counted, which comes", "lines are counted, which come")
        text = f"{text} to {found.sum:,}"
        document: dict[str, Any] = {"id": found.id, "lines": found.lines, "sum": found.sum}
        if verify:
            document |= {"verified": not different, "different": different}
            differ = plural(len(different), "counter differs", "counters differ")
            text += f"\n{differ if different else 'all counters equal'} the file"
        with exiting(EXIT_NO if different else 0):
            print_answer(text, document, json=json)


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


def _refuse_others(client: CounterClient, file: CountsFile, importer: Importer) -> None:
    """Exit with EXIT_NO if a counter of the file is not 0, other than by this import."""
    for _, each in _compared(client, file, "looking at the target"):
        if each.count:
            # Another run may have begun just now.
            if importer.find_begun():
                return
            fail(
                f"{each.counter!r}, which is in the file, is {each.count} in the target; nothing"
                " was imported: to count on top of what is there, give --add",
                EXIT_NO,
            )


def _different(client: CounterClient, file: CountsFile) -> list[dict[str, Any]]:
    """Return the counters that differ from the file."""
    found: dict[str, int] = {}
    for expected, each in _compared(client, file, "verifying"):
        if each.count != expected:
            found[each.counter] = each.count
        if len(found) > _DIFFERENT_MAX:
            break
    # A counter may have several lines, which may be in different batches.
    wanted = dict.fromkeys(found, 0)
    for counter, count in file.counts() if found else ():
        if counter in wanted:
            wanted[counter] += count
    return [
        {"counter": counter, "count": count, "expected": wanted[counter]}
        for counter, count in found.items()
        if count != wanted[counter]
    ]


def _compared(client: CounterClient, file: CountsFile, what: str) -> Iterator[tuple[int, Count]]:
    """Yield the counters of the target with their sums in the file, in the largest batches that one
    request allows; lines of one name in one batch are summed."""
    lines = file.counts()
    with progress(what, file.lines) as bar:
        while part := list(islice(lines, PAGE_ITEMS_MAX)):
            batch: dict[str, int] = {}
            for counter, count in part:
                batch[counter] = batch.get(counter, 0) + count
            for each in client.get_many(list(batch), max_staleness="0s"):
                yield batch[each.counter], each
            bar.advance(len(part))


@contextmanager
def _explained(importer: Importer, lines: int, flags: ServiceFlags) -> Iterator[None]:
    """Exit with the code of an import that fails, and print how to go on."""
    try:
        yield
    except ImportRefusedError as error:
        fail(str(error), EXIT_NO)
    except (StartupError, OSError) as error:
        # The file was changed or removed before it was read a second time.
        if not importer.has_begun:
            raise
        why, code = f"{error}: go on with the file as it was", EXIT_UNKNOWN
    except KeyboardInterrupt:
        why, code = "interrupted", EXIT_INTERRUPTED
    except CounterError as error:
        # Nothing is changed before the first line.
        begun = importer.has_begun or isinstance(error, UnknownOutcomeError)
        why, code = explain(error, flags), EXIT_UNKNOWN if begun else exit_code(error)
    else:
        return
    known = plural(lines, "line is known", "lines are known")
    fail(
        f"{why}\n{importer.counted:,} of {known} to be counted; run the same command to resume: it"
        " counts no line twice",
        code,
    )


def _patient(flags: ServiceFlags) -> ServiceFlags:
    """Wait long enough for the decision of a late token."""
    given_us = duration_us("timeout", flags.timeout)
    return flags if given_us >= 2 * MINUTE else replace(flags, timeout=_PATIENCE)
