"""A page of HTML as tests ask about it."""

from __future__ import annotations

from html.parser import HTMLParser

__all__ = ["HtmlPage", "NarrowTables"]


class HtmlPage(HTMLParser):
    """Tags that were never closed, all tags, ids, addresses and text of a page, in their order. An end tag of another element
    than the last that was opened fails the test."""

    VOID = frozenset({"meta", "br", "hr", "img", "link", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.text: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


CHARACTER_PX, PADDING_PX, BAR_PX = 8.0, 14.4, 50.0
"""A digit of the tables' font (0.9 of 16 px, 0.55 em), both sides of a cell, and a bar (page.css)."""
WRAPPED_PX = {"words": 144.0, "place": 128.0}
"""The least widths of cells that wrap on a narrow page, by class (page.css, waits.css)."""


class NarrowTables(HTMLParser):
    """The width of each table on a narrow page, px, by its head: as wide as its columns that do not wrap, without spare ones."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[tuple[list[str], float]] = []
        self._widths: list[float] = []
        self._head: list[str] = []
        self._place, self._cell, self._look = 0, "", ""
        self._is_in = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self._widths, self._head = [], []
        elif tag == "tr":
            self._place = 0
        elif tag in ("td", "th"):
            given = dict(attrs)
            self._look, self._cell, self._is_in = f"{given.get('class') or ''} {given.get('style') or ''}", "", True

    def handle_data(self, data: str) -> None:
        self._cell += data if self._is_in else ""

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._is_in = False
            if tag == "th":
                self._head.append(self._cell)
            self._widths += [0.0] * (self._place + 1 - len(self._widths))
            self._widths[self._place] = max(self._widths[self._place], self._width(is_head=tag == "th"))
            self._place += 1
        elif tag == "table":
            self.tables.append((self._head, sum(self._widths)))

    def _width(self, *, is_head: bool) -> float:
        first = self._look.split()[:1]
        if first == ["spare"]:
            return 0.0
        if first == ["bar"]:
            return BAR_PX
        if first and first[0] in WRAPPED_PX:
            return WRAPPED_PX[first[0]] + PADDING_PX
        longest = max((len(word) for word in self._cell.split()), default=0)
        wraps = is_head or "white-space:normal" in self._look
        return (longest if wraps else len(self._cell.strip())) * CHARACTER_PX + PADDING_PX
