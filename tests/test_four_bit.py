"""4-bit layers: close to float32, in the products' type, and never without a gradient for what lies before them."""

import bitsandbytes as bnb
import bitsandbytes.nn.modules
import pytest
import torch

from device import find_strays, model_tensors
from four_bit import keep_product_type


def layer_pair(columns: int = 64, rows: int = 96, dtype=torch.float32) -> tuple[torch.nn.Linear, torch.nn.Module]:
    """A float32 layer and its 4-bit form, loaded as the recipe's `4bit` is."""
    torch.manual_seed(0)
    exact = torch.nn.Linear(columns, rows).requires_grad_(False)
    stored = torch.nn.Sequential(
        bnb.nn.Linear4bit(columns, rows, compute_dtype=dtype, compress_statistics=True, quant_type="nf4")
    ).to(dtype)
    stored[0].load_state_dict(exact.state_dict())
    stored = stored.to("cpu").requires_grad_(False)
    assert keep_product_type(stored) == 1
    return exact, stored


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value.double() - reference.double()).norm() / reference.double().norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_output_and_gradient_are_within_a_tenth_of_float32(dtype):
    exact, stored = layer_pair(dtype=dtype)
    own = torch.randn(4, 50, 64).to(dtype).requires_grad_()
    inputs = own.detach().float().requires_grad_()
    output, reference = stored(own), exact(inputs)
    assert output.dtype == dtype
    assert relative_error(output, reference) < 0.1
    direction = torch.randn_like(reference)
    gradient = torch.autograd.grad(reference, inputs, direction)[0]
    own_gradient = torch.autograd.grad(output, own, direction.to(dtype))[0]
    assert own_gradient.dtype == dtype
    assert relative_error(own_gradient, gradient) < 0.1


def test_autocast_decides_the_type_of_the_product_and_what_is_kept_for_backward():
    _, stored = layer_pair(dtype=torch.bfloat16)
    kept = []
    hidden = torch.randn(2, 5, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output = torch.nn.functional.gelu(stored(hidden))
    assert output.dtype == torch.bfloat16
    assert all(tensor.dtype != torch.float32 for tensor in kept if tensor.numel() >= hidden.numel())


def test_evaluating_packs_no_weights_which_would_then_train_without_a_gradient(monkeypatch):
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: True)
    monkeypatch.setattr(bitsandbytes.nn.modules, "_convert_weight_packed_for_cpu", lambda *_: pytest.fail("packed"))
    _, stored = layer_pair()
    with torch.no_grad():
        stored.eval()(torch.randn(2, 64))
    hidden = torch.randn(2, 64, requires_grad=True)
    assert stored.train()(hidden).grad_fn is not None


@pytest.mark.parametrize("hidden", ["absmax", "code", "offset", "state2.absmax", "state2.code"])
def test_scales_and_codes_that_4_bit_layers_hide_are_looked_at(hidden):
    _, stored = layer_pair()
    assert not find_strays(model_tensors(stored), "cpu")
    owner = stored[0].weight.quant_state
    *path, name = hidden.split(".")
    owner = getattr(owner, path[0]) if path else owner
    setattr(owner, name, getattr(owner, name).to("meta"))
    assert find_strays(model_tensors(stored), "cpu") == [f"0.quant_state.{hidden} on meta"]
