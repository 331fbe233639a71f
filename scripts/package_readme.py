"""For hatchling: the README as a package index shows it.

There, a relative link or picture leads nowhere, and ckptlib has no public address yet that it could be led to: links
become plain text, and the picture is left out with the paragraph that explains it.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURE = re.compile(r"^!\[[^\]]*\]\([^)]*\)\n\n(?:.+\n)+\n", re.M)


def shown(text: str, linked: Any) -> str:
    """`linked`: of site_pages."""
    return str(linked(PICTURE.sub("", text), "README.md", lambda link, _: link["text"]))


class Readme(MetadataHookInterface):
    """Fills `dynamic = ["readme"]`."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        linked = runpy.run_path(str(root / "scripts" / "site_pages.py"))["linked"]
        text = shown((root / "README.md").read_text(encoding="utf-8"), linked)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
