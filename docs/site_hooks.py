"""Hooks of the documentation site: pages may link to files outside ``docs/``, as they do on the repository's web page.

MkDocs knows files under ``docs/`` only. Each file outside that a page links to is put on the site under its path in the
repository (a Markdown file as a page, whose own links are followed too), and the links are written anew for where pages stand
there. What a link does not find stays as it is, so that the strict build refuses it.

Lists inside lists may be indented by two spaces, as on the web page; Python-Markdown wants four.
"""

from __future__ import annotations

import ast
import logging
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.site")
_PUBLIC = {
    "commlayer": "commlayer",
    "integrations": "commlayer.integrations",
    "scheduler": "commlayer.scheduler",
    "profiles": "commlayer.profiles",
}
"""The packages whose public names have a reference page, by the page."""
_LINK = re.compile(r"(?<=\]\()(?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?(?=\))")
_BY_TWO = re.compile(r"^  - ", re.MULTILINE)
_NESTED = re.compile(r"^(  +)(?=- )", re.MULTILINE)
_FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside ``docs/`` that pages link to, and the pages that the navigation names."""
    root = Path(config.config_file_path).parent
    waiting = [*_named(config.nav), *(file.src_uri for file in files.documentation_pages())]
    while waiting:
        source = waiting.pop()
        if files.get_file_from_path(source) is None:
            outside = root / source
            if not outside.is_file():
                continue  # the strict build says what is missing, and who links to it
            files.append(File.generated(config, source, abs_src_path=str(outside)))
        if source.endswith(".md"):
            text = (root / _in_repository(source, files)).read_text(encoding="utf-8")
            targets = [_target(source, link["path"], files) for link in _LINK.finditer(_FENCED.sub("", text))]
            waiting += [target for target in targets if files.get_file_from_path(target) is None]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links of the repository into links of the site."""
    source = page.file.src_uri

    def on_site(link: re.Match[str]) -> str:
        path = posixpath.relpath(_target(source, link["path"], files), posixpath.dirname(source) or ".")
        return path + (link["anchor"] or "")

    markdown = _outside_code(markdown, lambda text: _LINK.sub(on_site, text))
    if _BY_TWO.search(markdown):
        markdown = _outside_code(markdown, lambda text: _NESTED.sub(r"\1\1", text))
    return markdown


def _named(nav: object) -> list[str]:
    """The files that a navigation names, in order."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else []
    return [file for entry in entries for file in _named(entry)]


def _in_repository(source: str, files: Files) -> str:
    """Where a file of the site stands in the repository."""
    file = files.get_file_from_path(source)
    return source if file is None or file.generated_by else f"docs/{source}"


def _target(source: str, link: str, files: Files) -> str:
    """The file of the site that ``link`` on the page ``source`` means in the repository."""
    folder = posixpath.dirname(_in_repository(source, files))
    path = posixpath.normpath(posixpath.join(folder, link))
    return path.removeprefix("docs/")


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """Change what stands outside fenced code."""
    parts, end = [], 0
    for block in _FENCED.finditer(markdown):
        parts += [change(markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(markdown[end:])])


def on_post_build(config: MkDocsConfig) -> None:
    """Warn, which a strict build refuses, of each public name that its reference page does not have."""
    for page, package in _PUBLIC.items():
        built = (Path(config.site_dir) / f"reference/{page}.html").read_text(encoding="utf-8")
        source = Path(config.config_file_path).parent / package.replace(".", "/") / "__init__.py"
        for name in _exported(source.read_text(encoding="utf-8")):
            if not (name.startswith("__") or re.search(rf'id="{package}[\w.]*\.{name}"', built)):
                log.warning("reference/%s.md has nothing about %s.%s, which is public", page, package, name)


def _exported(source: str) -> list[str]:
    """The names in a module's ``__all__``."""
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(statement.value)
            return names
    return []
