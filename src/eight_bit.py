"""How do frozen 8-bit weights compute? Stored as int8 codes, dequantised inside the layer to the type of its input.

The stock layer quantises the activations of every call and searches them for outlier columns, so a clip's result depends
on the clips beside it, the host waits for the device, and activations become float32. Frozen weights need none of this.

Both products are operators of their own: a compiler sees neither the dequantised weight nor that forward and backward
make the same one, so it cannot keep it between them.
"""

from types import MethodType

import bitsandbytes as bnb
import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # builds of torch without CUDA
    triton = None

# Row-wise absolute maximum quantisation: code = round(weight / maximum * 127).
LARGEST_CODE = 127
BLOCK = 4096  # weights that one program of the kernel makes

if triton is not None:

    @triton.jit
    def _dequantize_block(codes, scales, weight, count, columns, block: tl.constexpr):
        places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = places < count
        values = tl.load(codes + places, mask=inside).to(tl.float32) * tl.load(scales + places // columns, mask=inside)
        tl.store(weight + places, values.to(weight.dtype.element_ty), mask=inside)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight (out x in, of `dtype`) that int8 `codes` (out x in) and their rows' float32 `scales` (out) stand for.

    Multiplied in float32 and rounded once.
    """
    weight = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if triton is None or not codes.is_cuda:
        return torch.mul(codes, scales.unsqueeze(1), out=weight)
    # Three times as fast as torch's kernel for mixed types.
    _dequantize_block[(triton.cdiv(codes.numel(), BLOCK),)](codes, scales, weight, codes.numel(), codes.shape[1], BLOCK, num_warps=8)
    return weight


_operators = torch.library.Library("whisper_ddp", "DEF")
_operators.define("product_8bit(Tensor input, Tensor codes, Tensor scales, Tensor? bias) -> Tensor")
_operators.define("input_gradient_8bit(Tensor gradient, Tensor codes, Tensor scales) -> Tensor")


@torch.library.impl(_operators, "product_8bit", "CompositeExplicitAutograd")
def _product(input: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(input, dequantize(codes, scales, input.dtype), bias)


@torch.library.impl(_operators, "input_gradient_8bit", "CompositeExplicitAutograd")
def _input_gradient(gradient: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return gradient @ dequantize(codes, scales, gradient.dtype)


@torch.library.register_fake("whisper_ddp::product_8bit", lib=_operators)
def _(input: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return input.new_empty(*input.shape[:-1], codes.shape[0])


@torch.library.register_fake("whisper_ddp::input_gradient_8bit", lib=_operators)
def _(gradient: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return gradient.new_empty(*gradient.shape[:-1], codes.shape[1])


class _Product(torch.autograd.Function):
    """input @ weight.T + bias, keeping only the codes for the backward pass: the dequantised weight lives for one product."""

    @staticmethod
    def forward(ctx, input: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The product of `input` (... x in) with the 8-bit weight, plus the bias: ... x out."""
        ctx.save_for_backward(codes, scales)
        return torch.ops.whisper_ddp.product_8bit(input, codes, scales, bias)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """The gradient of the input alone; codes, scales and bias are frozen."""
        codes, scales = ctx.saved_tensors
        return torch.ops.whisper_ddp.input_gradient_8bit(gradient, codes, scales), None, None, None


def _forward(layer: bnb.nn.Linear8bitLt, input: torch.Tensor) -> torch.Tensor:
    device_type = input.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else input.dtype
    bias = None if layer.bias is None else layer.bias.to(dtype)
    return _Product.apply(input.to(dtype), layer.codes, layer.scales, bias)


def use_dequantized_products(model: torch.nn.Module) -> int:
    """Makes every frozen 8-bit linear layer of `model` compute by dequantising; gives their number.

    The layers, their weights and their files stay the stock ones; only `forward` of each is replaced. Codes and scales
    are plain buffers beside it, never saved and the codes on the same memory, since a compiler cannot look into the stock state.
    """
    layers = [module for module in model.modules() if isinstance(module, bnb.nn.Linear8bitLt)]
    for layer in layers:
        owner = layer.weight if layer.weight.CB is not None else layer.state
        layer.register_buffer("codes", owner.CB, persistent=False)
        layer.register_buffer("scales", owner.SCB / LARGEST_CODE, persistent=False)
        layer.forward = MethodType(_forward, layer)
    return len(layers)
