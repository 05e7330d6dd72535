"""Plain adapters that compute in one type: equal to the stock layers, narrow, and only where nothing else is trained."""

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, get_peft_model

from eight_bit import use_dequantized_products
from lora_products import compute_in_one_type


def adapted(*, quantized: bool = False, dtype: torch.dtype = torch.float32, **lora) -> torch.nn.Module:
    """One linear layer (24 to 40) with an adapter whose B is not zero; frozen weights 8-bit or of `dtype`."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(24, 40)
    if quantized:
        stored = bnb.nn.Linear8bitLt(24, 40, has_fp16_weights=False)
        stored.load_state_dict(layer.state_dict())
        layer = stored.to("cpu")
    model = torch.nn.Sequential(layer).to(dtype).requires_grad_(False)
    use_dequantized_products(model)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["0"], **lora))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape) * 0.1
    return model


def outcome(model: torch.nn.Module, rows: torch.Tensor) -> list[torch.Tensor]:
    """Output and the gradients of input, A and B."""
    rows = rows.clone().requires_grad_()
    output = model(rows)
    output.float().square().sum().backward()
    return [output, rows.grad, *(parameter.grad for parameter in model.parameters() if parameter.requires_grad)]


@pytest.mark.parametrize("quantized", [False, True])
def test_output_and_gradients_equal_the_stock_layer(quantized):
    rows = torch.randn(3, 7, 24)
    stock = outcome(adapted(quantized=quantized), rows)
    model = adapted(quantized=quantized)
    assert compute_in_one_type(model)
    for value, reference in zip(outcome(model, rows), stock, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.02), (torch.float16, 0.003)])
def test_half_precision_is_close_to_float32(quantized, dtype, bound):
    rows = torch.randn(3, 7, 24)
    reference = outcome(adapted(quantized=quantized), rows)
    model = adapted(quantized=quantized, dtype=dtype)
    assert compute_in_one_type(model)
    found = outcome(model, rows.to(dtype))
    assert [value.dtype for value in found] == [dtype, dtype, torch.float32, torch.float32]
    for value, exact in zip(found, reference, strict=True):
        assert (value.float() - exact).norm() / exact.norm() < bound


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_nothing_kept_for_backward_is_wide_float32_or_a_dequantised_weight(dropout):
    model = adapted(quantized=True, dtype=torch.bfloat16, lora_dropout=dropout)
    assert compute_in_one_type(model)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        model(torch.randn(50, 24, dtype=torch.bfloat16, requires_grad=True))
    assert kept
    assert all(tensor.dtype == torch.int8 for tensor in kept if tensor.shape == (40, 24))
    assert not [tensor.shape for tensor in kept if tensor.dtype == torch.float32 and tensor.shape[0] == 50]


def test_dropout_is_for_training_alone():
    model = adapted(lora_dropout=0.5)
    rows = torch.randn(5, 24)
    stock = adapted(lora_dropout=0.5).eval()(rows)
    assert compute_in_one_type(model)
    assert not torch.equal(model.train()(rows), model.train()(rows))
    torch.testing.assert_close(model.eval()(rows), stock)


@pytest.mark.parametrize("lora", [{"use_dora": True}, {"bias": "lora_only"}, {"lora_bias": True}])
def test_what_is_more_than_plain_stays_the_stock_layer(lora):
    model = adapted(**lora)
    assert not compute_in_one_type(model)
    assert "forward" not in vars(model.base_model.model[0])


def test_a_model_without_adapters_stays_as_it_is():
    assert not compute_in_one_type(torch.nn.Linear(2, 2))


def test_a_disabled_adapter_gives_the_frozen_product():
    model = adapted()
    assert compute_in_one_type(model)
    rows = torch.randn(5, 24)
    with model.disable_adapter():
        torch.testing.assert_close(model(rows), model.base_model.model[0].base_layer(rows))


def test_no_rows_give_no_rows():
    model = adapted()
    assert compute_in_one_type(model)
    assert model(torch.empty(0, 7, 24)).shape == (0, 7, 40)
