"""Metadata of the package that depend on where the source is published.

hatchling calls this file when it builds the package. A README on a package index is not next to the
files that it links to, so its relative links must become addresses. They are known to whoever
releases the package, and set by two environment variables:

POECAPS_SOURCE_URL
    Address of the repository, such as the `server_url` and `repository` of a GitHub workflow. If it
    is not set, the README stays as it is, and the package names no address of its source.
POECAPS_SOURCE_REF
    Tag or commit to which the links lead; by default HEAD.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?!https?://|#|mailto:)([^()\s]+)\)")


class SourceMetadata(MetadataHookInterface):
    """Set the README and the addresses of the project."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme`, and add the addresses of the source to `urls`."""
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        url = os.environ.get("POECAPS_SOURCE_URL", "").rstrip("/")
        ref = os.environ.get("POECAPS_SOURCE_REF", "HEAD")
        urls = {"Paper": "https://arxiv.org/abs/1907.11643"}
        if url:
            readme = with_absolute_links(readme, url, ref)
            urls |= {
                "Source": url,
                "Documentation": f"{url}/blob/{ref}/docs/index.md",
                "Changelog": f"{url}/blob/{ref}/CHANGELOG.md",
                "Issues": f"{url}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
        metadata["urls"] = urls


def with_absolute_links(text: str, url: str, ref: str) -> str:
    """Replace relative links of Markdown by addresses in a repository, images by their files."""

    def absolute(match: re.Match[str]) -> str:
        image, label, path = match.groups()
        kind = "raw" if image else "blob"
        return f"{image}[{label}]({url}/{kind}/{ref}/{path})"

    return LINK.sub(absolute, text)
