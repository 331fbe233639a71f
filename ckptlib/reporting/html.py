"""HTML and SVG as text, of elements. What is not an element is escaped: nothing that a root says can become markup."""

from __future__ import annotations

import html

from ckptlib.words import plain


class Element(str):
    """Markup: the only text that is not escaped. Made by `tag` and `join`, and nowhere from what was read."""

    __slots__ = ()


Child = Element | str | int | float | None

_EMPTY = {"meta", "br"}


def escape(value: str | int | float) -> Element:
    """A value as text of an element or an attribute. Control characters and changes of direction show as escapes."""
    return Element(html.escape(plain(_text(value)), quote=True))


def tag(tag_name: str, *children: Child, **attributes: str | int | float | None) -> Element:
    """`tag("td", "a<b", class_="n")`: <td class="n">a&lt;b</td>. Attributes of None are left out; _ stands for -."""
    found = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag_name in _EMPTY:
        return Element(f"<{tag_name}{found}>")
    return Element(f"<{tag_name}{found}>{join(*children)}</{tag_name}>")


def join(*children: Child) -> Element:
    """One after the other; None is nothing."""
    found = (child if isinstance(child, Element) else escape(child) for child in children if child is not None)
    return Element("".join(found))


def _text(value: str | int | float) -> str:
    """Coordinates need no more than two places."""
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(value)
