"""An environment for Harbor on this machine: processes with a copy-on-write view of the files.

Harbor's own interpreter imports it. A holder process has mount and process namespaces of its own,
so its end ends whatever the agent has started. It needs root, or the right to make namespaces. The
Dockerfile of a task is not built: what a task needs is installed on the machine. The network and
the devices are those of the machine, so it protects from mistakes, not from malice.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult

HOLD = Path(__file__).with_name("hold.sh")
"""Program of the holder."""
NAMESPACES = ["--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"]
START_SECONDS = 30.0


class ProcessEnvironment(BaseEnvironment):
    """Runs the commands of a trial as processes of this machine."""

    @staticmethod
    def type() -> str:
        return "process"

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        """Start the holder. Raises RuntimeError if namespaces cannot be made."""
        folder = Path(self.trial_paths.trial_dir).resolve() / "process"
        folder.mkdir(parents=True)
        self._unshare = subprocess.Popen(
            ["unshare", *NAMESPACES, "bash", str(HOLD), str(folder)], stdin=subprocess.DEVNULL
        )
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")

        until = time.monotonic() + START_SECONDS
        while self._unshare.poll() is None and time.monotonic() < until:
            for process in map(int, children.read_text().split()):
                if Path(f"/proc/{process}/comm").read_text().strip() == "sleep":
                    self._holder = process
                    return
            await asyncio.sleep(0.02)
        raise RuntimeError("the namespaces of the process environment cannot be made")

    async def stop(self, delete: bool) -> None:
        os.kill(self._holder, signal.SIGKILL)
        self._unshare.wait()

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        self._inside(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source_path, self._inside(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, self._inside(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(self._inside(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self._inside(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command in the namespaces of the holder."""
        process = await asyncio.create_subprocess_exec(
            *["nsenter", f"--target={self._holder}", "--mount", "--pid", "--root", "--wd"],
            *["bash", "-c", f"cd {cwd or '/app'} && {command}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "HOME": "/root", **(env or {})},
        )
        try:
            output = await asyncio.wait_for(process.communicate(), timeout_sec)
        except TimeoutError:
            process.kill()
            raise
        stdout, stderr = (each.decode(errors="replace") for each in output)
        return ExecResult(stdout=stdout, stderr=stderr, return_code=process.returncode)

    def _inside(self, path: Any) -> Path:
        """Return where this process sees a file of the environment."""
        return Path(f"/proc/{self._holder}/root", str(path).lstrip("/"))
