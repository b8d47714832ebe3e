"""Leave out prompts whose media cannot be read any more (--bad_rows skip)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from loguru import logger

from lightrft.config.errors import DataError
from lightrft.core.samples import Prompt
from lightrft.data.media_files import unreadable
from lightrft.models.parallel.collectives import Axis


@dataclass(eq=False)
class ReadableMedia:
    """Keeps the list of prompts that were left out, the same on all ranks.

    Each rank checks the files of the prompts that it will read, and a share of the others.
    """

    prompts: Sequence[Prompt]
    exchange: Axis
    data: Axis
    left_out: set[int] = field(default_factory=set, init=False)
    """Rows of prompts that were left out. A resumed run finds them again."""

    def problems(self, rows: list[int], local_rows: set[int]) -> dict[int, str]:
        """Return row -> reason for the unreadable prompts that this rank checks.

        `rows` are the rows of all ranks; this rank will prepare `local_rows`.
        """
        checked = local_rows.union(rows[self.data.rank :: self.data.size])
        reasons = {row: unreadable(self.prompts[row]) for row in checked}
        return {row: reason for row, reason in reasons.items() if reason}

    def leave_out(self, found: dict[int, str]) -> bool:
        """Leave out the prompts that any rank found; return True if there were any.

        All ranks call it. Raises DataError if no prompt is left.
        """
        of_all = {row: why for share in self.exchange.gather(found) for row, why in share.items()}

        for row in sorted(of_all) if self.exchange.rank == 0 else ():
            logger.warning(
                f"{self.prompts[row].location}: {of_all[row]}; its prompt is left out from now on"
                " (--bad_rows skip)"
            )

        self.left_out |= of_all.keys()
        if len(self.left_out) == len(self.prompts):
            raise DataError("--bad_rows skip: the media of no prompt can be read any more")
        return bool(of_all)
