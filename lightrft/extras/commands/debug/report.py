"""Write report.html to the folder of a run: curves, samples, configuration.

Several folders: compare their runs on one page.

lightrft report runs/quickstart
lightrft report runs/one runs/other --out comparison.html
lightrft report runs/quickstart --csv
"""

import csv
from pathlib import Path

from loguru import logger

from lightrft.app.cli import command_parser
from lightrft.app.observe.report import write_report
from lightrft.app.observe.sinks import read_rows
from lightrft.app.run.logs import set_up_logging
from lightrft.extras.tools.comparison import write_comparison


def main(argv: list[str] | None = None) -> None:
    parser = command_parser("report", __doc__)
    arguments = parser.parse_args(argv)
    set_up_logging()

    try:
        if len(arguments.folders) > 1:
            logger.info(f"comparison: {write_comparison(arguments.folders, arguments.out)}")
        else:
            logger.info(f"report: {write_report(arguments.folders[0])}")
        for folder in arguments.folders if arguments.csv else ():
            logger.info(f"table: {_write_csv(folder)}")
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))


def _write_csv(folder: Path) -> Path:
    rows = read_rows(folder / "metrics.jsonl")
    columns = dict.fromkeys(name for row in rows for name in row)
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(rows)
    return folder / "metrics.csv"
