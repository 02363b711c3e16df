"""make_site.py: the project's site, from README.md, docs/ and the docstrings, into build/site. A broken link is an error.

Pages stay as they stand on a code host: they link to README.md and to source files. The site's builder knows only what is below
its folder of pages, so all that is linked to is copied into one.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "mkdocs.yml"
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def main() -> int:
    pages = ROOT / "build" / "site-pages"
    shutil.rmtree(pages, ignore_errors=True)
    for page in documents():
        stage(page, pages)
    for place in listed():
        if place.startswith("reference/"):
            module = Path(place).stem
            (pages / place).parent.mkdir(exist_ok=True)
            (pages / place).write_text(f"# {module}\n\n::: {module}\n", encoding="utf-8")
    return subprocess.run(
        [Path(sys.executable).with_name("zensical"), "build", "--clean", "--strict"], cwd=ROOT, check=False
    ).returncode


def documents() -> list[Path]:
    """Every page that a reader may be sent to."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").rglob("*.md")])


def listed() -> list[str]:
    """The pages of the site's navigation."""
    return re.findall(r"- .*: (\S+\.md)$", CONFIG.read_text(encoding="utf-8"), re.MULTILINE)


def stage(page: Path, pages: Path) -> None:
    """Copy a page, with the files that it links to. A link to a folder becomes its words: a site lists no folders."""

    def linked(match: re.Match) -> str:
        target = (page.parent / match[2]).resolve()
        if target.is_dir():
            return match[1]
        if target.suffix != ".md" and target.is_file() and target.is_relative_to(ROOT):
            place(target).write_bytes(target.read_bytes())
        return match[0]

    def place(file: Path) -> Path:
        found = pages / file.relative_to(ROOT)
        found.parent.mkdir(parents=True, exist_ok=True)
        return found

    place(page).write_text(LINK.sub(linked, page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
