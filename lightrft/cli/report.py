"""Write report.html to the folder of a run: curves, samples, configuration.

python -m lightrft.cli.report runs/quickstart
"""

import argparse
from pathlib import Path

from loguru import logger

from lightrft.observe.report import write_report


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the run's save_path")
    folder = parser.parse_args(argv).folder
    try:
        logger.info(f"report: {write_report(folder)}")
    except FileNotFoundError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
