"""A weight passes few stages and files on its way from parameter to engine."""

import sys
from pathlib import Path
from types import FrameType

from torch import nn

import lightrft
from lightrft.strategy.engine_host import EngineHost
from ranks import run_ranks
from strategy.training import load, strategy
from tiny import byte_tokenizer, tiny_model

ROOT = str(Path(lightrft.__file__).parent)
GENERATOR = 0x20
"""Flag of the code of a generator."""


def followed(host: EngineHost, actor: nn.Module) -> tuple[set[str], int]:
    """Return the files that a sync enters between parameter and engine, and its nested stages."""
    files = set()
    most = 0

    def follow(frame: FrameType, event: str, _: object) -> None:
        nonlocal most
        if event != "call" or not frame.f_code.co_filename.startswith(ROOT):
            return

        stack = []
        above: FrameType | None = frame
        while above is not None:
            stack.append(above.f_code)
            above = above.f_back
        if any(code.co_name == "_load_weights" for code in stack):
            files.add(frame.f_code.co_filename)
            ours = [code for code in stack if code.co_filename.startswith(ROOT)]
            most = max(most, sum(bool(code.co_flags & GENERATOR) for code in ours))

    sys.setprofile(follow)
    try:
        host.update_weights(actor)
    finally:
        sys.setprofile(None)
    return files, most


def sync(folder: str) -> tuple[int, int]:
    made = strategy(pretrain=folder, engine_type="hf", prompt_max_len=32, generate_max_len=16)
    actor = made.prepare(load(folder))
    made.setup_inference_engine(actor=actor)
    with made.engine_awake(actor):
        files, stages = followed(made.host, actor)
    made.close()
    return len(files), stages


def test_a_weight_passes_at_most_five_stages(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    byte_tokenizer().save_pretrained(folder)
    ((files, stages),) = run_ranks(1, sync, folder)
    assert files <= 12
    assert 3 <= stages <= 5
