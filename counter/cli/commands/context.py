"""Run ``counter context ...``: services by name."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from counter.cli.client import EXIT_NO, ServiceFlags, exit_codes, fail, key_in, open_client
from counter.cli.contexts import NAME, Context, Contexts, load_contexts, save_contexts
from counter.cli.terminal import JsonLines, flag, json_line, print_out, remark, table
from counter.errors import StartupError
from counter.security.keys import id_in

_Which = Annotated[str, flag("The context")]


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
        shown = [_shown(contexts, name) for name in sorted(contexts.by_name)]
        if json:
            for each in shown:
                print_out(json_line(each))
        elif not shown:
            remark("there are no contexts: counter context add makes one")
        else:
            rows = [
                ("*" if current else "", name, url, *(each or "-" for each in others))
                for name, current, url, *others, _, _, _ in map(dict.values, shown)
            ]
            print_out(table(("CURRENT", "NAME", "URL", "NAMESPACE", "API KEY"), rows))


def use(name: _Which, /) -> None:
    """Make a context the current one."""
    with exit_codes():
        contexts = load_contexts()
        url = contexts.named(name).url
        save_contexts(replace(contexts, current=name))
        remark(f"context {name!r} is the current one: {url}")


def remove(name: _Which, /) -> None:
    """Remove a context, with its key."""
    with exit_codes():
        contexts = load_contexts()
        contexts.named(name)
        others = {key: each for key, each in contexts.by_name.items() if key != name}
        save_contexts(Contexts(others, None if contexts.current == name else contexts.current))
        remark(f"context {name!r} is removed")


def _shown(contexts: Contexts, name: str) -> dict[str, Any]:
    """Return a context for people; of its key only the id, which is public."""
    context = contexts.by_name[name]
    key = context.api_key and f"set, id {id_in(context.api_key) or 'unknown'}"
    return {
        "name": name,
        "current": name == contexts.current,
        **asdict(replace(context, api_key=key)),
    }
