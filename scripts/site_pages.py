"""Hooks of mkdocs.

README.md and some others lie beside docs/. They become pages of the site, and links follow them.
Formulas become MathML, so browsers show them without a script.
"""

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {"README.md": "index.md"} | {
    name: name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
}
"""Pages beside docs/ -> names on the site."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside of docs/."""
    for name, on_site in OUTSIDE.items():
        text = re.sub(r"\]\(docs/", "](", (ROOT / name).read_text())
        files.append(File.generated(config, on_site, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links lead to the pages of the site.

    Links to files of the program become text, because the site does not have them.
    """
    for name, on_site in OUTSIDE.items():
        markdown = re.sub(rf"\]\((?:\.\./)?{re.escape(name)}", f"]({on_site}", markdown)
    return re.sub(r"\[([^\]]*)\]\(\.\./[^)]*\)", r"\1", markdown)


INLINE_CODE = re.compile(r"<code>([^<]*)</code>")
FLAG = re.compile(r"(?<![\w-])--[\w-]+")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Replace the formulas that arithmatex marks by MathML, and let no line break split a flag."""

    def mathml(formula: re.Match[str]) -> str:
        tag, bracket, tex = formula.groups()
        display = "block" if bracket == "[" else "inline"
        return f'<{tag} class="formula">{convert(html.unescape(tex), display=display)}</{tag}>'

    def whole_flags(code: re.Match[str]) -> str:
        return FLAG.sub(r'<span class="flag">\g<0></span>', code[0])

    return INLINE_CODE.sub(whole_flags, FORMULA.sub(mathml, content))


def on_post_build(config: Any) -> None:
    """Write llms.txt: the pages of the site in a form that language models read (llmstxt.org)."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for section in config.nav:
        for heading, pages in section.items():
            lines += ["", f"## {heading}", ""]
            for title, file in (item for page in pages for item in page.items()):
                address = "./" if file == "index.md" else f"{Path(file).stem}/"
                lines.append(f"- [{title}]({address})")

    Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n")
