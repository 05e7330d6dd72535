"""How do plain LoRA adapters compute? In the type of the layer's input and, where nothing drops out, as one operator with the
frozen product.

Without autocast the stock layer casts its input to the adapter's float32: the widest tensors of the model, twice as wide.
With autocast every norm and product between the layers is cast back and forth. Here neither is needed, and the adapter's
share is added in place, where the stock layer writes and reads another tensor as large as the result.
"""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer

from eight_bit import dequantize

_operators = torch.library.Library("whisper_ddp", "FRAGMENT")  # eight_bit.py defines the library
_operators.define(
    "adapted_product(Tensor input, Tensor stored, Tensor? scales, Tensor? bias, Tensor a, Tensor b, float scaling) -> (Tensor, Tensor)"
)
_operators.define(
    "adapted_gradients(Tensor gradient, Tensor input, Tensor inner, Tensor stored, Tensor? scales, Tensor a, Tensor b, float scaling)"
    " -> (Tensor, Tensor, Tensor)"
)


def _weight(stored: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return stored if scales is None else dequantize(stored, scales, dtype)


@torch.library.impl(_operators, "adapted_product", "CompositeExplicitAutograd")
def _product(
    input: torch.Tensor,
    stored: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """input @ weight.T + bias + scaling * input @ A.T @ B.T, and the inner input @ A.T."""
    rows = input.flatten(0, -2)
    inner = rows @ a.to(input.dtype).T
    result = F.linear(rows, _weight(stored, scales, input.dtype), bias)
    result.addmm_(inner, b.to(input.dtype).T, alpha=scaling)
    return result.view(*input.shape[:-1], len(stored)), inner


@torch.library.impl(_operators, "adapted_gradients", "CompositeExplicitAutograd")
def _gradients(
    gradient: torch.Tensor,
    input: torch.Tensor,
    inner: torch.Tensor,
    stored: torch.Tensor,
    scales: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of input, A and B; those of A and B in float32."""
    rows, given = input.flatten(0, -2), gradient.flatten(0, -2)
    through_b = given @ b.to(given.dtype)
    of_input = given @ _weight(stored, scales, given.dtype)
    of_input.addmm_(through_b, a.to(given.dtype), alpha=scaling)
    of_a = (through_b.T @ rows).to(a.dtype).mul_(scaling)
    of_b = (given.T @ inner).to(b.dtype).mul_(scaling)
    return of_input.view(input.shape), of_a, of_b


@torch.library.register_fake("whisper_ddp::adapted_product", lib=_operators)
def _(input, stored, scales, bias, a, b, scaling):
    return input.new_empty(*input.shape[:-1], stored.shape[0]), input.new_empty(input.shape[:-1].numel(), a.shape[0])


@torch.library.register_fake("whisper_ddp::adapted_gradients", lib=_operators)
def _(gradient, input, inner, stored, scales, a, b, scaling):
    return input.new_empty(input.shape), torch.empty_like(a), torch.empty_like(b)


class _Product(torch.autograd.Function):
    """The frozen product with its adapter; keeps input, codes and the narrow inner product for the backward pass."""

    @staticmethod
    def forward(ctx, input, stored, scales, bias, a, b, scaling: float) -> torch.Tensor:
        """The frozen product plus the scaled one of the adapter: ... x out."""
        result, inner = torch.ops.whisper_ddp.adapted_product(input, stored, scales, bias, a, b, scaling)
        ctx.save_for_backward(input, inner, stored, scales, a, b)
        ctx.scaling = scaling
        return result

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the input and of both matrices of the adapter."""
        input, inner, stored, scales, a, b = ctx.saved_tensors
        of_input, of_a, of_b = torch.ops.whisper_ddp.adapted_gradients(
            gradient, input, inner, stored, scales, a, b, ctx.scaling
        )
        return of_input, None, None, None, of_a, of_b, None


def is_plain(layer: LoraLayer) -> bool:
    """Whether every adapter of a layer is B @ A on a linear layer and nothing more: no DoRA, no bias of its own."""
    linear = isinstance(layer.get_base_layer(), torch.nn.Linear)
    return linear and not layer.lora_variant and not any(layer.lora_bias.values()) and not layer.lora_embedding_A


def _forward(layer: LoraLayer, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if layer.disable_adapters or layer.merged:
        return type(layer).forward(layer, input, *args, **kwargs)
    base, names = layer.base_layer, layer.active_adapters
    stored, scales = getattr(base, "codes", base.weight), getattr(base, "scales", None)
    drops = layer.training and any(isinstance(layer.lora_dropout[name], torch.nn.Dropout) for name in names)
    if len(names) == 1 and not drops and (scales is not None or stored.dtype == input.dtype):
        a, b = layer.lora_A[names[0]].weight, layer.lora_B[names[0]].weight
        return _Product.apply(input, stored, scales, base.bias, a, b, layer.scaling[names[0]])
    result = base(input, *args, **kwargs)
    for name in names:
        inner = F.linear(layer.lora_dropout[name](input), layer.lora_A[name].weight.to(input.dtype))
        result = result + F.linear(inner, layer.lora_B[name].weight.to(input.dtype)) * layer.scaling[name]
    return result


def compute_in_one_type(model: torch.nn.Module) -> bool:
    """Makes plain LoRA layers compute in their input's type, if nothing else is trained; tells whether it did.

    Then the model needs no autocast. Else (DoRA, whole modules or biases trained, full fine-tuning) nothing is changed.
    """
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    if not layers or not all(is_plain(layer) for layer in layers):
        return False
    plain = {id(parameter) for layer in layers for part in (layer.lora_A, layer.lora_B) for parameter in part.parameters()}
    if any(parameter.requires_grad and id(parameter) not in plain for parameter in model.parameters()):
        return False
    for layer in layers:
        layer.forward = MethodType(_forward, layer)
    return True
