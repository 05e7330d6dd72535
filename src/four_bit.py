"""How do frozen 4-bit weights compute? By the stock layer, on inputs of the type that products have."""

import bitsandbytes as bnb
import torch


def keep_product_type(model: torch.nn.Module) -> int:
    """Makes the 4-bit linear layers of `model` give what every other layer gives; returns their number.

    The stock layer gives its input's type back. On a card autocast hands it the float32 of a layer norm, so activations
    between layers would be float32 and twice the size: the input is cast first. On processors with AVX512-BF16 it packs
    its weights in evaluation, once and for all, and from then on computes without a gradient for its input: switched off.
    """
    layers = [module for module in model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False
        layer.register_forward_pre_hook(_cast)
    return len(layers)


def _cast(layer: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    (hidden,) = inputs
    device_type = hidden.device.type
    return (hidden.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else hidden,)
