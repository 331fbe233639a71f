"""Markup of any text, read back by Python's own parser of HTML."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.reporting.html import Element, escape, join, tag


class Read(HTMLParser):
    """What a page consists of."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.text += data


def shown(text: str) -> str:
    """As it is, but for what does not print."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


@given(
    st.text()
    | st.sampled_from(["<script>x</script>", '"><img src=x onerror=y>', "&lt;", "</td>", "' onload='", "\0\x1b[2J"])
)
def test_text_stays_text(text: str) -> None:
    read = Read(tag("p", text, title=text))
    assert read.tags == [("p", {"title": shown(text)})]
    assert read.text == shown(text)


@given(st.text(st.characters(categories=["Cs", "Cc", "Cf"])))
def test_what_does_not_print_can_be_written(text: str) -> None:
    escape(text).encode("utf-8")
    assert escape(text).isprintable()


def test_elements_are_nested_and_not_escaped() -> None:
    assert tag("tr", tag("td", 1), tag("td", 2.5), None) == "<tr><td>1</td><td>2.5</td></tr>"
    assert join(tag("b", "x"), "<") == "<b>x</b>&lt;"


def test_text_that_was_made_of_an_element_is_escaped() -> None:
    """Only `tag` and `join` make elements: what else happens to one is on the safe side."""
    assert tag("p", tag("b", "x").upper()) == "<p>&lt;B&gt;X&lt;/B&gt;</p>"
    assert tag("p", title=tag("b", '"')) == '<p title="&lt;b&gt;&amp;quot;&lt;/b&gt;"></p>'
    assert isinstance(tag("p"), Element)


@pytest.mark.parametrize(
    ("number", "text"), [(1.0, "1"), (0.126, "0.13"), (1234.5, "1234.5"), (-0.001, "-0"), (7, "7")]
)
def test_numbers(number: float, text: str) -> None:
    assert tag("a", x=number) == f'<a x="{text}"></a>'


def test_names_of_attributes() -> None:
    assert tag("meta", http_equiv="a", class_="b", d=None) == '<meta http-equiv="a" class="b">'
