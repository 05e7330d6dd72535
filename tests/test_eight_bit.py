"""8-bit layers that dequantise: right, independent of the batch, and nothing of the weight's size kept for backward."""

import bitsandbytes as bnb
import pytest
import torch

from eight_bit import use_dequantized_products


def layer_pair(columns: int = 64, rows: int = 96) -> tuple[torch.nn.Linear, torch.nn.Module]:
    """A float32 layer and its 8-bit form."""
    torch.manual_seed(0)
    exact = torch.nn.Linear(columns, rows).requires_grad_(False)
    stored = torch.nn.Sequential(bnb.nn.Linear8bitLt(columns, rows, has_fp16_weights=False))
    stored[0].load_state_dict(exact.state_dict())
    stored = stored.to("cpu").requires_grad_(False)
    assert use_dequantized_products(stored) == 1
    return exact, stored


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value.double() - reference.double()).norm() / reference.double().norm()).item()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 0.009), (torch.bfloat16, 0.012), (torch.float16, 0.009)])
def test_output_and_gradient_are_close_to_float32(dtype, bound):
    exact, stored = layer_pair()
    inputs = [torch.randn(4, 50, 64).requires_grad_() for _ in range(1)] * 2
    reference = exact(inputs[0])
    gradient = torch.autograd.grad(reference.square().sum(), inputs[0])[0]
    own = inputs[0].detach().to(dtype).requires_grad_()
    output = stored(own)
    assert output.dtype == dtype
    assert relative_error(output, reference) < bound
    own_gradient = torch.autograd.grad(output.float().square().sum(), own)[0]
    assert own_gradient.dtype == dtype
    assert relative_error(own_gradient, gradient) < 2 * bound


def test_autocast_decides_the_type_of_the_product():
    _, stored = layer_pair()
    with torch.autocast("cpu", torch.bfloat16):
        assert stored(torch.randn(2, 64)).dtype == torch.bfloat16


def test_a_row_does_not_depend_on_the_rows_beside_it():
    _, stored = layer_pair()
    inputs = torch.randn(8, 64)
    beside_outlier = inputs.clone()
    beside_outlier[1, 3] = 1000.0
    torch.testing.assert_close(stored(beside_outlier)[0], stored(inputs)[0], rtol=0, atol=0)


def test_no_tensor_kept_for_backward_is_a_dequantised_weight():
    _, stored = layer_pair()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        stored(torch.randn(2, 64, requires_grad=True))
    assert kept
    assert all(tensor.dtype == torch.int8 for tensor in kept if tensor.shape == (96, 64))
