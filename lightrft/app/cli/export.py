"""Write a checkpoint, an adapter's folder, a GGUF file or a model in FP8 or MXFP4 as a Hugging Face
folder that from_pretrained and engines load.

lightrft export runs/run exported
lightrft export runs/run/checkpoints/step20 exported
lightrft export model.gguf exported
lightrft export Qwen3-8B-FP8 exported
"""

import argparse
from pathlib import Path

from loguru import logger

from lightrft.app.cli import command_parser, user_errors
from lightrft.app.run.logs import set_up_logging


def main(argv: list[str] | None = None) -> None:
    arguments = command_parser("export", __doc__).parse_args(argv)
    from lightrft.app.run.prepare import quiet_libraries
    from lightrft.strategy.checkpoint.atomic import CheckpointError

    set_up_logging()
    quiet_libraries()
    with user_errors(ValueError, CheckpointError, OSError):
        logger.info("exported: {}", _export(arguments))


def _export(arguments: argparse.Namespace) -> Path:
    from lightrft.models.lora import is_adapter_folder
    from lightrft.strategy.checkpoint.dequantize import convert, quantization
    from lightrft.strategy.checkpoint.final_model import export_checkpoint, export_merged
    from lightrft.strategy.checkpoint.model_folders import convert_gguf, converted_folder, gguf_file

    if file := gguf_file(str(arguments.checkpoint)):
        return convert_gguf(file, arguments.folder)
    if quantization(arguments.checkpoint) is not None:
        return convert(arguments.checkpoint, arguments.folder)

    pretrain = converted_folder(arguments.pretrain, "--pretrain")
    code = arguments.trust_remote_code
    if is_adapter_folder(arguments.checkpoint):
        return export_merged(
            str(arguments.checkpoint), arguments.folder, base=pretrain, trust_remote_code=code
        )

    return export_checkpoint(
        arguments.checkpoint,
        arguments.folder,
        name=arguments.name,
        pretrain=pretrain,
        adapter_only=arguments.adapter_only,
        trust_remote_code=code,
    )
