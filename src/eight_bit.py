"""How do frozen 8-bit weights compute? Stored as int8 codes, dequantised inside the layer to the type the products have.

The stock layer quantises the activations of every call and searches them for outlier columns, so a clip's result depends
on the clips beside it, the host waits for the device, and activations become float32. Frozen weights need none of this.
"""

from types import MethodType

import bitsandbytes as bnb
import torch
import torch.nn.functional as F

# Row-wise absolute maximum quantisation: code = round(weight / maximum * 127).
LARGEST_CODE = 127


def dequantize(codes: torch.Tensor, maxima: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight (out x in, of `dtype`) that int8 `codes` (out x in) and their rows' float32 `maxima` (out) stand for."""
    return torch.mul(codes, (maxima / LARGEST_CODE).unsqueeze(1)).to(dtype)


class _Product(torch.autograd.Function):
    """input @ weight.T, keeping only the codes for the backward pass: the dequantised weight lives for one product."""

    @staticmethod
    def forward(ctx, input: torch.Tensor, codes: torch.Tensor, maxima: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(codes, maxima)
        return F.linear(input, dequantize(codes, maxima, input.dtype), bias)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        codes, maxima = ctx.saved_tensors
        return gradient @ dequantize(codes, maxima, gradient.dtype), None, None, None


def _forward(layer: bnb.nn.Linear8bitLt, input: torch.Tensor) -> torch.Tensor:
    device_type = input.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else input.dtype
    owner = layer.weight if layer.weight.CB is not None else layer.state
    bias = None if layer.bias is None else layer.bias.to(dtype)
    return _Product.apply(input.to(dtype), owner.CB, owner.SCB, bias)


def use_dequantized_products(model: torch.nn.Module) -> int:
    """Makes every frozen 8-bit linear layer of `model` compute by dequantising; gives their number.

    The layers, their weights and their files stay the stock ones; only `forward` of each is replaced.
    """
    layers = [module for module in model.modules() if isinstance(module, bnb.nn.Linear8bitLt)]
    for layer in layers:
        layer.forward = MethodType(_forward, layer)
    return len(layers)
