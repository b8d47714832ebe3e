"""The noise of a gradient, from products of the gradients of parts of its batch.

Sample j of prompt p has the gradient g + u_p + v_j: the one that all prompts share, what its prompt
adds, and what the sample adds. With U = E |u_p|^2 and V = E |v_j|^2, the gradients of two
micro-batches i and k, with n_ip samples of each prompt and n_i in all, have the expected product

    E <s_i, s_k> = n_i n_k |g|^2 + (sum over p of n_ip n_kp) U + [i = k] n_i V,

which is linear in |g|^2, U and V. McCandlish et al., arXiv 1812.06162, have the same without
prompts (equation 2.9 and appendix A.1).
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

SPLIT_CONDITION = 1e4
"""Condition number from which the products do not tell U from V.

It is so if each prompt has all its samples in one micro-batch.
"""


@dataclass(frozen=True, slots=True)
class Noise:
    """Spread of the gradient of a sample, as a multiple of |g|^2; None without a visible signal."""

    scale: float | None
    """Number of samples in a batch whose gradient has as much noise as signal: tr(S) / |g|^2."""
    prompts: float | None = None
    """U / |g|^2; None as well if the products do not tell it from V."""
    samples: float | None = None
    """V / |g|^2, likewise."""

    @classmethod
    def solve(cls, equations: np.ndarray, samples_per_prompt: float) -> Self:
        """Solve the sum of what normal_equations() returns, [3, 4]."""
        matrix, right = equations[:, :3], equations[:, 3]
        lengths = np.sqrt(np.diag(matrix)).clip(1e-30)
        scaled = matrix / np.outer(lengths, lengths)
        if np.linalg.cond(scaled) < SPLIT_CONDITION:
            signal, prompts, samples = np.linalg.solve(scaled, right / lengths) / lengths
            total = samples_per_prompt * prompts + samples
            if signal > 0:
                return cls(total / signal, prompts / signal, samples / signal)
            return cls(None)

        # The noise of a sample, with its share of what its prompt adds.
        signal, total = np.linalg.lstsq(matrix[np.ix_([0, 2], [0, 2])], right[[0, 2]])[0]
        return cls(total / signal if signal > 0 else None)


def normal_equations(products: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the normal equations of one update, matrix and right side: [3, 4].

    `products` [M, M] belong to the gradients of M micro-batches, and `counts` [M, P] are the samples
    of each prompt in them. Products count as multiples of their mean square, so that a large
    gradient has no more weight than a small one.
    """
    samples = counts.sum(1)
    first, second = np.triu_indices(len(samples))
    columns = [
        samples[first] * samples[second],
        (counts @ counts.T)[first, second],
        np.where(first == second, samples[first], 0),
    ]
    squares = np.trace(products) / max(samples.sum(), 1)
    design = np.stack([*columns, products[first, second] / max(squares, 1e-300)], axis=1)
    return design[:, :3].T @ design
