"""Images of a prompt: as every engine sees them, and what a model of transformers reads in their place."""

import hashlib
from collections.abc import Iterable
from functools import cached_property

from PIL import Image
from transformers import AutoProcessor, ProcessorMixin

from lightrft.engine.requests import Request
from lightrft.types import Expanded

IMAGES = "images"
"""Where a request has them."""


def images_of(request: Request) -> list[Image.Image]:
    """In RGB, transparency dropped, as transformers reads them; vLLM would lay what is transparent on white."""
    return [image.convert("RGB") for image in request.multi_modal.get(IMAGES, [])]


def digest(request: Request) -> str:
    """Of all pixels; empty without media."""
    if not request.multi_modal:
        return ""
    whole = hashlib.sha256()
    for image in images_of(request):
        whole.update(repr(image.size).encode())
        whole.update(image.tobytes())
    return whole.hexdigest()


class ImageReader:
    """The processor of a model's folder, which is asked for images alone: the tokens of a prompt stay as they are.

    That is what its placeholders need, as text that becomes tokens a second time may become others.
    """

    def __init__(
        self, model_path: str, placeholders: Iterable[int], *, trust_remote_code: bool = False, images_alone: bool = False
    ):  # fmt: skip
        self.model_path, self.placeholders, self.trust_remote_code = model_path, frozenset(placeholders), trust_remote_code
        self.images_alone = images_alone
        """For an engine that finds out by itself what a model wants to know of each token."""

    @cached_property
    def processor(self) -> ProcessorMixin:
        """Loaded when the first image comes."""
        try:
            processor = AutoProcessor.from_pretrained(self.model_path, trust_remote_code=self.trust_remote_code)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(f"{self.model_path} has no processor that transformers can load: {error}") from error
        if not isinstance(processor, ProcessorMixin):
            raise ValueError(f"{self.model_path} has no processor of images")
        return processor

    def expanded(self, request: Request) -> Expanded:
        """The tokens that stand for each image in the place of its placeholder, and the tensors of all of them."""
        images = images_of(request)
        output = self.processor(text=[self.processor.image_token] * len(images), images=[[image] for image in images],
                                add_special_tokens=False, padding=True, return_tensors="pt")
        ids, real = output.pop("input_ids"), output.pop("attention_mask").bool()
        others = [name for name in output if name.endswith("token_type_ids")]
        if others and not self.images_alone:
            raise ValueError(f"the hf engine does not know the model's {', '.join(others)}; use --engine_type vllm or sglang")
        spans = iter([row[kept].tolist() for row, kept in zip(ids, real, strict=True)])
        token_ids = [new for token in request.token_ids for new in (next(spans) if token in self.placeholders else [token])]
        return Expanded(token_ids, {name: tensor for name, tensor in output.items() if name not in others})
