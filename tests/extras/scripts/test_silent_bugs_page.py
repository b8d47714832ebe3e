"""Why: a reader trusts that each row of docs/silent_bugs.md has a test, and looks at the report."""

import re
from dataclasses import replace

import pytest
import yaml

from scripts import silent_bugs_page
from scripts.silent_bugs_page import Row

ROWS = [row for rows in silent_bugs_page.groups().values() for row in rows]
"""This fails by name if a test is gone."""
REPORT = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/[1-9]\d*")
LONGEST = 40
"""Words of a cell."""


def test_the_page_is_what_the_script_writes():
    text = silent_bugs_page.PAGE.read_text()
    assert text == silent_bugs_page.page(text)


def test_there_are_many_reports_and_none_twice():
    reports = [report for row in ROWS for report in row.reports.split()]
    assert len(ROWS) >= 30 and len(reports) == len(set(reports))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.reports.split()[0])
def test_a_row(row):
    links = re.findall(r"\]\(([^)]*)\)", row.cells())
    assert len(links) == len(row.reports.split())
    assert all(REPORT.fullmatch(link) for link in links)
    for text in (row.elsewhere, row.here):
        assert text.endswith(".") and len(text.split()) <= LONGEST and "|" not in text


@pytest.mark.parametrize(
    "change",
    [
        {"test": "tests/no_such_file.py::test_nothing"},
        {"test": "tests/extras/scripts/test_silent_bugs_page.py::test_no_such_name"},
        {"case": "no_such_case"},
    ],
    ids=str,
)
def test_a_test_that_is_gone_is_named(change, tmp_path, monkeypatch):
    row = Row(
        "huggingface/trl/issues/1",
        "A.",
        "B.",
        "tests/extras/scripts/test_silent_bugs_page.py::test_a_row",
    )
    assert row.missing() == []
    gone = replace(row, **change)
    file = tmp_path / "rows.yaml"
    file.write_text(yaml.safe_dump({"Heading": [vars(row), vars(gone)]}))
    monkeypatch.setattr(silent_bugs_page, "ROWS", file)
    with pytest.raises(LookupError, match=change.get("case") or change["test"]):
        silent_bugs_page.groups()
