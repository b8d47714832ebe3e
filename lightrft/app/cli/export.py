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

EXPORTED_MODELS = ("actor", "ema", "critic", "draft", "reward_model", "reward_model_ema")


def main(argv: list[str] | None = None) -> None:
    parser = _parser()
    arguments = parser.parse_args(argv)
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
    trust_remote_code = arguments.trust_remote_code
    if is_adapter_folder(arguments.checkpoint):
        return export_merged(
            str(arguments.checkpoint),
            arguments.folder,
            base=pretrain,
            trust_remote_code=trust_remote_code,
        )

    return export_checkpoint(
        arguments.checkpoint,
        arguments.folder,
        name=arguments.name,
        pretrain=pretrain,
        adapter_only=arguments.adapter_only,
        trust_remote_code=trust_remote_code,
    )


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("export", __doc__)
    kinds = (
        "a checkpoint, a run's folder or a folder of checkpoints (the newest is used), an adapter's"
        " folder, a GGUF file, or a folder in FP8 or MXFP4"
    )
    parser.add_argument("checkpoint", type=Path, help=kinds)
    parser.add_argument("folder", type=Path, help="folder to write the model to")

    name = "model of the checkpoint to export"
    parser.add_argument("--name", default="actor", choices=EXPORTED_MODELS, help=name)
    base = "folder of the run's --pretrain, or of the adapter's base model"
    parser.add_argument("--pretrain", default="", help=base)
    adapter = "LoRA: write the adapter in peft's format, without merging"
    parser.add_argument("--adapter_only", action="store_true", help=adapter)
    code = "run Python code that comes with --pretrain"
    parser.add_argument("--trust_remote_code", action="store_true", help=code)
    return parser


if __name__ == "__main__":
    main()
