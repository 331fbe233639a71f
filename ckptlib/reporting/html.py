"""Builds HTML and SVG from elements. All other text is escaped, so nothing read from a root can become markup."""

from __future__ import annotations

import html

from ckptlib.words import plain


class Element(str):
    """Markup: the only text that is not escaped. `tag` and `join` make it; it is never made from text that was read."""

    __slots__ = ()


Child = Element | str | int | float | None

_EMPTY = {"meta", "br"}


def escape(value: str | int | float) -> Element:
    """Returns a value as text of an element or an attribute. Control and bidirectional characters become escapes."""
    return Element(html.escape(plain(_text(value)), quote=True))


def tag(tag_name: str, *children: Child, **attributes: str | int | float | None) -> Element:
    """Makes an element: `tag("td", "a<b", class_="n")` is <td class="n">a&lt;b</td>. Attributes of None are left out; _
    stands for -."""
    found = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag_name in _EMPTY:
        return Element(f"<{tag_name}{found}>")
    return Element(f"<{tag_name}{found}>{join(*children)}</{tag_name}>")


def join(*children: Child) -> Element:
    """Joins children, one after the other; None is left out."""
    found = (child if isinstance(child, Element) else escape(child) for child in children if child is not None)
    return Element("".join(found))


def _text(value: str | int | float) -> str:
    """Returns a value as text, floats with two decimals: coordinates need no more."""
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(value)
