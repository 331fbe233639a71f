"""For hatchling: the README as a package index shows it, and the addresses beside it.

Relative links lead nowhere there. `CKPTLIB_REPOSITORY`, such as https://github.com/OWNER/ckptlib, says where a release
is published: links then lead to the files of its tag, and `project.urls` to its pages. Without it, links become plain
text, the picture is left out with the paragraph that explains it, and there are no addresses: none is made up.
"""

from __future__ import annotations

import os
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURE = re.compile(r"^!\[[^\]]*\]\([^)]*\)\n\n(?:.+\n)+\n", re.M)
IMAGE = re.compile(r"(!\[[^\]]*\]\()(?![a-z]+:)([^)]*\))")

Link = Callable[[re.Match[str], str], str]
"""From a link, and its target from the top of the repository, to what stands in its place."""


def shown(text: str, linked: Callable[[str, str, Link], str], repository: str, tag: str) -> str:
    """`linked`: of site_pages. `repository`: its address; empty where it has none."""
    if not repository:
        return linked(PICTURE.sub("", text), "README.md", lambda link, _: link["text"])
    text = IMAGE.sub(rf"\1{repository}/raw/{tag}/\2", text)
    address = f"{repository}/blob/{tag}"
    return linked(text, "README.md", lambda link, to: f"[{link['text']}]({address}/{to}{link['anchor'] or ''})")


def addresses(repository: str, tag: str) -> dict[str, str]:
    """For `project.urls`, by the labels that indexes know."""
    if not repository:
        return {}
    return {
        "Homepage": repository,
        "Documentation": f"{repository}/tree/{tag}/docs",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


class Readme(MetadataHookInterface):
    """Fills `dynamic = ["readme", "urls"]`."""

    def update(self, metadata: dict[str, Any]) -> None:
        root, repository = Path(self.root), os.environ.get("CKPTLIB_REPOSITORY", "").rstrip("/")
        if repository and not repository.startswith("https://"):
            raise ValueError(f"CKPTLIB_REPOSITORY={repository!r}: expected an address that begins with https://")
        linked = runpy.run_path(str(root / "scripts" / "site_pages.py"))["linked"]
        tag = f"v{metadata['version']}"
        text = shown((root / "README.md").read_text(encoding="utf-8"), linked, repository, tag)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = addresses(repository, tag)
