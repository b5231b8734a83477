"""Check the built documentation site: no broken links or images, no external resources.

Usage: python tools/check_site.py site

The site builder checks links between Markdown pages. This script checks the generated HTML,
including the reference pages made from docstrings.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {  # tags and their attributes whose URLs a browser loads automatically
    "script": ("src",),
    "img": ("src",),
    "iframe": ("src",),
    "embed": ("src",),
    "input": ("src",),
    "source": ("src",),
    "audio": ("src",),
    "track": ("src",),
    "video": ("src", "poster"),
    "object": ("data",),
    "image": ("href", "xlink:href"),
    "use": ("href", "xlink:href"),
    "link": ("href",),
    "base": ("href",),
}
SOURCE_SETS = ("srcset", "imagesrcset")  # attributes with several URLs
# One candidate of a source set: a URL, then an optional descriptor.
CANDIDATE = re.compile(r"[\s,]*(\S+?)(?:,(?=\s|$)|\s[^,]*(?:,|$)|$)")
COMMENT = re.compile(r"/\*.*?\*/", re.S)
IN_STYLES = re.compile(
    r"""url\(\s*(?:"([^"]*)"|'([^']*)'|([^)"'\s]*))\s*\)|@import\s*(?:"([^"]*)"|'([^']*)')""", re.I
)


def fetched_by(styles: str) -> set[str]:
    """Return the URLs that a style sheet loads."""
    found = {"".join(groups) for groups in IN_STYLES.findall(COMMENT.sub(" ", styles))}
    return {url for url in found if url and not url.startswith("#")}


class _Page(HTMLParser):
    """The links, loaded resources and anchors of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.fetched: set[str] = set()
        self.anchors: set[str] = set()
        self.in_styles = False
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.in_styles = tag == "style"
        given = {name: value for name, value in attrs if value}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        if given.get("rel") != "canonical":
            self.fetched |= {given[name] for name in FETCHED.get(tag, ()) if name in given}
        for name in SOURCE_SETS:
            self.fetched |= set(CANDIDATE.findall(given.get(name, "")))
        self.fetched |= fetched_by(given.get("style", ""))

    def handle_endtag(self, tag: str) -> None:
        self.in_styles = self.in_styles and tag != "style"

    def handle_data(self, data: str) -> None:
        if self.in_styles:
            self.fetched |= fetched_by(data)


def faults(site: Path) -> list[str]:
    """Return a message for every broken link in the pages and style sheets of a folder."""
    pages = {file.resolve(): _Page(file) for file in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site} contains no pages"]
    anchors = {file: page.anchors for file, page in pages.items()}
    for file, page in pages.items():
        found += _faults_of(file, page.links, page.fetched, site.resolve(), anchors)
    for file in sorted(site.resolve().rglob("*.css")):
        found += _faults_of(
            file, set(), fetched_by(file.read_text(encoding="utf-8")), site.resolve(), anchors
        )
    return found


def _faults_of(
    file: Path, links: set[str], fetched: set[str], site: Path, anchors: dict[Path, set[str]]
) -> list[str]:
    found, name = [], file.relative_to(site)
    for link in sorted(links | fetched):
        if link.startswith("data:"):
            continue
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            found += [f"{name} fetches {link}"] if link in fetched else []
            continue
        path = unquote(parts.path)
        # The page 404.html is served at any URL, so its links start at the server's root.
        if file.name == "404.html" and path.startswith("/"):
            target = (site / path.lstrip("/")).resolve()
        else:
            target = (file.parent / path).resolve() if path else file
        target = target / "index.html" if target.is_dir() else target
        if not target.is_file() or not target.is_relative_to(site):
            found.append(f"{name} links to {link}, which does not exist")
        elif (
            parts.fragment and target in anchors and unquote(parts.fragment) not in anchors[target]
        ):
            found.append(f"{name} links to {link}, but that page has no such anchor")
    return found


def main() -> int:
    """Print all faults; the exit status is 1 if there are any."""
    if len(sys.argv) != 2:
        print("usage: python tools/check_site.py FOLDER", file=sys.stderr)
        return 2
    found = faults(Path(sys.argv[1]))
    for fault in found:
        print(fault, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
