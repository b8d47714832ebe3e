"""Stands in for SGLang's kernels of linear attention with plain torch, one token after another."""

import torch
import torch.nn.functional as F
from torch import Tensor

OPERATORS = torch.library.Library("sgl_kernel", "FRAGMENT")


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_,
) -> Tensor:
    """Convolve sequences that lie end to end, [C, T], and keep the last inputs of each."""
    from sglang.kernels.ops.attention.fla import layernorm_gated

    # Without AMX units SGLang would call a Triton kernel instead of fused_rmsnorm_gated_cpu.
    layernorm_gated._use_cpu = True

    outputs = []
    bounds = query_start_loc.tolist()
    for index, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        slot = cache_indices[index]
        before = conv_states[slot] * has_initial_state[index]
        inputs = torch.cat([before.to(x.dtype), x[:, begin:end]], dim=1)
        outputs.append(F.silu(F.conv1d(inputs[None], weight[:, None], bias, groups=len(x))[0]))
        conv_states[slot] = inputs[:, -conv_states.shape[-1] :].to(conv_states.dtype)
    return torch.cat(outputs, dim=1)


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    *,
    conv_state_indices: Tensor,
) -> Tensor:
    """Convolve one token of each sequence, [N, C]."""
    inputs = torch.cat([conv_states[conv_state_indices].to(x.dtype), x[:, :, None]], dim=2)
    conv_states[conv_state_indices] = inputs[:, :, 1:].to(conv_states.dtype)
    outputs = (inputs * weight).sum(-1)
    return F.silu(outputs if bias is None else outputs + bias)


def chunk_gated_delta_rule_cpu(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_,
) -> tuple[Tensor, None, None]:
    """Apply the gated delta rule (arXiv 2412.06464, equation 10) to sequences end to end.

    Queries and keys are [1, T, heads, K], values [1, T, value heads, V], states [slots, value
    heads, V, K].
    """
    repeats = v.shape[2] // q.shape[2]
    queries, keys = (each[0].float().repeat_interleave(repeats, 1) for each in (q, k))
    queries = queries * (queries.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt() * q.shape[-1] ** -0.5
    keys = keys * (keys.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt()
    output = torch.empty_like(v[0])
    bounds = cu_seqlens.tolist()
    for index, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        slot = initial_state_indices[index]
        state = initial_state[slot].float()
        for token in range(begin, end):
            state = state * g[0, token].exp()[:, None, None]
            change = v[0, token].float() - (state * keys[token][:, None]).sum(-1)
            change = change * beta[0, token].float()[:, None]
            state = state + change[:, :, None] * keys[token][:, None]
            output[token] = (state * queries[token][:, None]).sum(-1).to(v.dtype)
        initial_state[slot] = state.to(initial_state.dtype)
    return output[None], None, None


def fused_gdn_gating_cpu(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias)
    return decay[None], b.sigmoid()[None]


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> Tensor:
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    count = initial_state_indices.shape[0]
    shapes = [each.reshape(1, count, *each.shape[2:]) for each in (q, k, v)]
    return chunk_gated_delta_rule_cpu(
        **dict(zip("qkv", shapes, strict=True)),
        g=g,
        beta=beta,
        initial_state=initial_state_source,
        initial_state_indices=initial_state_indices,
        cu_seqlens=torch.arange(count + 1),
    )[0]


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values = value_heads * value_dim
    mixed, z = qkvz.split([qkvz.shape[1] - values, values], dim=1)
    b, a = ba.split(value_heads, dim=1)
    return mixed.clone(), z.reshape(-1, value_heads, value_dim).clone(), b.clone(), a.clone()


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, dim: int, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    q, gate = q_gate.reshape(-1, heads, 2 * dim).chunk(2, dim=-1)
    normed = (
        F.rms_norm(each.float(), (dim,), 1 + weight.float(), eps).to(each.dtype)
        for each, weight in ((q, q_weight), (k.reshape(len(k), -1, dim), k_weight))
    )
    return *normed, gate.clone()


def fused_rmsnorm_gated_cpu(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Return the norm of x times silu(gate)."""
    normed = F.rms_norm(x.float(), weight.shape, weight.float(), eps)
    return (normed * F.silu(gate.float())).to(x.dtype)


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    x.mul_(gate.sigmoid())


for function in (
    fused_gdn_gating_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_rmsnorm_gated_cpu,
    fused_sigmoid_mul_cpu,
):
    changed = {
        fused_sigmoid_gating_delta_rule_update_cpu: ["initial_state_source"],
        fused_sigmoid_mul_cpu: ["x"],
    }.get(function, ())
    OPERATORS.define(function.__name__ + torch.library.infer_schema(function, mutates_args=changed))
    OPERATORS.impl(function.__name__, function, "CPU")
