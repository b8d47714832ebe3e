"""Write folders of models in 8 or 4 bits as plain folders in bfloat16.

DeepSeek-V3 and Qwen publish weights in FP8 (E4M3) with a scale for each block, and gpt-oss its
experts in MXFP4 (Open Compute Project, Microscaling Formats 1.0): numbers of 4 bits with one power
of two for 32 of them. All training starts from the numbers that they stand for.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightrft.config.errors import ConfigError
from lightrft.models.parallel.collectives import Axis
from lightrft.models.weight_files import INDEX, INTEGERS, WEIGHT_ENDINGS, WeightFiles
from lightrft.strategy.checkpoint.atomic import sync, write_file, write_folder
from lightrft.strategy.checkpoint.shard_writer import ShardWriter

FILE_BYTES = 2**31
"""Size of the files that are written. One file is in memory at a time."""
FP8 = ("F8_E4M3", "F8_E5M2")
SCALE_ENDINGS = ("_scale_inv", "_scale")
"""What is appended to the name of an FP8 tensor for its scales; both are factors."""
UNUSED = ("input_scale", "activation_scale", "k_scale", "v_scale")
"""Endings of scales for activations and caches."""
BLOCKS_ENDING = "_blocks"
PACKED_ENDINGS = ("_packed", "qweight", BLOCKS_ENDING)
MXFP4_SCALES = "_scales"
MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers with three bits, E2M1; the fourth bit is the sign."""


def quantization(folder: Path) -> dict[str, Any] | None:
    """Return the quantization settings of a folder's config.json; None for a plain folder."""
    try:
        settings = json.loads((folder / "config.json").read_bytes()).get("quantization_config")
        return settings and dict(settings)
    # Loading the model says what is wrong.
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def convert(source: Path, folder: Path, *, file_bytes: int = FILE_BYTES) -> Path:
    """Write a plain folder with the model of a quantized one, completely or not at all.

    Raise ConfigError, which names the folder, for a quantization other than FP8 and MXFP4.
    """
    config = json.loads((source / "config.json").read_bytes())
    settings = config.pop("quantization_config")
    method = settings.get("quant_method")
    files = WeightFiles.of(source)
    if files is None:
        raise ConfigError(f"{source} is quantized ({method}) and has no safetensors files")

    kinds = _kinds(files, source, method)
    config |= {name: "bfloat16" for name in ("dtype", "torch_dtype") if name in config}
    world = Axis("conversion", 1, 0, None)

    def write_weights(temporary: Path) -> None:
        writer = ShardWriter(temporary, file_bytes, world)
        for name, tensor in _plain(files, kinds, settings.get("weight_block_size")):
            writer.add(name, tensor)
        writer.finish()
        writer.name_files()

    def write_rest(temporary: Path) -> None:
        write_file(temporary / "config.json", json.dumps(config, indent=2).encode())
        for path in sorted(source.iterdir()):
            weights = path.suffix == ".safetensors" or path.name in ("config.json", INDEX)
            if path.is_file() and not weights:
                shutil.copy(path, temporary)
                sync(temporary / path.name)

    write_folder(folder, world, write_weights, write_rest)
    return folder


def _kinds(files: WeightFiles, source: Path, method: str) -> dict[str, str]:
    """Return the stored dtypes by name, without the scales of activations.

    Raise ConfigError if there are quantized numbers that have no known scales.
    """
    kinds = {name: kind for name, kind in files.dtypes().items() if not name.endswith(UNUSED)}
    for name, kind in kinds.items():
        scaled = any(name + suffix in kinds for suffix in SCALE_ENDINGS)
        plain = name.removesuffix(BLOCKS_ENDING)
        mxfp4 = plain != name and plain + MXFP4_SCALES in kinds
        packed = kind in INTEGERS and name.endswith((*WEIGHT_ENDINGS, *PACKED_ENDINGS))

        if (kind in FP8 and not scaled) or (packed and not mxfp4):
            raise ConfigError(
                f"{source} is quantized ({method}): training reads FP8 with scales for blocks, rows"
                f" or tensors, and MXFP4, but {name} is {kind}. Use the unquantized model"
            )
    return kinds


def _plain(
    files: WeightFiles, kinds: dict[str, str], block: list[int] | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors, one at a time, in bfloat16 where they are quantized."""
    for name, kind in sorted(kinds.items()):
        if kind in FP8:
            scale = next(name + suffix for suffix in SCALE_ENDINGS if name + suffix in kinds)
            yield name, from_fp8(files.read(name, ()), files.read(scale, ()), block)
            continue

        blocks = name.removesuffix(MXFP4_SCALES) + BLOCKS_ENDING
        if name.endswith(BLOCKS_ENDING):
            plain = name.removesuffix(BLOCKS_ENDING)
            yield plain, from_mxfp4(files.read(name, ()), files.read(plain + MXFP4_SCALES, ()))
        elif not (name.endswith(MXFP4_SCALES) and blocks in kinds) and not _is_scale(name, kinds):
            yield name, files.read(name, ())


def _is_scale(name: str, kinds: dict[str, str]) -> bool:
    return any(
        name.endswith(suffix) and kinds.get(name.removesuffix(suffix)) in FP8
        for suffix in SCALE_ENDINGS
    )


def from_fp8(values: Tensor, scales: Tensor, block: list[int] | None) -> Tensor:
    """Return values [..., N, K] times their scales, computed in float32, as bfloat16.

    The scales are one number, one for each row [..., N, 1], or one for each block
    [..., ceil(N / block[0]), ceil(K / block[1])]. Raise ValueError for scales of another shape.
    """
    values = values.float()
    if scales.dtype == torch.uint8:  # E8M0: powers of two
        scales = torch.exp2(scales.float() - 127)
    scales = scales.float()
    if scales.numel() == 1:
        return (values * scales.reshape(())).bfloat16()

    rows, columns = values.shape[-2:]
    if scales.dim() < values.dim():
        scales = scales.unsqueeze(-1)
    height, width = block or (-(-rows // scales.shape[-2]), -(-columns // scales.shape[-1]))
    if scales.shape[-1] == 1 and scales.shape[-2] == rows:
        return (values * scales).bfloat16()
    if scales.shape[-2:] != (-(-rows // height), -(-columns // width)):
        raise ValueError(
            f"scales of shape {list(scales.shape)} do not fit weights of shape"
            f" {list(values.shape)} in blocks of {height} x {width}"
        )

    spread = scales.repeat_interleave(height, -2).repeat_interleave(width, -1)
    return (values * spread[..., :rows, :columns]).bfloat16()


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of gpt-oss's experts [E, K, N] from [E, N, K / 32, 16] bytes.

    The lower half of a byte comes first. The scales [E, N, K / 32] are exponents plus 127. bfloat16
    holds all these numbers exactly.
    """
    numbers = torch.tensor(MXFP4 + tuple(-number for number in MXFP4))
    result = blocks.new_empty((*blocks.shape[:2], blocks.shape[2] * 32), dtype=torch.bfloat16)
    # One expert at a time: indices and float32 values take many times the bytes.
    for expert, (some, exponents) in enumerate(zip(blocks, scales, strict=True)):
        halves = torch.stack([some & 15, some >> 4], -1).flatten(-2)
        values = numbers[halves.int()] * torch.exp2(exponents.float() - 127)[..., None]
        result[expert] = values.flatten(-2)
    return result.transpose(1, 2).contiguous()
