"""Hooks of mkdocs, which make a site of pages that are written to be read on GitHub.

README.md is the site's first page. A link from any page to a file of the repository leads to a copy of that file on the site;
one to a folder becomes its name. Comments that mark figures, which a script fills in, are left out.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
HOME, STYLE = "index.md", "site.css"
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)((?:#[^)\s]*)?)(?=\))")
_FOLDER = re.compile(r"\[([^\]]+)\]\((?!\w+:|#)([^)\s]+)\)")
_PICTURE = re.compile(r'(?<=src=")docs/|(?<=srcset=")docs/')
_MARK = re.compile(r"<!-- /?figure.*?-->", re.DOTALL)
_UNSPACED_LIST = re.compile(r"^(?![*\-|>\s]|\d+\.)(.+)\n(?=(?:[*-]|\d+\.) )", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add README, the style, and what pages link to outside of docs/."""
    files.append(File.generated(config, HOME, abs_src_path=str(ROOT / "README.md")))
    files.append(File.generated(config, STYLE, abs_src_path=str(Path(__file__).with_name(STYLE))))
    waiting = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    known = set(waiting)
    while waiting:
        page = waiting.pop()
        for link, _ in _LINK.findall(page.read_text()):
            target = Path(os.path.normpath(page.parent / link))
            if target in known or not target.is_file():
                continue
            known.add(target)
            if not target.is_relative_to(ROOT / "docs"):
                files.append(File.generated(config, str(target.relative_to(ROOT)), abs_src_path=str(target)))
            if target.suffix == ".md":
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The page with links of the site."""
    source = Path(page.file.abs_src_path)
    here = Path(page.file.src_uri).parent

    def without_folders(found: re.Match[str]) -> str:
        target = source.parent / found[2]
        if not target.is_dir():
            return found[0]
        return f"{found[1]} (`{os.path.relpath(os.path.normpath(target), ROOT)}`)"

    def moved(found: re.Match[str]) -> str:
        place = _place_of(Path(os.path.normpath(source.parent / found[1])))
        return Path(os.path.relpath(place, here)).as_posix() + found[2]

    text = _LINK.sub(moved, _FOLDER.sub(without_folders, markdown))
    return _UNSPACED_LIST.sub(r"\1\n\n", _MARK.sub("", _PICTURE.sub("", text)))


def _place_of(path: Path) -> Path:
    """Where a file of the repository is among the site's sources."""
    if path == ROOT / "README.md":
        return Path(HOME)
    inside = path.relative_to(ROOT)
    return inside.relative_to("docs") if inside.parts[0] == "docs" else inside
