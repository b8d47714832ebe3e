"""Generated parts of pages, between two marks.

The marks are `<!-- NAME -->` and `<!-- end of NAME -->`, each on its own line.
"""


def between_marks(page: str, name: str, text: str) -> str:
    """Return a page with `text` between the marks of `name`.

    The text ends its last line. Raise ValueError if the page lacks the marks.
    """
    begin = f"<!-- {name} -->\n"
    end = f"<!-- end of {name} -->"
    before, found, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise ValueError(f"the page has no lines {begin.strip()} and {end}")
    return f"{before}{begin}{text}{end}{after}"
