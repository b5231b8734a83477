"""Check the documentation site: every link and picture is there, and nothing is fetched from elsewhere.

Run as: python tools/check_site.py site

The builder checks links between Markdown pages; this looks at the pages that came out, with the reference that was made
of docstrings.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


class _Page(HTMLParser):
    """What a page links to, what it fetches, and where links can lead within it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.fetched: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        if tag in FETCHED and FETCHED[tag] in given and given.get("rel") != "canonical":
            self.fetched.add(given[FETCHED[tag]])


def faults(site: Path) -> list[str]:
    """Tell what is broken in the pages of a folder, in words."""
    pages = {file.resolve(): _Page(file) for file in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site} holds no pages"]
    for file, page in pages.items():
        if file.name == "404.html":  # its links begin at the root of a server
            continue
        name = file.relative_to(site.resolve())
        for link in sorted(page.links | page.fetched):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                found += [f"{name} fetches {link}"] if link in page.fetched and parts.scheme != "data" else []
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or not target.is_relative_to(site.resolve()):
                found.append(f"{name} links to {link}, which is not there")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name} links to {link}, but there is no such place on that page")
    return found


def main() -> int:
    """Print what is broken; the exit status is 1 if anything is."""
    if len(sys.argv) != 2:
        print("usage: python tools/check_site.py FOLDER", file=sys.stderr)
        return 2
    found = faults(Path(sys.argv[1]))
    for fault in found:
        print(fault, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
