"""Build the ledger of a run."""

from pathlib import Path

from lightrft.app.observe.sinks import Writer
from lightrft.app.trainer.held_out import HeldOut
from lightrft.config.sections import Config
from lightrft.extras.ledger.answers import answer_reader
from lightrft.extras.ledger.book import Book
from lightrft.models.parallel.mesh import Mesh


def book_of(config: Config, mesh: Mesh, writer: Writer, eval_sets: list[HeldOut]) -> Book:
    """Return what writes the ledger of a run into its folder."""
    return Book(
        Path(config.train.save_path),
        mesh,
        writer,
        answer_reader(config.reward.reward),
        [prompt.text for held_out in eval_sets for prompt in held_out.prompts],
    )
