"""The page of a report, read by Python's own parser of HTML."""

from __future__ import annotations

import re
from html.parser import HTMLParser

EMPTY = {"meta"}
KNOWN = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "main",
        "header",
        "section",
        "div",
        "h1",
        "h2",
        "p",
        "span",
        "b",
    ),
    *("ul", "li", "i", "table", "tr", "th", "td", "details", "summary"),
    *("svg", "g", "rect", "line", "text", "circle", "polyline", "path"),
}
"""The elements that a page has."""

ATTRIBUTES = {
    *("class", "lang", "charset", "name", "content", "http-equiv", "viewbox", "role", "aria-label", "text-anchor"),
    *("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "rx", "width", "height", "points", "d"),
}
"""None of which loads or runs anything."""


class Page(HTMLParser):
    """Its elements and texts. Raises AssertionError where elements are not nested."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.titles: list[str] = []
        """What marks of charts say."""
        self.tables: list[list[list[str]]] = []
        """Their rows."""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(name)
        self.attributes += [(key, value or "") for key, value in attributes]
        if name not in EMPTY:
            self._open.append(name)
        if name == "table":
            self.tables.append([])
        if name == "tr":
            self.tables[-1].append([])
        if name in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, name: str) -> None:
        assert self._open.pop() == name

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "style":
            return
        self.texts.append(data)
        if self._open[-2:] in (["g", "title"], ["rect", "title"], ["circle", "title"], ["path", "title"]):
            self.titles.append(data)
        if {"td", "th"} & {*self._open}:
            self.tables[-1][-1][-1] += data

    @property
    def rows(self) -> list[list[str]]:
        """Of all tables."""
        return [row for table in self.tables for row in table]

    def table(self, *header: str) -> list[list[str]]:
        """The rows of the one table whose header begins so."""
        (found,) = (table for table in self.tables if tuple(table[0][: len(header)]) == header)
        return found[1:]

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def check_harmless(text: str) -> Page:
    """Nothing is loaded or run by it, and no place on a chart is no number."""
    page = Page(text)
    assert {*page.tags} <= KNOWN
    assert {key for key, _ in page.attributes} <= ATTRIBUTES
    assert not re.search(r"url\(|@import|javascript:", text.partition("</style>")[0])
    places = {"x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "width", "height", "points", "d"}
    for key, value in page.attributes:
        if key in places:
            assert not re.search("nan|inf", value, re.IGNORECASE), (key, value)
    assert page.tags.count("html") == page.tags.count("body") == page.tags.count("style") == 1
    return page
