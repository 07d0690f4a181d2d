"""Gated delta rule and causal convolution token by token in float64: slow, and plainly what the formulas say."""

from __future__ import annotations

import torch
from torch import Tensor


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One sequence: the outputs [T, value_heads, value_dim] and the state after it, from ``state`` before it."""
    query, key, value, decay, beta, state = (x.double() for x in (query, key, value, decay, beta, state))
    group = value.shape[1] // key.shape[1]
    outputs, state = [], state.clone()
    for t in range(len(value)):
        rows = []
        for head in range(value.shape[1]):
            q, k = query[t, head // group], key[t, head // group]
            q = q / (q @ q + 1e-6).sqrt() / len(q) ** 0.5
            k = k / (k @ k + 1e-6).sqrt()
            s = state[head] * decay[t, head].exp()
            s = s + torch.outer(k, (value[t, head] - k @ s) * beta[t, head])
            state[head] = s
            rows.append(q @ s)
        outputs.append(torch.stack(rows))
    return torch.stack(outputs), state


def convolution(x: Tensor, weight: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence: the outputs [T, channels] and the tail [channels, width - 1] after it, from the one before it."""
    width = weight.shape[1]
    row = torch.cat((tail.double(), x.double().T), dim=1)
    outputs = [(row[:, t : t + width] * weight.double()).sum(1) for t in range(len(x))]
    return torch.stack(outputs), row[:, row.shape[1] - (width - 1) :]
