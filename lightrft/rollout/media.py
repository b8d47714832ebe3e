"""Expand prompts with images for the model that learns."""

from functools import cached_property

from loguru import logger
from PIL import Image
from transformers import AutoConfig

from lightrft.config.errors import ConfigError
from lightrft.config.sections import ModelSection
from lightrft.data.media import IMAGES, opened
from lightrft.engine.media import MediaReader
from lightrft.engine.model_info import placeholders
from lightrft.engine.requests import Request
from lightrft.types import Expanded, Prompt

FAMILIES = ("idefics3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Model types whose gradients, and whose processors' token counts, were compared with those of transformers."""
PROBES = ((28, 28), (1000, 300), (300, 1000))
"""Sizes of the images that are processed to verify a processor's count of tokens."""
BLANK = Image.new("RGB", (28, 28), "white")  # some models treat black as padding


class Expander:
    """Replaces every placeholder by the tokens of its image, with the tensors that the model needs for them."""

    def __init__(self, section: ModelSection, *, most: int | None = None):
        """Load the processor. `most` is the largest number of images of one prompt that the engine takes."""
        trust, self.most = {"trust_remote_code": section.trust_remote_code}, most
        self.config = AutoConfig.from_pretrained(section.pretrain, **trust)
        self.reader = MediaReader(section.pretrain, placeholders(self.config), media_alone=True, **trust)
        self.places = self.reader.placeholders["image"]
        self._lengths: dict[tuple[int, int], int] = {}

    def check_family(self) -> None:
        """Raise ConfigError for a model type that was not verified to learn from images as in transformers."""
        if self.config.model_type not in FAMILIES:
            raise ConfigError(
                f"--images_key: models of type {self.config.model_type} cannot be trained on images, only those of type "
                f"{', '.join(FAMILIES)}; omit the flag to train on text"
            )

    def __call__(self, prompt: Prompt) -> Expanded:
        if not prompt.multi_modal:
            return Expanded(list(prompt.token_ids), {})
        return self.reader.expanded(Request(list(prompt.token_ids), opened(prompt.multi_modal)))

    @property
    def chat_template(self) -> str | None:
        return self.reader.processor.chat_template

    @cached_property
    def blank(self) -> Expanded:
        """Return the expansion of one image alone."""
        return self._read(BLANK)

    def measure(self, prompt: Prompt) -> int:
        """Return how many tokens the expansion adds to the prompt.

        Raises ValueError if the number of images is not that of the placeholders, or exceeds the limit.
        """
        images, num_places = prompt.multi_modal.get(IMAGES, []), sum(token in self.places for token in prompt.token_ids)
        if len(images) != num_places:
            raise ValueError(f"the prompt has {len(images)} images (--images_key) and {num_places} placeholders for images")
        if self.most is not None and len(images) > self.most:
            raise ValueError(f"the prompt has {len(images)} images, more than --limit_mm_image_per_prompt {self.most}")
        return sum(self._length(image.size) - 1 for image in images)

    def _length(self, size: tuple[int, int]) -> int:
        """Return the tokens of an image of this size in pixels: they do not depend on its content."""
        if size not in self._lengths:
            self._lengths[size] = self._counted(size) if self._counts else self._expanded_length(size)
        return self._lengths[size]

    @cached_property
    def _counts(self) -> bool:
        """Return True if the processor predicts an image's tokens correctly; processing an image takes up to half a second."""
        if self.config.model_type not in FAMILIES:
            return False
        lengths = {size: (self._counted(size), self._expanded_length(size)) for size in PROBES}
        wrong = {size: pair for size, pair in lengths.items() if pair[0] != pair[1]}
        for (width, height), (counted, expanded) in wrong.items():
            logger.warning(f"{self.reader.model_path}: the processor gives {counted} tokens for an image of {width} x {height} "
                           f"and produces {expanded}; so one image of every size is processed, which takes longer")  # fmt: skip
        return not wrong

    def _counted(self, size: tuple[int, int]) -> int:
        return self.reader.processor._get_num_multimodal_tokens(image_sizes=[size[::-1]])["num_image_tokens"][0]

    def _expanded_length(self, size: tuple[int, int]) -> int:
        return len(self._read(BLANK.resize(size)).token_ids)

    def _read(self, image: Image.Image) -> Expanded:
        return self.reader.expanded(Request([min(self.places)], {IMAGES: [image]}))
