"""Estimate what the towers that read media cost, in text tokens, so that ranks can be balanced."""

from collections.abc import Collection, Mapping
from fractions import Fraction
from math import ceil, prod

from torch import nn
from transformers import AutoModelForMultimodalLM, PretrainedConfig, PreTrainedModel

from lightrft.core.batch import Features
from lightrft.data.media_files import AUDIOS, IMAGES, VIDEOS
from lightrft.models.empty import empty_parameters

CONVOLUTIONS: Mapping[str, tuple[type[nn.Module], ...]] = {
    IMAGES: (nn.Conv2d, nn.Conv3d),
    VIDEOS: (nn.Conv2d, nn.Conv3d),
    AUDIOS: (nn.Conv1d,),
}
"""Layers that a tower begins with."""
PIXELS = {IMAGES: "pixel_values", VIDEOS: "pixel_values_videos", AUDIOS: "input_features"}
"""Features that a tower reads."""


class TowerWork:
    """Cost of a model's towers, relative to the decoder.

    Both are counted as matrix products: of a position in a tower, of a token in the decoder.
    """

    def __init__(self, config: PretrainedConfig, media: Collection[str], *, frozen: bool):
        """Count the parameters of a model without loading weights.

        A `frozen` tower has no backward pass, so it costs a third.
        """
        with empty_parameters():
            model = AutoModelForMultimodalLM.from_config(config)
        self.per_element = {
            PIXELS[medium]: _per_element(model, medium) / (3 if frozen else 1) for medium in media
        }
        """Feature name -> cost of one number in it."""

    def __call__(self, features: Features) -> int:
        """Return what the media of a sequence cost in text tokens, rounded up."""
        costs = self.per_element.items()
        return ceil(sum(features[name].numel() * cost for name, cost in costs if name in features))


def _per_element(model: PreTrainedModel, medium: str) -> Fraction:
    decoder = model.get_decoder()
    # The tower is the module beside the decoder that begins with a convolution, as patches do.
    kinds = CONVOLUTIONS[medium]
    tower = next(
        child
        for child in model.base_model.children()
        if decoder not in child.modules()
        and any(isinstance(layer, kinds) for layer in child.modules())
    )
    convolutions = [layer for layer in tower.modules() if isinstance(layer, kinds)]
    elements = convolutions[0].in_channels * prod(
        stride for layer in convolutions for stride in layer.stride
    )

    return Fraction(_products(tower), _products(decoder) * elements)


def _products(module: nn.Module) -> int:
    """Count the parameters that are multiplied at each position; embeddings are only looked up."""
    layers = [layer for layer in module.modules() if not isinstance(layer, nn.Embedding)]
    return sum(weight.numel() for layer in layers for weight in layer.parameters(recurse=False))
