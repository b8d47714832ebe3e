"""What a fork of a test process does first."""

import gc
import os


def keep_inherited_objects() -> None:
    """Let no collection in a fork look at what the parent has made; the pages remain shared.

    Call it in a process that forks. When vLLM ends it collects everything, and it would wait
    forever for threads that only the parent has, such as those of a process group.
    """
    os.register_at_fork(after_in_child=_keep)


def _keep() -> None:
    gc.freeze()
    gc.unfreeze = lambda: None
