"""Generated parts of pages, which stand between two marks: `<!-- NAME -->` and `<!-- end of NAME
-->`, each on its own line.
"""


def between_marks(page: str, name: str, text: str) -> str:
    """Return a page with `text`, which ends its last line, between the marks of `name`.

    Raise ValueError if it lacks them.
    """
    begin = f"<!-- {name} -->\n"
    end = f"<!-- end of {name} -->"
    before, found, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise ValueError(f"the page has no lines {begin.strip()} and {end}")
    return f"{before}{begin}{text}{end}{after}"
