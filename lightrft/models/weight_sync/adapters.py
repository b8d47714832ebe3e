"""Adapters that an engine holds beside the weights, so that a sync brings only them.

A layer computes W x + (s B) A x. The stream of such a run has A and s B by the names that peft
gives them in files, in the dtype of the engine. W is streamed once, and again only if the engine
has lost it. The trainer multiplies with the same rounded matrices (models/peft.py).
"""

import json
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

PEFT_PREFIX = "base_model.model."
A_ENDING = ".lora_A.weight"
B_ENDING = ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class Adapters:
    """Names and shapes of the adapters that an engine holds, and how many policies it keeps."""

    shapes: dict[str, torch.Size]
    """peft's name -> full shape: A is [rank, in], B is [out, rank]."""
    num_policies: int = 1
    """Policies that may have responses in progress at the same time."""

    @property
    def layers(self) -> list[str]:
        """Return the names of the layers in the transformers model."""
        return [
            name.removeprefix(PEFT_PREFIX).removesuffix(A_ENDING)
            for name in self.shapes
            if name.endswith(A_ENDING)
        ]

    @property
    def rank(self) -> int:
        return max(shape[0] for name, shape in self.shapes.items() if name.endswith(A_ENDING))

    def to_json(self) -> str:
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        return json.dumps({"shapes": shapes, "num_policies": self.num_policies})

    @classmethod
    def from_json(cls, text: str) -> Self:
        read = json.loads(text)
        shapes = {name: torch.Size(shape) for name, shape in read["shapes"].items()}
        return cls(shapes, read["num_policies"])


def names_of(layer: str) -> tuple[str, str]:
    """Return peft's names of A and B of a layer."""
    return f"{PEFT_PREFIX}{layer}{A_ENDING}", f"{PEFT_PREFIX}{layer}{B_ENDING}"


def low_rank_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return b a x: [..., out] from x [..., in], A [rank, in] and the scaled B [out, rank]."""
    return F.linear(F.linear(x, a), b)
