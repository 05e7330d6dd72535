"""How does attention compute? By torch's fused kernels, without copies, and without asking the device what the host knows.

The stock decoder builds its mask by looking at position ids on the device, for packed sequences that Whisper never has: the
host waits there in every step until the encoder is done, and the decoder's many small kernels start late. An attention of
its own name is given no mask. The stock layer also copies queries, keys and values into another order of axes.
"""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.models.whisper.modeling_whisper import WhisperAttention

NAME = "sdpa_without_mask"


def _attend(
    module: WhisperAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention (batch x length x heads x width) over batch x heads x length x width; causal where a decoder looks at itself.

    Raises ValueError where a mask would be needed: then the answer would be wrong without a word.
    """
    causal = module.is_causal and query.shape[2] > 1
    if attention_mask is not None or (causal and query.shape[2] != key.shape[2]):
        raise ValueError(f"{NAME}: {query.shape[2]} queries on {key.shape[2]} keys need a mask; load the model with another attention")
    heard = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scaling, is_causal=causal)
    return heard.transpose(1, 2), None


def _forward(
    attention: WhisperAttention, hidden_states: torch.Tensor, key_value_states: torch.Tensor | None = None, **stock: Any
) -> tuple[torch.Tensor, None]:
    if any(stock.get(name) is not None for name in ("cache", "past_key_values", "attention_mask")):
        return type(attention).forward(attention, hidden_states, key_value_states, **stock)
    source = hidden_states if key_value_states is None else key_value_states
    projections = ((attention.q_proj, hidden_states), (attention.k_proj, source), (attention.v_proj, source))
    query, key, value = (
        project(states).unflatten(-1, (attention.num_heads, attention.head_dim)).transpose(1, 2) for project, states in projections
    )
    dropout = attention.dropout if attention.training else 0.0
    heard, _ = _attend(attention, query, key, value, None, scaling=attention.scaling, dropout=dropout)
    return attention.out_proj(heard.flatten(2)), None


def use_attention_without_mask(model: torch.nn.Module) -> None:
    """Makes every attention of a Whisper, with or without adapters, compute without a mask.

    Right where no row's decoder input has padding in front: in training it lies behind, where nothing looks, and
    generation here starts all rows alike.
    """
    AttentionInterface.register(NAME, _attend)
    model.set_attn_implementation(NAME)
    for module in model.modules():
        if isinstance(module, WhisperAttention):
            module.forward = MethodType(_forward, module)
