"""Write what one step of a run needs into one file, to repeat it elsewhere with lightrft replay.

lightrft bundle runs/one --step 123
lightrft bundle runs/one --step 123 --out step123.zip

The run must have recorded the samples of the step (--dump_rollouts) and, unless it is the first
one, the checkpoint before it (--save_steps).
"""

from loguru import logger

from lightrft.app.cli import command_parser, user_errors
from lightrft.app.run.logs import set_up_logging


def main(argv: list[str] | None = None) -> None:
    arguments = command_parser("bundle", __doc__).parse_args(argv)
    from lightrft.app.run.prepare import quiet_libraries
    from lightrft.extras.recorder.bundle import write_bundle

    set_up_logging()
    quiet_libraries()

    path = arguments.out or arguments.folder / f"step{arguments.step}.zip"
    with user_errors(ValueError, OSError):
        write_bundle(arguments.folder, arguments.step, path)
    logger.info("bundle: {}, {:.1f} MB", path, path.stat().st_size / 1e6)
