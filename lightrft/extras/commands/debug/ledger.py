"""Say what each row of the data was worth in a run of train_ppo, and which rows look wrong: wrong
labels, leaks, duplicates, rows that teach nothing, and rows that were forgotten.

lightrft ledger runs/mine
lightrft ledger runs/mine --write cleaned.jsonl --drop wrong_label,dead --review review.csv

The table is also in report.html. The file ledger.sqlite is open to other programs: its view `rows`
has a line for each row.
"""

import csv
import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from loguru import logger
from rich.console import Console
from rich.markup import escape

from lightrft.app.cli import command_parser
from lightrft.app.observe.report import LEDGER, write_report
from lightrft.app.observe.sample_table import excerpt
from lightrft.app.run.logs import set_up_logging
from lightrft.config.errors import DataError
from lightrft.config.references import data_sources
from lightrft.data.readers import BadRows, read_rows
from lightrft.extras.ledger.records import RowRecord, read_ledger
from lightrft.extras.ledger.suspects import (
    SUSPECT_KINDS,
    BetaBinomial,
    Suspect,
    solve_rates,
    suspects,
)

SHOWN_SUSPECTS = 5
"""Number of suspects of each kind that the terminal shows."""
ON_PAGE = 2000
"""Number of rows in the report; suspects come first."""


def main(argv: list[str] | None = None) -> None:
    commands = command_parser("ledger", __doc__)
    options = commands.parse_args(argv)
    set_up_logging()
    dropped = set(options.drop.split(","))
    if unknown := dropped.difference(SUSPECT_KINDS):
        commands.error(f"--drop {min(unknown)}: unknown; choose from {', '.join(SUSPECT_KINDS)}")

    try:
        records, held_out = read_ledger(options.folder)
        found = suspects(records, held_out)
        rates = solve_rates(records)
        _write_table(options.folder, records, found, rates)
        _show(records, found)
        if options.review:
            _write_review(options.review, found)
        if options.write:
            _write_rows(options.write, options.folder, found, dropped)
    except (OSError, ValueError, sqlite3.Error, DataError) as error:
        commands.error(str(error))
    except ModuleNotFoundError as error:
        commands.error(f"{error}: pip install 'lightrft-spmd[ledger]'")


def _show(records: Sequence[RowRecord], found: Sequence[Suspect]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    draws = sum(len(record.draws) for record in records)
    signals = sum(draw.has_signal for record in records for draw in record.draws)
    console.print(
        f"{len(records):,} rows were drawn {draws:,} times; {signals / draws:.0%} of the groups had"
        " a signal"
    )
    counts = Counter(each.kind for each in found)
    for kind in SUSPECT_KINDS:
        console.print(f"[bold]{kind.replace('_', ' ')}[/bold]: {counts[kind]:,} rows")
        for each in [one for one in found if one.kind == kind][:SHOWN_SUSPECTS]:
            sure = f" ({each.probability:.0%})" if each.probability < 1 else ""
            console.print(f"    {escape(each.record.location)}: {escape(each.evidence)}{sure}")


def _write_table(
    folder: Path, records: Sequence[RowRecord], found: Sequence[Suspect], rates: BetaBinomial
) -> None:
    """Write the table of the report, and the report."""
    reasons: dict[int, list[str]] = defaultdict(list)
    for each in found:
        reasons[each.record.row].append(f"{each.kind.replace('_', ' ')}: {each.evidence}")

    ordered = {each.row: each for each in [*(one.record for one in found), *records]}
    rows = []
    for record in [*ordered.values()][:ON_PAGE]:
        signals = sum(draw.has_signal for draw in record.draws)
        rate = rates.posterior(record.total("right"), record.total("responses"))
        shown = [Path(record.location).name, excerpt(record.prompt), ", ".join(record.labels)]
        shown += [len(record.draws), *rate, 1000 * signals / max(record.total("tokens"), 1)]
        rows.append([*shown, record.draws[-1].step, "; ".join(reasons[record.row])])
    (folder / LEDGER).write_text(json.dumps({"rows": rows, "count": len(records)}))
    logger.info("report: {}", write_report(folder))


def _write_review(path: Path, found: Sequence[Suspect]) -> None:
    """Write the suspects as a table that a person can look through."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["location", "suspect", "probability", "evidence", "prompt", "label"])
        for each in found:
            suspect = [each.record.location, each.kind, round(each.probability, 3), each.evidence]
            writer.writerow([*suspect, each.record.prompt, ", ".join(each.record.labels)])
    logger.info("{} suspects: {}", len(found), path)


def _write_rows(path: Path, folder: Path, found: Sequence[Suspect], dropped: set[str]) -> None:
    """Write the rows of the run's data as they are, without those that look wrong."""
    data: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text())["data"]
    left_out = {each.record.location for each in found if each.kind in dropped}
    count = 0
    # The rows may be read from the file that is written.
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        for source in data_sources(data["prompt_data"]):
            bad = BadRows(skip=True, flag="--prompt_data")
            for location, row in read_rows(source.name, data["prompt_split"], bad):
                if location not in left_out:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    count += 1
    unfinished.replace(path)
    logger.info("{} rows without {} suspects: {}", count, len(left_out), path)
