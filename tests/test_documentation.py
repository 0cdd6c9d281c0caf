"""The documentation: links lead somewhere on the repository's web page too, and docstrings begin with what a thing is or does.

The site's own links and its navigation are checked where it is built (`make docs`).
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]

ROOMS = ("commlayer", "integrations", "scheduler", "profiles", "examples", "benchmarks")

CODE = re.compile(r"^(?P<fence>```|~~~).*?^(?P=fence)[^\n]*$|(?P<ticks>`+).+?(?P=ticks)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^()\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(?P<text>.+?)[ #]*$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors of a page: those that are written into it, and GitHub's for its headings."""
    found = set(re.findall(r'<a id="([^"]+)">', text))
    seen: Counter[str] = Counter()
    for heading in HEADING.finditer(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading["text"]).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def links(text: str) -> Iterator[str]:
    """The targets of links to files and anchors; not of what is shown as code, nor of other sites."""
    for link in LINK.finditer(CODE.sub("", text)):
        if "://" not in link["target"] and not link["target"].startswith("mailto:"):
            yield link["target"]


def broken_links(page: Path, text: str) -> list[str]:
    """The links on ``page`` that lead to no file of the repository, or to no anchor of it."""
    broken = []
    for target in links(text):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        is_there = path.is_relative_to(ROOT) and path.exists()
        if is_there and anchor:
            is_there = anchor in anchors(text if path == page else path.read_text(encoding="utf-8"))
        if not is_there:
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "link", ["docs/nothing.md", "docs/plans.md#nothing", "#nothing", "../outside.md", "docs/plans.md#Price"]
)
def test_a_broken_link_is_found(link: str) -> None:
    text = (
        f"# A page\n\n[words]({link}), [well](docs/plans.md#price), [here](#a-page), [there](https://example.org/#x)\n"
    )
    assert broken_links(ROOT / "README.md", text) == [link]


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "trainers").glob("*.md")), ids=lambda page: page.stem)
def test_a_trainers_page_says_what_has_run_on_a_gpu_before_anything_else(page: Path) -> None:
    before_first_section = page.read_text(encoding="utf-8").partition("\n## ")[0]
    assert "(../gpu.md)" in before_first_section


FROM_AN_INDEX = re.compile(r"pip install [\"'`]*commlayer\b")


def from_an_index(text: str) -> list[str]:
    """The commands in ``text`` that have pip look commlayer up on an index, where it is not."""
    return FROM_AN_INDEX.findall(text)


def test_nothing_has_pip_look_commlayer_up() -> None:
    sources = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]  # which says what was
    for path in [*pages, *sources]:
        assert not from_an_index(path.read_text(encoding="utf-8")), path


def test_what_has_pip_look_commlayer_up_is_found() -> None:
    for found in ("`pip install commlayer`", "pip install 'commlayer[plots]'", 'run pip install "commlayer[x]"'):
        assert from_an_index(found)
    for sound in ("pip install .", "pip install '.[plots]'", "pip install 'pyroute2>=0.8'"):
        assert not from_an_index(sound)


def test_code_has_no_links() -> None:
    assert list(links("`[a](b)` ``[`](c)``\n```\n[d](e)\n```\n[f](g)")) == ["g"]


def test_the_readme_has_the_two_commands_before_the_results() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    order = ["| state |", "## Install", "## Try it", "## Use it as a backend", "## Results", "## When not to use it"]
    places = [text.index(heading) for heading in order]
    assert places == sorted(places)
    assert re.findall(r"^make [^#\n]*[^# \n]", text, re.MULTILINE) == ["make demo", "make lint test"]
    assert len(text.splitlines()) <= 95, "a newcomer reads it once"


# The site: MkDocs itself on a small repository with this one's settings and hooks.

SITE = {
    "docs/README.md": "# Home\n\n[a](guide.md#a-part) [b](../results/README.md#a--b) [c](../LICENSE)\n",
    "docs/guide.md": "# Guide\n\n## A part\n\n- one\n  - inside\n",
    "results/README.md": "# Results\n\n## A — b\n\n[back](../docs/guide.md) [d](more.md)\n",
    "results/more.md": "# More\n\n- one\n    - inside\n",
    "LICENSE": "text\n",
    "docs/reference/commlayer.md": "# commlayer\n\n::: commlayer\n",
    "docs/reference/integrations.md": "# integrations\n",
    "docs/reference/scheduler.md": "# scheduler\n",
    "docs/reference/profiles.md": "# profiles\n",
    "commlayer/__init__.py": '"""All."""\n__all__ = ["known"]\n'
    'def known(a, b):\n    """Do :func:`this`.\n\n    Args:\n        a, b: numbers.\n    """\n',
    "commlayer/integrations/__init__.py": "__all__ = []\n",
    "commlayer/scheduler/__init__.py": "__all__ = []\n",
    "commlayer/profiles/__init__.py": "__all__ = []\n",
}


def build(folder: Path, changes: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Build the site of ``SITE`` with ``changes`` in ``folder``, as ``make docs`` does."""
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[0]
    hooks = {f"docs/{path.name}": path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("site_*.py")}
    for name, text in {**SITE, **hooks, "mkdocs.yml": settings, **changes}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    command = re.search(r"-m (mkdocs build .*)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert command
    return subprocess.run(
        [sys.executable, "-m", *command[1].split()],
        cwd=folder,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_sound_site_is_built(tmp_path: Path) -> None:
    built = build(tmp_path, {})
    assert built.returncode == 0, built.stderr
    assert 'href="results/index.html#a--b"' in (tmp_path / "site/index.html").read_text(encoding="utf-8")
    assert 'href="../guide.html"' in (tmp_path / "site/results/index.html").read_text(encoding="utf-8")
    assert (tmp_path / "site/LICENSE").read_text(encoding="utf-8") == SITE["LICENSE"]
    for page in ("guide", "results/more"):
        assert "<ul>\n<li>inside</li>" in (tmp_path / f"site/{page}.html").read_text(encoding="utf-8")
    reference = (tmp_path / "site/reference/commlayer.html").read_text(encoding="utf-8")
    assert "<p>Do <code>this</code>.</p>" in reference
    assert re.findall(r"<p>(see b\.|numbers\.)</p>", reference) == ["see b.", "numbers."]


def test_a_broken_site_is_refused(tmp_path: Path) -> None:
    guide = "[a](nothing.md) [b](README.md#nothing) [c](../results/none.md) [d](../results/README.md#none)\n"
    built = build(tmp_path, {"docs/guide.md": guide, "commlayer/__init__.py": '"""All."""\n__all__ = ["unknown"]\n'})
    assert built.returncode == 1
    for broken in ("nothing.md", "README.md#nothing", "results/none.md", "results/README.md#none"):
        assert f"'{broken}'" in built.stderr
    assert "commlayer.unknown, which is public" in built.stderr


# Docstrings. Each begins with what the thing is (a noun phrase) or does (a verb): "The size that …", "Return …". Words that
# begin a riddle instead, which only its author can decode:

RIDDLES = re.compile(r"(Of|As|By|From|That|Those|What|So|All in all)\b")


def docstrings(source: str) -> Iterator[tuple[str, str]]:
    """Every public docstring of a module, with its name: the module's, and those of classes, functions and attributes."""
    tree = ast.parse(source)
    if found := ast.get_docstring(tree):
        yield "", found
    yield from _docstrings(tree.body, "")


def _docstrings(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, str]]:
    before: ast.stmt | None = None
    for statement in body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef) and _is_public(statement.name):
            if found := ast.get_docstring(statement):
                yield prefix + statement.name, found
            if isinstance(statement, ast.ClassDef):
                yield from _docstrings(statement.body, f"{prefix}{statement.name}.")
        elif (name := _assigned(before)) and _is_public(name) and (found := _text(statement)):
            yield prefix + name, found
        before = statement


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name.startswith("__")


def _assigned(statement: ast.stmt | None) -> str:
    """The name that an assignment gives a value, or a type."""
    target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
    return target.id if isinstance(target, ast.Name) else ""


def _text(statement: ast.stmt) -> str:
    """The text of a statement that is nothing but a string."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def riddles(modules: Mapping[str, str]) -> dict[str, list[str]]:
    """The docstrings that begin with a riddle, by room; ``modules``: sources by their path inside the package."""
    found: dict[str, list[str]] = {}
    for path, source in modules.items():
        for name, text in docstrings(source):
            if RIDDLES.match(text.strip()):
                found.setdefault(path.split("/")[0], []).append(f"{path} {name}: {text.strip().splitlines()[0]}")
    return found


def test_no_docstring_begins_with_a_riddle() -> None:
    folders = ("commlayer", "profiles", "scheduler", "integrations", "examples", "benchmarks", "tests")
    modules = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    assert len(modules) > 200
    assert riddles(modules) == {}, "begin with what it is or does"


def test_a_riddle_is_found() -> None:
    source = '''"""Of a module."""
LIMIT = 1
"""What there is at most."""
class Thing:
    """A thing."""
    size: int
    """By which it is measured."""
    def grow(self): "So much larger."
    def _hidden(self): "That is private."
    def offer(self): "Offer it. As what begins like a riddle."
'''
    found = riddles({"room/module.py": source, "other.py": '"""Something. Of course."""'})
    assert found == {
        "room": [
            "room/module.py : Of a module.",
            "room/module.py LIMIT: What there is at most.",
            "room/module.py Thing.size: By which it is measured.",
            "room/module.py Thing.grow: So much larger.",
        ]
    }
