"""The noise of a gradient, from products of the gradients of parts of its batch.

Sample j of prompt p has the gradient g + u_p + v_j: the one that all prompts share, what its prompt
adds, and what the sample adds. With U = E |u_p|^2 and V = E |v_j|^2, the gradients of two random
parts i and k, with n_ip samples of each prompt and n_i in all, have the expected product

    E <s_i, s_k> = n_i n_k |g|^2 + (sum over p of n_ip n_kp) U + [i = k] n_i V,

which is linear in |g|^2, U and V. McCandlish et al., arXiv 1812.06162, have the same without
prompts (equation 2.9 and appendix A.1).
"""

import numpy as np

SPLIT_CONDITION = 1e4
"""Condition number from which the products do not tell U from V, as with one sample for each prompt.
"""


def noise_of(equations: np.ndarray, samples_per_prompt: float) -> dict[str, float]:
    """Return the spread of the gradient of a sample by name, as multiples of |g|^2.

    `scale` is tr(S) / |g|^2: the number of samples in a batch whose gradient has as much noise as
    signal. `prompts` is U / |g|^2 and `samples` V / |g|^2; they are left out if the products do not
    tell them apart. Nothing is returned if no signal is seen. `equations` [3, 4] are sums of what
    normal_equations() returns.
    """
    matrix, right = equations[:, :3], equations[:, 3]
    lengths = np.sqrt(np.diag(matrix)).clip(1e-30)
    scaled = matrix / np.outer(lengths, lengths)
    if np.linalg.cond(scaled) < SPLIT_CONDITION:
        signal, *spread = np.linalg.solve(scaled, right / lengths) / lengths
        prompts, samples = np.maximum(spread, 0.0)  # as all squares are
        total = samples_per_prompt * prompts + samples
        found = {"scale": total, "prompts": prompts, "samples": samples}
    else:
        # The noise of a sample, with its share of what its prompt adds.
        signal, total = np.linalg.lstsq(matrix[np.ix_([0, 2], [0, 2])], right[[0, 2]])[0]
        found = {"scale": max(total, 0.0)}
    return {name: float(value / signal) for name, value in found.items()} if signal > 0 else {}


def normal_equations(products: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the normal equations of one update, matrix and right side: [3, 4].

    `products` [M, M] belong to the gradients of M parts, and `counts` [M, P] are the samples of each
    prompt in them.
    """
    samples = counts.sum(1)
    first, second = np.triu_indices(len(samples))
    columns = [
        samples[first] * samples[second],
        (counts @ counts.T)[first, second],
        np.where(first == second, samples[first], 0),
    ]
    design = np.stack([*columns, products[first, second]], axis=1)
    return design[:, :3].T @ design
