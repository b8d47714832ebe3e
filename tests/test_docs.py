"""Why: a link that leads nowhere, or a page that no other page names, is a page that nobody reads."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: those of its headings, as GitHub and mkdocs write them, and explicit ones."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading)).strip().lower().replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


def links(page: Path) -> list[str]:
    return [link for link in LINK.findall(CODE.sub("", page.read_text())) if not link.startswith(("http://", "https://"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link} does not exist"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}: {target.name} has no such heading"


def test_every_page_is_reached_from_the_readme():
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            waiting += [(page.parent / link.partition("#")[0]).resolve() for link in links(page) if link.partition("#")[0]]
    assert set(PAGES) <= reached, f"no page names {sorted(page.name for page in set(PAGES) - reached)}"


def test_the_site_has_every_page():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    pages = {page for entry in settings["nav"] for page in entry.values()}
    assert pages == {"index.md", *(page.name for page in PAGES if page.name != "README.md")}


def test_the_site_is_built(tmp_path):
    """A link without a target fails, too."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    assert "StrategyBase" in (tmp_path / "ARCHITECTURE" / "index.html").read_text()
