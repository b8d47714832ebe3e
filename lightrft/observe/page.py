"""The frame of the HTML report: one self-contained file, light or dark, for any screen."""

import base64
import hashlib
import re
from html import escape
from typing import Any

from lightrft.observe.text import visible

LONGEST_TEXT = 4000
LONGEST_PICTURE = 60_000
PICTURE = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/]+=*")
SOUND = re.compile(r"data:audio/wav;base64,[A-Za-z0-9+/]+=*")
LONGEST_SOUND = 100_000
"""Characters of the longest sound that is played."""

STYLE = """
:root { color-scheme: light dark; --mono: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  --page: #f6f7f9; --card: #ffffff; --ink: #171b22; --soft: #5d6673; --line: #e3e6eb; --accent: #2f6fde;
  --good: #1c9a62; --bad: #d64550; --chip: #edf0f4;
  --s0: #2f6fde; --s1: #e07b21; --s2: #1c9a8a; --s3: #b7479b; --s4: #8a63d2; --s5: #c7a20a; --s6: #d64550; --s7: #8b94a1; }
@media (prefers-color-scheme: dark) { :root {
  --page: #0f1218; --card: #181c24; --ink: #e8ebf0; --soft: #9aa4b2; --line: #2a303b; --accent: #76a5ff;
  --good: #45c98c; --bad: #ff7a80; --chip: #252b36;
  --s0: #6c9fff; --s1: #f09a4a; --s2: #3ec6b4; --s3: #e07cc6; --s4: #b195f5; --s5: #e3c53d; --s6: #ff7a80; --s7: #7d8795; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 32px 20px 56px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0; letter-spacing: -0.02em; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 40px 0 12px; letter-spacing: -0.01em; }
.lead { color: var(--soft); margin: 6px 0 0; }
.facts { display: flex; flex-wrap: wrap; gap: 6px; margin: 14px 0 0; padding: 0; list-style: none; }
.facts li, .chip { background: var(--chip); border-radius: 999px; padding: 2px 11px; font-size: 13px; overflow-wrap: anywhere; }
.facts span { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(190px, 1fr)); gap: 12px; margin-top: 24px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 14px 16px; min-width: 0; }
.tile .label { color: var(--soft); font-size: 13px; }
.tile .value { font-size: 25px; line-height: 1.25; font-weight: 640; letter-spacing: -0.02em; overflow-wrap: anywhere; }
.tile .note { color: var(--soft); font-size: 12.5px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); gap: 12px; }
.chart header { display: flex; justify-content: space-between; align-items: baseline; gap: 12px; margin-bottom: 6px; }
.chart h3 { font-size: 14.5px; margin: 0; font-weight: 620; }
.chart h3 span { color: var(--soft); font-weight: 400; font-size: 13px; margin-left: 5px; }
.chart .last { font-weight: 620; font-variant-numeric: tabular-nums; white-space: nowrap; }
.legend { display: flex; flex-wrap: wrap; gap: 3px 16px; margin: 6px 0 0; font-size: 13px; color: var(--soft); }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; background: currentColor; }
.warn { color: var(--bad); font-size: 13px; margin: 6px 0 0; }
.plot { position: relative; }
.plot svg { display: block; width: 100%; height: auto; overflow: visible; touch-action: pan-y; }
.split { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 12px; }
.phases { display: grid; grid-template-columns: auto 1fr auto auto; gap: 9px 14px; align-items: center; font-size: 14px; }
.phases .bar { height: 10px; border-radius: 5px; background: var(--chip); }
.phases .bar i { display: block; height: 100%; border-radius: 5px; background: currentColor; min-width: 3px; }
.phases .number { text-align: right; font-variant-numeric: tabular-nums; }
.phases .share { text-align: right; color: var(--soft); font-variant-numeric: tabular-nums; }
.tick { font-size: 11px; fill: var(--soft); font-variant-numeric: tabular-nums; }
.grid { stroke: var(--line); stroke-width: 1; fill: none; }
.axis { stroke: var(--soft); stroke-width: 1; fill: none; opacity: 0.55; }
.raw { fill: none; stroke-width: 1; opacity: 0.32; stroke-linejoin: round; stroke-linecap: round; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.cursor line { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 3 3; }
.cursor circle { stroke: var(--card); stroke-width: 1.5; }
.tip { position: absolute; top: 4px; display: none; pointer-events: none; background: var(--ink); color: var(--card);
  border-radius: 7px; padding: 5px 9px; font-size: 12px; line-height: 1.45; white-space: pre; z-index: 2; }
table { width: 100%; border-collapse: collapse; font-size: 14px; }
.samples { padding: 4px 16px; }
th { text-align: left; font-weight: 500; color: var(--soft); font-size: 13px; padding: 10px 12px 6px 0; }
td { border-top: 1px solid var(--line); padding: 9px 12px 9px 0; vertical-align: top; }
tr.more td { border-top-style: dashed; } tr.more td:nth-child(-n+2) { border-top: 0; }
tbody.group th { padding-top: 18px; color: var(--ink); font-weight: 620; font-size: 14px; }
.text { font: 13px/1.5 var(--mono); white-space: pre-wrap; overflow-wrap: anywhere; max-height: 15em; overflow-y: auto; }
td.narrow { white-space: nowrap; font-variant-numeric: tabular-nums; }
.reward { display: inline-block; min-width: 52px; text-align: center; border-radius: 999px; padding: 1px 9px;
  font-weight: 620; font-size: 13px;
  --hue: color-mix(in oklab, var(--good) calc(var(--share) * 100%), var(--bad));
  color: var(--hue); background: color-mix(in oklab, var(--hue) 15%, transparent); }
.thumbnails { display: flex; flex-wrap: wrap; gap: 6px; margin-top: 6px; }
.thumbnails img { max-width: 160px; max-height: 160px; border-radius: 6px; border: 1px solid var(--line); }
.small { color: var(--soft); font-size: 12.5px; margin-top: 3px; }
details { margin-top: 12px; } summary { cursor: pointer; font-weight: 560; } details .charts { margin-top: 14px; }
pre { font: 13px/1.55 var(--mono); overflow-x: auto; margin: 12px 0 0; }
footer { color: var(--soft); font-size: 13px; margin-top: 32px; }
@media (max-width: 640px) {
  main { padding: 22px 14px 40px; } h1 { font-size: 24px; }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 10px; }
  .tile { padding: 11px 13px; } .tile .value { font-size: 21px; }
  .samples thead { display: none; } .samples tr { display: block; border-top: 1px solid var(--line); padding: 9px 0; }
  .samples tbody.group tr:first-child { border: 0; padding-bottom: 0; }
  .samples tr.more td:nth-child(-n+2) { display: none; }
  .samples td { display: flex; gap: 10px; border: 0; padding: 3px 0; } .samples td > div { min-width: 0; }
  .samples td::before { content: attr(data-label); flex: 0 0 70px; color: var(--soft); font-size: 13px; }
}
"""

SCRIPT = """
const SVG = 'http://www.w3.org/2000/svg';
function shape(parent, name, attributes) {
  const node = document.createElementNS(SVG, name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  parent.append(node);
}
for (const plot of document.querySelectorAll('.plot')) {
  const points = JSON.parse(plot.dataset.hover);
  const svg = plot.querySelector('svg'), cursor = plot.querySelector('.cursor'), tip = plot.querySelector('.tip');
  function hide() { cursor.replaceChildren(); tip.style.display = 'none'; }
  function show(event) {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const [x, dots, lines] = points.reduce((best, point) => Math.abs(point[0] - at.x) < Math.abs(best[0] - at.x) ? point : best);
    cursor.replaceChildren();
    shape(cursor, 'line', {x1: x, x2: x, y1: 10, y2: 174});
    dots.forEach((y, index) => { if (y !== null) shape(cursor, 'circle', {cx: x, cy: y, r: 4, class: 'f' + index}); });
    tip.textContent = lines.join('\\n');
    tip.style.display = 'block';
    const place = new DOMPoint(x, 0).matrixTransform(svg.getScreenCTM()).x - plot.getBoundingClientRect().left;
    const left = place + 12 + tip.offsetWidth > plot.clientWidth ? place - 12 - tip.offsetWidth : place + 12;
    tip.style.left = Math.max(0, left) + 'px';
  }
  if (points.length) { svg.addEventListener('pointermove', show); svg.addEventListener('pointerdown', show); }
  plot.addEventListener('pointerleave', hide);
}
"""


def page(title: str, body: str) -> str:
    """Return the whole document. `body` is markup whose texts are already escaped.

    The content security policy in the head allows this one script, identified by a hash, and loads
    nothing, because images are inside the page. A text that somebody forgot to escape could
    therefore still not run.
    """
    colors = (
        f".c{i} {{ stroke: var(--s{i}); }} .f{i} {{ fill: var(--s{i}); color: var(--s{i}); }}\n"
        for i in range(8)
    )
    style = STYLE + "".join(colors)
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = (
        "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; script-src"
        f" 'sha256-{digest}'"
    )

    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n"
        f"<body><main>{body}</main><script>{SCRIPT}</script></body></html>\n"
    )


def picture(uri: Any, name: str) -> str:
    """Return an image as markup; nothing unless it is a small JPEG inside a data URI."""
    if not isinstance(uri, str) or len(uri) > LONGEST_PICTURE or not PICTURE.fullmatch(uri):
        return ""
    return f'<img src="{uri}" alt="{safe(name)}" title="{safe(name)}">'


def player(uri: Any) -> str:
    """Return a sound as markup; nothing unless it is a small .wav file inside a data URI."""
    if not isinstance(uri, str) or len(uri) > LONGEST_SOUND or not SOUND.fullmatch(uri):
        return ""
    return f'<audio controls src="{uri}"></audio>'


def safe(value: Any, longest: int | None = LONGEST_TEXT) -> str:
    """Return any text as markup: escaped, with visible control characters, and not too long."""
    text = visible(str(value))
    hidden = len(text) - (longest or len(text))
    excerpt = f"{text[:longest]} … ({hidden:,} more characters)" if hidden > 0 else text
    return escape(excerpt)
