"""For mkdocs: takes documents from outside of docs/ into the site, and leads links there.

In the repository, links are relative to where a file lies. On the site, the pages of docs/ lie at the top, README.md is
the first page, and everything else has the path that it has in the repository. Files that documents link to are there
as they are; a link to a directory becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("*.md", "docs/*.md", "benchmarks/*.md")
CODE = re.compile(r"^```.*?^```$|^    .*?$", re.M | re.S)
LINK = re.compile(r"\[(?P<text>(?:`[^`]*`|[^\[\]])*)\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")


def place_of(path: str) -> str:
    """Where a file of the repository lies on the site; both from the top."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def path_of(place: str) -> str:
    """The other way."""
    if place == "index.md":
        return "README.md"
    return f"docs/{place}" if (ROOT / "docs" / place).exists() else place


def linked(text: str, path: str, put: Callable[[re.Match[str], str], str]) -> str:
    """The text of a file of the repository, where `put` gives what stands in place of each link; it is told its target,
    from the top of the repository."""
    here = posixpath.dirname(path)

    def replaced(link: re.Match[str]) -> str:
        if re.match(r"[a-z]+:", link["target"]):
            return link[0]
        return put(link, posixpath.normpath(posixpath.join(here, link["target"])))

    parts, done = [], 0
    for code in CODE.finditer(text):
        parts += [LINK.sub(replaced, text[done : code.start()]), code[0]]
        done = code.end()
    return "".join([*parts, LINK.sub(replaced, text[done:])])


def relinked(text: str, path: str) -> str:
    """The text as its page on the site has it."""
    there = posixpath.dirname(place_of(path)) or "."

    def put(link: re.Match[str], target: str) -> str:
        if (ROOT / target).is_dir():
            return link["text"]
        return f"[{link['text']}]({posixpath.relpath(place_of(target), there)}{link['anchor'] or ''})"

    return linked(text, path, put)


def needed() -> set[str]:
    """Paths of all documents, and of the files that they link to."""
    found = {path.relative_to(ROOT).as_posix() for pattern in DOCUMENTS for path in ROOT.glob(pattern)}

    def note(link: re.Match[str], target: str) -> str:
        targets.add(target)
        return link[0]

    targets: set[str] = set()
    for path in found:
        linked((ROOT / path).read_text(encoding="utf-8"), path, note)
    return found | {target for target in targets if not target.startswith("..") and (ROOT / target).is_file()}


def on_files(files: Any, config: Any) -> Any:
    """mkdocs calls it with the files of docs/."""
    from mkdocs.structure.files import File

    for path in sorted(needed()):
        if path.partition("/")[0] != "docs":
            files.append(File.generated(config, place_of(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """mkdocs calls it with the text of each page."""
    return relinked(markdown, path_of(page.file.src_uri))
