"""mkdocs' hook (mkdocs.yml): the site has the repository's pages at their paths, and the code that docs/code.md links, so that
links hold on both.

Its navigation is docs/index.md: each heading is a section, each line a page; a folder's README.md brings the pages beside it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
INDEX = ROOT / "docs/index.md"
_SOURCE = re.compile(r"\]\(\.\./([\w/]+\.py)\)")
_ENTRY = re.compile(r"^## (?P<section>.+)$|^- \[(?P<title>[^\]]+)\]\((?P<target>[^)#]+)\)", re.MULTILINE)


def navigation() -> list[dict[str, Any]]:
    """The sections of docs/index.md with their pages, by paths from the root, as mkdocs' `nav`."""
    sections: list[dict[str, Any]] = []
    for entry in _ENTRY.finditer(INDEX.read_text()):
        if entry["section"]:
            sections.append({entry["section"]: []})
            continue
        page = (INDEX.parent / entry["target"]).resolve()
        (pages,) = sections[-1].values()
        beside = sorted(page.parent.glob("*.md")) if INDEX.parent in page.parents and page.name == "README.md" else []
        paths = [str(path.relative_to(ROOT)) for path in (page, *(path for path in beside if path != page))]
        pages.append({entry["title"]: paths if beside else paths[0]})
    sections[0] = {name: [*pages, {"All pages": "docs/index.md"}] for name, pages in sections[0].items()}
    return sections


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = navigation()
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")  # anchors as GitHub makes them
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    docs = [path for path in INDEX.parent.rglob("*") if path.is_file()]
    code = [ROOT / path for path in _SOURCE.findall((INDEX.parent / "code.md").read_text())]
    pages = (*ROOT.glob("*.md"), *(ROOT / "deploy").rglob("README.md"), ROOT / "benchmarks/README.md")
    for path in (*docs, *pages, *code):
        files.append(File(str(path.relative_to(ROOT)), str(ROOT), config.site_dir, config.use_directory_urls))
    return files
