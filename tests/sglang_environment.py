"""Call a function in the environment that has SGLang: it lies over the tests' own, beside its folder."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PREFIX = Path(f"{sys.prefix}-sglang")


def in_sglang_environment(function: Callable[..., Any], *args: Any, timeout: float = 600) -> Any:
    """`function(*args)` in a process of that environment, which imports SGLang first, so that forked ranks have it.

    The function, its arguments and its result travel by pickle, so it must live in a module that can be imported. What it
    raises, a dead process, the time limit (seconds) or a call of the stand-in for SGLang's kernels raise RuntimeError here.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / name for name in ("call", "answer", "output", "stand_in_calls")}
        paths["call"].write_bytes(pickle.dumps((function, args)))
        with open(paths["output"], "wb") as output:
            process = subprocess.Popen([_python(), "-W", "ignore", __file__, folder], cwd=ROOT, env=_environment(paths),
                                       stdout=output, stderr=output, start_new_session=True)
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                pass
            finally:
                _end_group(process)
        said = paths["output"].read_text(errors="replace")[-20_000:]
        if not paths["answer"].exists():
            raise RuntimeError(f"{function} ended with {process.returncode} within {timeout} s and said:\n{said}")
        result, error = pickle.loads(paths["answer"].read_bytes())
        if error:
            raise RuntimeError(f"{said}\n{error}")
        if paths["stand_in_calls"].exists():
            raise RuntimeError(f"the stand-in for SGLang's kernels was called: {paths['stand_in_calls'].read_text()}")
        return result


def _python() -> Path:
    python = PREFIX / "bin" / "python"
    if not python.exists():
        raise RuntimeError(f"no environment with SGLang at {PREFIX}: make it with `bash scripts/environment.sh test`")
    return python


def _environment(paths: dict[str, Path]) -> dict[str, str]:
    path = os.pathsep.join(map(str, [ROOT / "tests" / "sglang_stand_ins", ROOT, ROOT / "tests"]))
    return os.environ | {"PYTHONPATH": path, "STAND_IN_CALLS": str(paths["stand_in_calls"])}


def _end_group(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _answer(folder: Path) -> None:
    import lightrft.engine.sglang  # noqa: F401

    function, args = pickle.loads((folder / "call").read_bytes())
    try:
        answer = function(*args), ""
    except BaseException:
        answer = None, traceback.format_exc()
    (folder / "answer.part").write_bytes(pickle.dumps(answer))
    os.rename(folder / "answer.part", folder / "answer")


if __name__ == "__main__":
    _answer(Path(sys.argv[1]))
