"""Why: nobody reads a page that no other page links to, or a link that leads nowhere."""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from threading import Thread

import pytest
import yaml
from PIL import Image

import lightrft.strategy
from lightrft.config.extras import installed
from lightrft.config.tables import table
from scripts import configuration_page, python_stub, shelves_picture, step_picture, task_curves

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("README", "ARCHITECTURE", "CONTRIBUTING", "SECURITY", "CHANGELOG")
PAGES = [*(ROOT / f"{name}.md" for name in OUTSIDE), *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page.

    They are explicit, or made from headings as GitHub and mkdocs do.
    """
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    slugs = {
        re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading)).strip().lower().replace(" ", "-")
        for heading in headings
    }
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


def links(page: Path) -> list[str]:
    return [
        link
        for link in LINK.findall(CODE.sub("", page.read_text()))
        if not link.startswith(("http://", "https://"))
    ]


@pytest.mark.parametrize("page", sorted({*PAGES, *ROOT.glob("*.md")}), ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link} does not exist"
        assert not anchor or anchor in anchors(target), (
            f"{page.name}: {link}: {target.name} has no such heading"
        )


def test_every_page_is_reached_from_the_readme():
    reached = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            waiting += [
                (page.parent / link.partition("#")[0]).resolve()
                for link in links(page)
                if link.partition("#")[0]
            ]

    assert set(PAGES) <= reached, (
        f"no page names {sorted(page.name for page in set(PAGES) - reached)}"
    )


def test_the_site_has_every_page():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    parts = [pages for part in settings["nav"] for pages in part.values()]
    pages = {page for entries in parts for entry in entries for page in entry.values()}
    assert pages == {"index.md", *(page.name for page in PAGES if page.name != "README.md")}


def test_the_api_has_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text()
    public = {*lightrft.__all__, *lightrft.strategy.__all__} - {"__version__"}
    assert {name for name in public if not re.search(rf"\b{name}\b", text)} == set()


@pytest.mark.skipif(not installed(), reason="the picture of the packages has extras, too")
def test_files_are_what_the_scripts_write():
    assert step_picture.PICTURE.read_text() == step_picture.picture()
    assert shelves_picture.PICTURE.read_text() == shelves_picture.picture()
    text = configuration_page.PAGE.read_text()
    assert text == configuration_page.page(text)
    assert python_stub.STUB.read_text() == python_stub.stub()


def test_curves_of_the_tasks_are_those_of_their_runs():
    pictures = task_curves.pictures(json.loads(task_curves.RECORD.read_text()))
    files = {path.name: path.read_text() for path in task_curves.FOLDER.glob("*.svg")}
    assert files == pictures


def test_messages_of_the_troubleshooting_page_are_in_the_code():
    """A message that has changed has another heading."""
    source = "".join(path.read_text() for path in (ROOT / "lightrft").rglob("*.py"))
    rules = [rule for group in table("config/rules").values() for rule in group]
    messages = [rule if isinstance(rule, str) else rule["says"] for rule in rules]
    said = "\n".join([re.sub(r'"\s+f?"', "", source), *messages])
    headings = re.findall("^## (.*)$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    assert headings and [each for each in headings if each not in said] == []


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site. A link without a target fails, too."""
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})

    return folder


def test_the_site_is_built(site):
    assert "StrategyBase" in (site / "ARCHITECTURE" / "index.html").read_text()


def test_language_models_find_every_page(site):
    links = LINK.findall((site / "llms.txt").read_text())
    assert len(links) == len(PAGES) and all(
        (site / link / "index.html").is_file() for link in links
    )


def test_every_formula_of_the_site_is_mathml(site):
    """A formula that stays as TeX is not readable."""
    for page in PAGES:
        text = CODE.sub("", page.read_text())
        formulas = re.findall(r"\$\$.+?\$\$|(?<![\\$])\$[^$\n]+\$", text, flags=re.DOTALL)
        built = (site / ("" if page.name == "README.md" else page.stem) / "index.html").read_text()
        assert built.count("<math ") == len(formulas), page.name
        assert "arithmatex" not in built and "\\(" not in re.sub(
            r"<script.*?</script>", "", built, flags=re.DOTALL
        )


def test_a_page_loads_nothing_from_another_host(site):
    loads = re.compile(r'<(?:script|img|iframe|link)\b[^>]*(?:src|href)="?(https?:)?//')
    for page in site.rglob("*.html"):
        assert loads.findall(re.sub(r'<link rel="?canonical[^>]*>', "", page.read_text())) == [], (
            page
        )
    for style in site.rglob("*.css"):
        assert not re.search(r"@import|url\(.?https?:", style.read_text()), style


BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)

MEASURE = """
const found = {};
const look = async (page, width) => {
    const frame = document.createElement("iframe");
    frame.style.cssText = `width: ${width}px; height: 900px; border: 0`;
    frame.src = page;
    document.body.append(frame);
    await new Promise(loaded => frame.onload = loaded);
    const inside = frame.contentDocument, root = inside.documentElement;
    const cut = [...inside.querySelectorAll("article pre > code, article table, article div.formula")].filter(each => {
        const scrolls = [each, each.parentElement].some(
            box => ["auto", "scroll"].includes(frame.contentWindow.getComputedStyle(box).overflowX));
        return each.scrollWidth > each.clientWidth + 1 && !scrolls;
    });
    const flat = [...inside.querySelectorAll("math")].filter(each => each.getBoundingClientRect().height < 5);
    found[`${page} at ${width}`] = [root.scrollWidth - root.clientWidth, cut.length, flat.length];
    frame.remove();
};
const all = async () => {
    for (const page of PAGES) for (const width of [1300, 420]) await look(page, width);
    await fetch("/found", {method: "POST", body: JSON.stringify(found)});
};
all();
"""
"""Load each page at the width of a screen and of a telephone.

It reports pixels beyond the page, cut parts, and invisible formulas.
"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser on this machine")
def test_a_browser_shows_the_whole_site(site, tmp_path):
    """No page is wider than the window, what is wider scrolls by itself, and formulas have a
    height.

    It takes a screenshot.
    """
    pages = [
        f"/{path.parent.relative_to(site)}/".replace("/./", "/")
        for path in sorted(site.rglob("index.html"))
    ]
    (site / "measure.html").write_text(
        f"<body><script>const PAGES = {json.dumps(pages)};{MEASURE}</script>"
    )

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Site, directory=str(site))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        common = [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path}/browser",
        ]
        picture = [
            *common,
            "--window-size=1300,1600",
            f"--screenshot={tmp_path}/page.png",
            f"{address}/algorithms/",
        ]
        subprocess.run(picture, capture_output=True, timeout=200, check=True)

        port = [*common, "--remote-debugging-port=0", f"{address}/measure.html"]
        with subprocess.Popen(
            port, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as browser:
            try:
                found = Site.found.get(timeout=300)
            finally:
                browser.terminate()

        server.shutdown()

    assert len(found) == 2 * len(pages)
    assert {page: numbers for page, numbers in found.items() if numbers != [0, 0, 0]} == {}
    with Image.open(tmp_path / "page.png") as image:
        assert image.width == 1300 and len(image.convert("RGB").getcolors(1 << 20)) > 100


class Site(SimpleHTTPRequestHandler):
    """The pages, and the place where the browser puts its measurements."""

    found: Queue = Queue()

    def do_POST(self):
        self.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass
