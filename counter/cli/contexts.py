"""Keep contexts: services by name, each with its namespace, API key and TLS files, in the user's
config folder.

A command takes its place from one source, whole: from ``--url`` or ``COUNTER_URL``, or else from a
context. So the API key of a context is sent to no other URL than the context's own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Final

from cyclopts import App, ArgumentCollection, Token
from cyclopts.argument import Argument

from counter.cli.terminal import exit_on_error
from counter.errors import StartupError
from counter.regular_file import replacing

#: The environment variable that names a context.
CONTEXT_VARIABLE: Final = "COUNTER_CONTEXT"
_FLAG: Final = "--context"
#: A name that a context may have.
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_FROM_WORDS: Final = "cli"
_FILE: Final = "contexts.json"


@dataclass(frozen=True, slots=True)
class Context:
    """A service by name. A value that is None is not part of it."""

    url: str
    namespace: str | None = None
    api_key: str | None = field(default=None, repr=False)
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None

    def flags(self) -> dict[str, str]:
        """Return its values by the names of their flags; the key has none."""
        given = {k: v for k, v in asdict(self).items() if v is not None and k != "api_key"}
        return {f"--{name.replace('_', '-')}": value for name, value in given.items()}


@dataclass(frozen=True, slots=True)
class Contexts:
    """All contexts of a user, and the name of the current one."""

    by_name: Mapping[str, Context] = field(default_factory=dict)
    current: str | None = None

    def named(self, name: str) -> Context:
        """Return the context *name*. Raises StartupError."""
        if name in self.by_name:
            return self.by_name[name]
        known = ", ".join(sorted(self.by_name)) or "none"
        raise StartupError(f"there is no context {name[:64]!r}; those of {_path()}: {known}")


def load_contexts() -> Contexts:
    """Return the stored contexts. Raises StartupError if others could read them or write them."""
    path = _path()
    if path is None:
        return Contexts()
    try:
        with path.open(encoding="utf-8-sig") as file:
            _refuse_open(path, os.fstat(file.fileno()), 0o077, "600")
            _refuse_open(path.parent, path.parent.stat(), 0o022, "700")
            document = json.load(file)
        by_name = {name: Context(**values) for name, values in document["contexts"].items()}
        values = [document["current"], *(each for of in by_name.values() for each in astuple(of))]
        if not all(isinstance(each, str | None) for each in values):
            raise TypeError("a value is no text")
        return Contexts(by_name, document["current"])
    except (FileNotFoundError, NotADirectoryError):
        return Contexts()
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartupError(
            f"{path} does not hold contexts: mend it, or remove it and add them again"
        ) from error


def save_contexts(contexts: Contexts) -> None:
    """Replace the stored contexts, atomically. Raises StartupError."""
    path = _path()
    if path is None:
        raise StartupError("contexts need a config folder: set HOME or XDG_CONFIG_HOME")
    document = {
        "current": contexts.current,
        "contexts": {name: asdict(each) for name, each in contexts.by_name.items()},
    }
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps(document, indent=2).encode())
    except OSError as error:
        raise StartupError(f"{path} cannot be written: {error.strerror or error}") from error


def _path() -> Path | None:
    """Return the file of the contexts; None without a home directory."""
    # The XDG specification: a relative path is ignored.
    configured = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    try:
        folder = configured if configured.is_absolute() else Path.home() / ".config"
    except RuntimeError:
        return None
    return folder / "counter" / _FILE


def _refuse_open(path: Path, found: os.stat_result, others: int, mode: str) -> None:
    """Raise StartupError if *path* gives other users access."""
    if found.st_mode & others:
        raise StartupError(
            f"{path} has the mode {stat.S_IMODE(found.st_mode):04o}, and may hold API keys, which"
            f" others could read or redirect: chmod {mode} {shlex.quote(str(path))}"
        )


def fill_from_context(_: App, __: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Fill the flags that name the service from a context, if one is used.

    ``--context`` comes before the environment, as every flag does; ``COUNTER_CONTEXT`` and the
    current context come after it. With ``--url`` or ``COUNTER_URL`` no context is used.
    """
    by_flag = {each.name: each for each in arguments}
    if _FLAG not in by_flag:
        return
    with exit_on_error():
        chosen = by_flag[_FLAG]
        source, url_source = _source(chosen), _source(by_flag["--url"])
        is_flag = source == _FROM_WORDS
        name = chosen.tokens[0].value if chosen.tokens else ""
        if name and source == url_source:
            pair = f"{_FLAG} and --url" if is_flag else f"{CONTEXT_VARIABLE} and COUNTER_URL"
            raise StartupError(f"{pair} both name a service: give one of them")
        if url_source is not None and not is_flag:
            chosen.tokens.clear()
            return
        if source is not None and not name:
            return
        contexts = load_contexts()
        name = name or contexts.current or ""
        if not name:
            return
        for flag_name, value in {**contexts.named(name).flags(), _FLAG: name}.items():
            argument = by_flag.get(flag_name)
            # A namespace command has its namespace as an argument.
            if argument is None:
                continue
            if not argument.tokens or (is_flag and _source(argument) != _FROM_WORDS):
                argument.tokens.clear()
                argument.append(Token(keyword=flag_name, value=value, source="context"))


def _source(argument: Argument) -> str | None:
    """Return the source of the value; None if it has none."""
    return argument.tokens[0].source if argument.tokens else None
