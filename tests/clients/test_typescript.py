"""The TypeScript client's own tests, and its README as a new user would follow it."""

import json
import re
from pathlib import Path

import pytest

from tests.clients.programs import TYPESCRIPT, run_node, typescript
from tests.support.server import served


@pytest.mark.usefixtures("child_processes")
def test_its_own_tests_pass(tmp_path: Path) -> None:
    typescript(tmp_path)
    run_node("node", "--test", "dist/test/")


def test_it_depends_on_nothing() -> None:
    written = (TYPESCRIPT / "package.json").read_text(encoding="utf-8")
    assert not re.search(r'"(peer|optional|bundled?)?dependencies"', written, re.IGNORECASE)


@pytest.mark.usefixtures("child_processes")
def test_browsers_load_it_and_bundlers_take_it(tmp_path: Path) -> None:
    """No module of Node, and no top-level await, which no bundle for older browsers can have."""
    typescript(tmp_path)
    package = json.loads((TYPESCRIPT / "package.json").read_text(encoding="utf-8"))
    modules = [TYPESCRIPT / package["exports"]["."]["default"]]
    for module in modules:
        text = module.read_text(encoding="utf-8")
        assert "node:" not in text, module
        assert not re.search(r"^\S.*\bawait\b|\bimport\(", text, re.MULTILINE), module
        names = re.findall(r"""\bfrom ["'](.+?)["']""", text)
        assert all(name.startswith("./") for name in names), names
        modules += [each for name in names if (each := module.parent / name) not in modules]
    assert len(modules) > 5


def test_it_is_compiled_for_the_oldest_node_that_it_names() -> None:
    """Without the types of browsers: code for newer Node versions does not compile."""
    package = json.loads((TYPESCRIPT / "package.json").read_text(encoding="utf-8"))
    oldest = package["engines"]["node"].removeprefix(">=")
    assert package["devDependencies"]["@types/node"].split(".")[0] == oldest
    options = json.loads((TYPESCRIPT / "tsconfig.json").read_text(encoding="utf-8"))
    assert options["compilerOptions"]["lib"] == ["es2022"]
    readme = (TYPESCRIPT / "README.md").read_text(encoding="utf-8")
    assert f"Node {oldest} or newer" in " ".join(readme.split())


@pytest.mark.usefixtures("child_processes")
def test_its_readme_counts(tmp_path: Path) -> None:
    typescript(tmp_path)
    text = (TYPESCRIPT / "README.md").read_text(encoding="utf-8")
    parts = re.findall(r"```js\n(.*?)```", text, re.DOTALL)
    program = "".join(parts)
    [console] = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    install, count, *shown = console.strip().split("\n")
    assert all(len(part.splitlines()) <= 10 for part in parts)
    with served(tmp_path) as server:
        written = program.replace("http://127.0.0.1:8080", server.url)
        (tmp_path / "count.mjs").write_text(written, encoding="utf-8")
        words = install.replace("/path/to/clients/typescript", str(TYPESCRIPT)).split()
        run_node(*words[1:], "--offline", "--no-audit", "--no-fund", at=tmp_path)
        assert run_node(*count.split()[1:], at=tmp_path).splitlines() == shown
