"""Cost of the towers that read media, in text tokens of the same model, by which the planner
balances ranks.
"""

from collections.abc import Collection, Mapping
from fractions import Fraction
from math import ceil, prod

from torch import nn
from transformers import AutoModelForMultimodalLM, PretrainedConfig, PreTrainedModel

from lightrft.data.media import AUDIOS, IMAGES, VIDEOS
from lightrft.models.empty import empty_parameters
from lightrft.types import Features

CONVOLUTIONS: Mapping[str, tuple[type[nn.Module], ...]] = {
    IMAGES: (nn.Conv2d, nn.Conv3d),
    VIDEOS: (nn.Conv2d, nn.Conv3d),
    AUDIOS: (nn.Conv1d,),
}
"""Layers with which a tower begins."""
PIXELS = {IMAGES: "pixel_values", VIDEOS: "pixel_values_videos", AUDIOS: "input_features"}
"""Features that a tower reads."""


class TowerWork:
    """Cost of a model's towers relative to that of its decoder: the matrix products of a position
    and of a token.
    """

    def __init__(self, config: PretrainedConfig, media: Collection[str], *, frozen: bool):
        """Count the parameters of a model without weights.

        A `frozen` tower has no backward pass, a third of the work.
        """
        with empty_parameters():
            model = AutoModelForMultimodalLM.from_config(config)
        self.per_element = {
            PIXELS[medium]: _per_element(model, medium) / (3 if frozen else 1) for medium in media
        }
        """Name of a feature -> cost of one of its numbers."""

    def __call__(self, features: Features) -> int:
        """Return the cost of the media of a sequence in text tokens, rounded up."""
        return ceil(
            sum(
                features[name].numel() * cost
                for name, cost in self.per_element.items()
                if name in features
            )
        )


def _per_element(model: PreTrainedModel, medium: str) -> Fraction:
    decoder = model.get_decoder()
    kinds = CONVOLUTIONS[medium]
    tower = next(
        child
        for child in model.base_model.children()
        if decoder not in child.modules()
        and any(isinstance(part, kinds) for part in child.modules())
    )
    convolutions = [part for part in tower.modules() if isinstance(part, kinds)]
    elements = convolutions[0].in_channels * prod(
        stride for part in convolutions for stride in part.stride
    )

    return Fraction(_products(tower), _products(decoder) * elements)


def _products(module: nn.Module) -> int:
    """Return the number of parameters that are multiplied at each position."""
    parts = [part for part in module.modules() if not isinstance(part, nn.Embedding)]
    return sum(parameter.numel() for part in parts for parameter in part.parameters(recurse=False))
