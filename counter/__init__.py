"""A distributed counter service with event-sourced dedup: the core and its adapters."""

from pathlib import Path

__version__ = "0.2.0.dev0"
#: In a checkout the whole project.
_FOLDER = Path(__file__).parent.parent


def how_to_install(extra: str) -> str:
    """Return what a user of this installation does to have what *extra* of it names."""
    if not (_FOLDER / "clients" / "python").is_dir():
        return f"install the wheel of the server again, with the extra {extra}"
    path = "./clients/python" if extra == "client" else f"'.[{extra}]'"
    return f"pip install {path} in {_FOLDER}"
