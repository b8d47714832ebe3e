"""Profile a process, operator by operator, as a Chrome trace."""

from pathlib import Path

from torch.profiler import profile, supported_activities


class Profiler:
    """Records from construction until stop(), into one file per rank."""

    def __init__(self, folder: Path, rank: int):
        self.path = folder / f"trace_rank{rank}.json"
        folder.mkdir(parents=True, exist_ok=True)
        self._profile = profile(activities=supported_activities())
        self._profile.start()

    def stop(self) -> Path:
        self._profile.stop()
        self._profile.export_chrome_trace(str(self.path))
        return self.path
