"""Commands about runs that have ended, and about what goes into them and comes out of them."""

import argparse


def command_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser for `lightrft NAME` that prints the description as it is written."""
    return argparse.ArgumentParser(
        f"lightrft {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
