"""Run ``counter context ...``: services by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter

from counter.cli.client import EXIT_NO, ServiceFlags, exit_codes, fail, key_in, open_client
from counter.cli.contexts import (
    CONTEXT_VARIABLE,
    NAME,
    Context,
    Contexts,
    load_contexts,
    save_contexts,
)
from counter.cli.terminal import (
    JsonLines,
    flag,
    json_line,
    listing,
    print_answer,
    print_out,
    remark,
    table,
)
from counter.errors import StartupError
from counter.security.keys import id_in

_Which = Annotated[str, flag("The context")]
_CELLS: Final[Mapping[object, str]] = {True: "*", False: "", None: "-"}


@Parameter(name="*", group="Service")
@dataclass(frozen=True, kw_only=True)
class ContextFlags:
    """The values of a context."""

    url: Annotated[
        str, flag("The URL of its service; several are tried in order: URL,URL", "URL", alias="-u")
    ]
    namespace: Annotated[
        str | None, flag("The namespace of commands that name none [default]", "NAME", alias="-n")
    ] = None
    api_key_file: Annotated[
        Path | None,
        flag("A file with the API key, which is copied; /dev/stdin for standard input", "FILE"),
    ] = None
    tls_ca: Annotated[
        Path | None, flag("The authority of its certificate [the usual ones]", "FILE")
    ] = None
    tls_cert: Annotated[Path | None, flag("This client's certificate", "FILE")] = None
    tls_key: Annotated[Path | None, flag("The key of this client's certificate", "FILE")] = None


def add(
    name: _Which,
    /,
    what: ContextFlags,
    *,
    override: Annotated[bool, flag("Replace a context of the name", name="--replace")] = False,
) -> None:
    """Add a context."""
    with exit_codes():
        contexts = load_contexts()
        if not NAME.fullmatch(name):
            raise StartupError(
                f"NAME: {name[:80]!r} cannot name a context: write 1 to 64 letters, digits, dots,"
                " underscores and dashes, the first a letter or a digit"
            )
        if name in contexts.by_name and not override:
            fail(f"there is a context {name!r} already: --replace replaces it", EXIT_NO)
        made = Context(
            what.url,
            what.namespace,
            None if what.api_key_file is None else key_in(what.api_key_file).strip(),
            *(_absolute(each) for each in (what.tls_ca, what.tls_cert, what.tls_key)),
        )
        given = {k: v for k, v in asdict(made).items() if k != "api_key" and v is not None}
        # Opening a client checks the values.
        with open_client(ServiceFlags(**given), api_key=made.api_key):
            pass
        save_contexts(replace(contexts, by_name={**contexts.by_name, name: made}))
        remark(f"context {name!r} is added: counter context use {name} makes it the current one")


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def list_(*, json: JsonLines = False) -> None:
    """Show all contexts, never a key."""
    with exit_codes():
        contexts = load_contexts()
        if not contexts.by_name and not json:
            remark("there are no contexts: counter context add makes one")
            return
        shown = [_shown(contexts, name) for name in sorted(contexts.by_name)]
        if json:
            for each in shown:
                print_out(json_line(each))
            return
        columns = ("current", "name", "url", "namespace", "api_key")
        rows = [[_CELLS.get(each[name], each[name]) for name in columns] for each in shown]
        print_out(table([name.upper().replace("_", " ") for name in columns], rows))


def use(name: _Which, /) -> None:
    """Make a context the current one."""
    with exit_codes():
        contexts = _contexts_with(name)
        save_contexts(replace(contexts, current=name))
        remark(f"context {name!r} is the current one: {contexts.named(name).url}")
        for variable in ("COUNTER_URL", CONTEXT_VARIABLE):
            if os.environ.get(variable):
                remark(f"{variable} of the environment comes before it: unset it")


def show(
    name: Annotated[str | None, flag("The context [the current one]")] = None,
    /,
    *,
    json: JsonLines = False,
) -> None:
    """Show a context, without its key."""
    with exit_codes():
        chosen = name or os.environ.get(CONTEXT_VARIABLE) or load_contexts().current
        if chosen is None:
            fail("no context is the current one: counter context use makes one so", EXIT_NO)
        shown = _shown(_contexts_with(chosen), chosen)
        print_answer(listing(shown), shown, json=json)


def remove(name: _Which, /) -> None:
    """Remove a context, with its key."""
    with exit_codes():
        contexts = _contexts_with(name)
        others = {key: each for key, each in contexts.by_name.items() if key != name}
        current = None if contexts.current == name else contexts.current
        save_contexts(Contexts(others, current))
        remark(f"context {name!r} is removed")
        if current is None and contexts.current:
            remark("no context is the current one any more")


def _contexts_with(name: str) -> Contexts:
    """Return all contexts. Exits with EXIT_NO if there is none of the name."""
    contexts = load_contexts()
    try:
        contexts.named(name)
    except StartupError as error:
        fail(str(error), EXIT_NO)
    return contexts


def _shown(contexts: Contexts, name: str) -> dict[str, Any]:
    """Return a context for people; of its key only the id, which is public."""
    context = contexts.by_name[name]
    shown = {"name": name, "current": name == contexts.current, **asdict(context)}
    if context.api_key is not None:
        known = id_in(context.api_key)
        shown["api_key"] = f"set, id {known}" if known else "set"
    return shown
