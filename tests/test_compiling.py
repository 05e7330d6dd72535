"""Layers compiled and checkpointed: same numbers, few compilations, nothing of a frozen weight's size kept.

The graphs are those that a GPU gets; only the last stage, the making of kernels, is left out here, since it takes minutes.
"""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from launching import train_here, write_recipe
from peft import LoraConfig, PeftModel, get_peft_model
from toy import build_whisper, write_speech
from transformers import BitsAndBytesConfig, WhisperForConditionalGeneration

import compiling
from lora_products import compute_in_one_type
from attention import use_attention_without_mask
from eight_bit import use_dequantized_products

WIDTH, INNER = 16, 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_whisper(tmp_path_factory.mktemp("toy"), encoder_ffn_dim=INNER, decoder_ffn_dim=INNER, encoder_layers=3, max_source_positions=1500)


def build(folder, *, compiled: bool, checkpointed: bool, dropout: float = 0.0) -> torch.nn.Module:
    """An 8-bit toy with adapters, arranged as for training; B is not zero."""
    model = WhisperForConditionalGeneration.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True), device_map={"": "cpu"}
    )
    use_dequantized_products(model)
    model.requires_grad_(False)
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=dropout))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    use_attention_without_mask(model)
    compiling.arrange_layers(model, compiled=compiled, checkpointed=checkpointed, batch_size=2)
    assert compute_in_one_type(model)
    return model.train()


def batch(length: int = 32) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"input_features": torch.randn(2, 80, 3000), "decoder_input_ids": torch.randint(0, 200, (2, length))}


def losses_and_gradients(model: torch.nn.Module, **inputs: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(**inputs, use_cache=False).logits.square().mean()
    loss.backward()
    return [loss, *(parameter.grad for parameter in model.parameters() if parameter.requires_grad)]


@dataclass
class Trained:
    """What a few steps showed: loss and gradients of the first, tensors kept by a forward pass, graphs after each pass."""

    first: list[torch.Tensor]
    kept: list[torch.Tensor]
    graphs: list[int]
    breaks: dict


def train(folder, *, compiled: bool, checkpointed: bool) -> Trained:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
        model = build(folder, compiled=compiled, checkpointed=checkpointed)
        counted = torch._dynamo.utils.counters["stats"]
        first = losses_and_gradients(model, **batch(32))
        graphs = [counted["unique_graphs"]]
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
            model(**batch(32), use_cache=False)
        model.eval()
        with torch.no_grad():
            model(**batch(9), use_cache=False)
            model.base_model.model.generate(batch()["input_features"], max_new_tokens=3)
        model.train()
        graphs.append(counted["unique_graphs"])
        for length, rows in ((64, 2), (32, 2), (64, 1)):
            losses_and_gradients(model, **{name: tensor[:rows] for name, tensor in batch(length).items()})
            graphs.append(counted["unique_graphs"])
        breaks = dict(torch._dynamo.utils.counters["graph_break"])
    torch._dynamo.reset()
    return Trained([tensor.detach().clone() for tensor in first], kept, graphs, breaks)


@pytest.fixture(scope="module")
def plain(folder):
    return losses_and_gradients(build(folder, compiled=False, checkpointed=False), **batch())


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "checkpointed"])
def trained(folder, request):
    return train(folder, compiled=True, checkpointed=request.param)


def test_compiled_loss_and_gradients_equal_those_of_the_plain_model(trained, plain):
    for value, reference in zip(trained.first, plain, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-4, atol=1e-6)


def test_compiled_layers_keep_frozen_weights_in_8_bit(trained):
    frozen = {(WIDTH, WIDTH), (INNER, WIDTH), (WIDTH, INNER)}
    weights = [tensor for tensor in trained.kept if tuple(tensor.shape) in frozen]
    assert weights
    assert {tensor.dtype for tensor in weights} == {torch.int8}


def test_one_graph_a_side_and_length_none_broken_and_none_for_evaluation_or_a_smaller_batch(trained):
    assert not trained.breaks
    assert trained.graphs == [2, 2, 3, 3, 3]


def test_checkpointed_layers_give_the_same_and_keep_their_input_alone(folder, plain):
    model = build(folder, compiled=False, checkpointed=True)
    for value, reference in zip(losses_and_gradients(model, **batch()), plain, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-4, atol=1e-6)
    kept: dict[int, torch.Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.update({tensor.data_ptr(): tensor}) or tensor, lambda tensor: tensor
    ):
        model(**batch(), use_cache=False)
    assert not [tensor.shape for tensor in kept.values() if tensor.shape[-1] == INNER]


def test_dropout_in_a_checkpointed_layer_is_repeated_as_it_was(folder):
    model = build(folder, compiled=False, checkpointed=True, dropout=0.5)
    plain = build(folder, compiled=False, checkpointed=False, dropout=0.5)
    results = []
    for one in (model, plain):
        torch.manual_seed(3)
        results.append(losses_and_gradients(one, **batch()))
    for value, reference in zip(*results, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-4, atol=1e-6)


def test_names_of_weights_stay_those_of_the_stock_model(folder):
    plain = build(folder, compiled=False, checkpointed=False).state_dict()
    assert list(build(folder, compiled=True, checkpointed=True).state_dict()) == list(plain)


@pytest.mark.parametrize(
    ("length", "most", "padded"),
    [(1, 448, 32), (32, 448, 32), (33, 448, 64), (129, 448, 256), (448, 448, 448), (90, 100, 100), (500, 512, 512)],
)
def test_labels_are_padded_to_few_lengths_within_the_models_positions(length, most, padded):
    assert compiling.padded_length(length, most=most) == padded


@pytest.mark.parametrize("lora", [{"r": 4}, None], ids=["adapters", "all weights"])
def test_a_compiled_run_leaves_what_the_stock_library_loads(tmp_path, monkeypatch, lora):
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    build_whisper(tmp_path / "model")
    write_speech(tmp_path, ["one", "two", "three", "four", "five"])
    write_speech(tmp_path, ["six"], name="dev")
    training = {"torch_compile": True, "gradient_checkpointing": True, "per_device_train_batch_size": 2, "max_steps": 3, "eval_steps": 3, "save_steps": 3}
    assert train_here(write_recipe(tmp_path, lora=lora, training=training))["train"]["steps"] == 3
    torch._dynamo.reset()
    if lora is None:
        loaded, info = WhisperForConditionalGeneration.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not any(info.values())
        assert loaded.proj_out.weight is loaded.model.decoder.embed_tokens.weight
    else:
        base = WhisperForConditionalGeneration.from_pretrained(tmp_path / "model")
        loaded = PeftModel.from_pretrained(base, tmp_path / "out")
        learnt = [weight for name, weight in loaded.named_parameters() if "lora_B" in name]
        assert learnt and all(weight.any() for weight in learnt)
