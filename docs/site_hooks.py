"""Hooks of the site's builder: files outside `docs/` that a page links to become part of the site, below `repository/`.

So the same links work in the repository and in the site, and the builder finds each one that is broken.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^( *)```.*?^\1```[ ]*$", re.M | re.S)
LINK = re.compile(r"\]\((?![a-z]+:|#)(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")


def slug(title: str, separator: str) -> str:
    """The anchor of a heading, as GitHub and `tests/test_docs.py` make it."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", separator)


def on_config(config: Any) -> None:
    config.mdx_configs["toc"]["slugify"] = slug
    listed = set(re.findall(r"[\w/-]+\.md", str(config.nav)))
    for kind in (pages for part in config.nav if isinstance(part, dict) for pages in part.values()):
        folder = PurePosixPath(kind[0]).parent  # a page that the contents leave out stands at the end of its kind
        new = {f"{folder}/{page.name}" for page in Path(config.docs_dir, folder).glob("*.md")} - listed
        kind.extend(sorted(new))


def on_files(files: Files, config: Any) -> None:
    """Add what pages outside of `docs/` are linked to, and what those link to."""
    unread = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    known = set(unread)
    while unread:
        page = unread.pop()
        for match in LINK.finditer(FENCE.sub("", (ROOT / page).read_text())):
            target = linked(page, match["path"])
            if target in known or target.startswith("docs/") or not (ROOT / target).is_file():
                continue
            known.add(target)
            files.append(
                File.generated(
                    config,
                    in_site(target),
                    abs_src_path=str(ROOT / target),
                    inclusion=InclusionLevel.NOT_IN_NAV,
                )
            )
            if target.endswith(".md"):
                unread.append(target)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at the places that files have in the site."""
    here = page.file.src_uri
    source = here.removeprefix("repository/") if here.startswith("repository/") else f"docs/{here}"

    def moved(match: re.Match[str]) -> str:
        place = os.path.relpath(in_site(linked(source, match["path"])), PurePosixPath(here).parent)
        return f"]({place}{match['anchor'] or ''})"

    return LINK.sub(moved, markdown)


def linked(page: str, link: str) -> str:
    """The file of the repository that a page links to; a folder's is its README."""
    path = os.path.normpath(PurePosixPath(page).parent / link)
    return f"{path}/README.md" if (ROOT / path / "README.md").is_file() else path


def in_site(path: str) -> str:
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"
