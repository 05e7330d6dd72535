"""The memory of a card is counted before the weights are loaded: term by term as tensors are held, and as cards were measured."""

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

import memory_plan
from adapters import build_lora_config
from attention import use_attention_without_mask
from config import load_recipe
from device import Place, model_tensors
from launching import ROOT, write_recipe
from lora_products import compute_in_one_type
from memory_plan import MemoryCounter, MemoryPlan, describe_memory
from model import load_model, read_base_model
from peft import get_peft_model
from toy import build_whisper

GIB = 2**30


def shape_of(*, width: int = 1280, layers: int = 32, decoder_layers: int = 32, heads: int = 20, vocabulary: int = 51866, **others) -> WhisperConfig:
    return WhisperConfig(
        vocab_size=vocabulary,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=decoder_layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        **others,
    )


SHAPES = {
    "large-v3-8bit-2xt4": shape_of(num_mel_bins=128),
    "large-v3-4bit-6gb": shape_of(num_mel_bins=128),
    "large-v3-turbo-8bit": shape_of(num_mel_bins=128, decoder_layers=4),
    "small-full": shape_of(width=768, layers=12, decoder_layers=12, heads=12, vocabulary=51865),
}


@cache
def count(recipe: str, *words: str, processes: int = 1, length: int = 64) -> MemoryCounter:
    known = load_recipe(["--config", str(ROOT / "configs" / f"{recipe}.yaml"), *words])
    sizes = dict(world_size=processes, label_length=length, generated_length=225)
    return MemoryCounter(known, SHAPES[recipe], compute_type=torch.bfloat16, **sizes)


COMPILED = ("--training.torch_compile=true",)
IN_16_BIT = (*COMPILED, "--model.quantization=none")


@pytest.mark.parametrize(
    ("gib", "recipe", "words", "batch", "checkpointed"),
    [
        (68.2, "large-v3-8bit-2xt4", COMPILED, 40, False),
        (69.5, "large-v3-8bit-2xt4", IN_16_BIT, 40, False),
        (11.8, "large-v3-8bit-2xt4", COMPILED, 32, True),
        (5.1, "large-v3-8bit-2xt4", (), 16, True),
        (2.05, "large-v3-4bit-6gb", (), 4, True),
        (4.17, "large-v3-turbo-8bit", (), 16, True),
        (6.01, "small-full", (), 8, True),
        # A bare loop without the trainer.
        (27.4, "large-v3-8bit-2xt4", (), 16, False),
        (55.9, "large-v3-8bit-2xt4", COMPILED, 32, False),
        (81.3, "large-v3-8bit-2xt4", COMPILED, 48, False),
        (7.7, "large-v3-8bit-2xt4", (), 32, True),
    ],
)
def test_a_training_step_takes_what_was_measured_within_15_percent(gib, recipe, words, batch, checkpointed):
    assert count(recipe, *words).plan(batch, 1, checkpointed=checkpointed).training / GIB == pytest.approx(gib, rel=0.15)


def test_a_whole_run_that_scores_16_clips_takes_what_was_measured():
    plan = count("large-v3-8bit-2xt4").plan(16, 16, checkpointed=True)
    assert plan.total == plan.scoring and plan.total / GIB == pytest.approx(6.5, rel=0.15)


def test_weights_are_counted_by_how_they_are_stored():
    width, layers, rank = 1280, 32, 32
    linear = layers * (4 * width**2 + 8 * width**2) + layers * (8 * width**2 + 8 * width**2)
    rows = layers * (4 * width + 5 * width) + layers * (8 * width + 5 * width)
    biases = layers * ((3 + 5) * width) + layers * ((6 + 5) * width)
    norms = 2 * width * (layers * 2 + layers * 3 + 2)
    others = 51866 * width + (1500 + 448) * width + 3 * width * (128 + width) + 2 * width + biases + norms
    adapters = (2 * layers + 4 * layers) * 2 * width * rank
    assert count("large-v3-8bit-2xt4").weights == (linear + 8 * rows + 2 * others, 12 * adapters, 4 * adapters)
    assert count("large-v3-8bit-2xt4", *IN_16_BIT).weights[0] == 2 * (linear + others)
    assert count("large-v3-4bit-6gb").weights[0] == pytest.approx(linear * (0.5 + 1 / 64) + 2 * others, rel=1e-3)
    assert count("large-v3-8bit-2xt4").dequantized == 2 * 4 * width**2


def test_several_processes_hold_a_second_copy_of_the_gradients():
    one, two = (count("large-v3-turbo-8bit", processes=number).weights for number in (1, 2))
    assert two == (one[0], one[1], 2 * one[2])


@pytest.mark.parametrize("quantization", ["8bit", "4bit", "none"])
def test_loaded_weights_take_what_was_counted(tmp_path, quantization):
    build_whisper(tmp_path / "model", d_model=256, encoder_ffn_dim=1024, decoder_ffn_dim=1024)
    recipe = load_recipe(["--config", str(write_recipe(tmp_path)), f"--model.quantization={quantization}"])
    base = read_base_model(recipe.model, max_new_tokens=4, num_beams=1)
    model = load_model(recipe, base, Place("cpu"), compute_type=torch.float32)
    frozen = {tensor.data_ptr(): tensor.numel() * tensor.itemsize for _, tensor in model_tensors(model) if not tensor.requires_grad}
    counter = MemoryCounter(recipe, base.config, compute_type=torch.float32, world_size=1, label_length=4, generated_length=4)
    assert counter.weights[0] == pytest.approx(sum(frozen.values()), rel=0.01)


# --- what a layer keeps ------------------------------------------------------------------------------------------

TOY = shape_of(width=64, layers=1, decoder_layers=1, heads=2, vocabulary=300, max_source_positions=50, pad_token_id=0)
LORA = ("--lora.r=4",)


def counter_of(folder: Path, *words: str) -> MemoryCounter:
    recipe = load_recipe(["--config", str(write_recipe(folder)), *words])
    return MemoryCounter(recipe, TOY, compute_type=torch.float32, world_size=1, label_length=7, generated_length=5)


def held_by_autograd(run, held_elsewhere: list[torch.Tensor]) -> int:
    """Bytes of all tensors that a forward pass saves, each memory once."""
    known = {tensor.untyped_storage().data_ptr() for tensor in held_elsewhere}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    assert result.requires_grad
    return sum(tensor.numel() * tensor.itemsize for tensor in saved.values())


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize(
    "words",
    [
        LORA,
        (*LORA, "--lora.target_modules=[k_proj]"),
        (*LORA, "--lora.target_modules=[q_proj,k_proj,v_proj,out_proj,fc1,fc2]"),
        (*LORA, "--lora.lora_dropout=0.5", "--lora.target_modules=[q_proj,k_proj,fc2]"),
        ("--lora=null",),
    ],
    ids=["queries and values", "keys", "everything", "dropout", "full"],
)
def test_a_layer_keeps_what_autograd_saves(tmp_path, monkeypatch, side, words):
    monkeypatch.setattr(memory_plan, "MASK_BYTES", 4)  # a CPU keeps numbers
    counter = counter_of(tmp_path, *words)
    model = WhisperForConditionalGeneration(TOY).train()
    if counter.recipe.lora is not None:
        model.requires_grad_(False)
        model = get_peft_model(model, build_lora_config(counter.recipe.lora))
    use_attention_without_mask(model)
    compute_in_one_type(model)
    layer = dict(zip(("encoder", "decoder"), memory_plan.find_sides(model), strict=True))[side].layers[0]
    length = 50 if side == "encoder" else 7
    states, heard = (torch.randn(3, size, 64, requires_grad=True) for size in (length, 50))
    others = {} if side == "encoder" else {"encoder_hidden_states": heard, "use_cache": False}
    saved = held_by_autograd(lambda: layer(states, None, **others), [*model.parameters(), heard])
    shaped = dict(zip(("encoder", "decoder"), memory_plan.find_sides(counter.shape), strict=True))[side].layers[0]
    assert counter.count_layer(shaped, 3, length)[0] == pytest.approx(saved, rel=0.01)


def test_checkpointing_holds_the_input_of_a_layer_and_compiled_what_attention_gave(tmp_path):
    states, sums = 4 * 3 * 50 * 64, 4 * 3 * 50 * 2
    plain, compiled = counter_of(tmp_path), counter_of(tmp_path, *COMPILED)
    assert plain.count_layer(plain.encoder.layers[0], 3, 50)[1] == states
    assert compiled.count_layer(compiled.encoder.layers[0], 3, 50)[1] == 2 * states + sums
    tokens, sums = 4 * 3 * 7 * 64, 4 * 3 * 7 * 2
    assert compiled.count_layer(compiled.decoder.layers[0], 3, 7)[1] == 3 * tokens + 2 * sums


def test_attention_that_is_not_fused_keeps_a_number_for_each_pair_of_positions(tmp_path):
    fused, eager = counter_of(tmp_path), counter_of(tmp_path, "--model.attn_implementation=eager")
    kept = [counter.count_layer(counter.encoder.layers[0], 3, 50)[0] for counter in (fused, eager)]
    assert kept[1] - kept[0] == 4 * 3 * 2 * 50 * 50 - 4 * 3 * 50 * 2


def test_the_cache_holds_keys_and_values_of_what_was_heard_and_said_for_each_beam(tmp_path):
    one, five = counter_of(tmp_path), counter_of(tmp_path, "--training.generation_num_beams=5")
    grown = five.count_evaluation(16) - 16 * 4 * (2 * 64 * 5 * (50 + 5) + 50 * 64 * 6 + 7 * 300)
    assert grown == 0 and one.count_evaluation(16) < five.count_evaluation(16)


def test_a_cache_takes_what_was_counted(tmp_path):
    counter = counter_of(tmp_path, "--training.generation_num_beams=20")
    model = WhisperForConditionalGeneration(TOY).eval()
    with torch.no_grad():
        cache = model(encoder_outputs=(torch.randn(60, 50, 64),), decoder_input_ids=torch.ones(60, 5, dtype=torch.long), use_cache=True).past_key_values
    layers = [layer for part in (cache.self_attention_cache, cache.cross_attention_cache) for layer in part.layers]
    held = sum(tensor.numel() * tensor.itemsize for layer in layers for tensor in (layer.keys, layer.values))
    assert counter.count_evaluation(3) - 3 * 4 * (50 * 64 * 21 + 7 * 300) == held


# --- what changes it ---------------------------------------------------------------------------------------------

TURBO = "large-v3-turbo-8bit"


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ((), ("--model.quantization=none",)),
        (("--model.quantization=4bit",), ()),
        (("--model.freeze_encoder=true",), ()),
        ((), ("--lora.r=256",)),
        ((), ("--lora.use_dora=true", "--model.quantization=none")),  # which needs autocast
        ((), ("--lora.target_modules=[q_proj,k_proj,v_proj,fc1,fc2]",)),
    ],
)
def test_what_takes_more_memory_is_told_to_take_more(less, more):
    for checkpointed in (False, True):
        assert count(TURBO, *less).plan(4, 4, checkpointed=checkpointed).training < count(TURBO, *more).plan(4, 4, checkpointed=checkpointed).training


def test_larger_batches_and_longer_labels_take_more_and_checkpointing_less():
    sizes = [count(TURBO).plan(size, size, checkpointed=True) for size in (1, 2, 8, 64)]
    assert sorted(sizes, key=lambda plan: plan.training) == sorted(sizes, key=lambda plan: plan.scoring) == sizes
    assert count(TURBO, length=448).plan(8, 8, checkpointed=True).training > sizes[2].training
    assert count(TURBO).plan(8, 8, checkpointed=False).training > 2 * sizes[2].training


# --- telling it --------------------------------------------------------------------------------------------------


def tell(recipe: str, gib: float, *words: str) -> list[str]:
    return describe_memory(count(recipe, *words), total=round(gib * GIB))


def test_the_sum_is_told_beside_what_the_card_has():
    (line,) = tell(TURBO, 15.0)
    assert line.startswith("memory of a card: about 4.2 GiB (weights 0.8, adapters and optimiser 0.1, activations 3.")
    assert line.endswith(", allocator 0.2; while scoring 1.7) of 15.0")


def test_where_scoring_takes_more_it_is_that_sum_that_is_told():
    (line,) = tell("large-v3-4bit-6gb", 6.0)
    assert line.startswith("memory of a card: about 3.4 GiB while scoring (weights 0.8") and "cache and activations 2.2" in line
    assert line.endswith("; while training 1.9) of 6.0")


def test_a_card_that_is_too_small_for_training_is_warned_of_with_what_would_fit():
    words = ("--training.gradient_checkpointing=false",)
    _, line = tell("large-v3-8bit-2xt4", 14.6, *words)
    assert line == (
        "warning: a training step may take 29.1 GiB of a card that has 14.6: --training.per_device_train_batch_size 4 or "
        "--training.gradient_checkpointing true would fit"
    )
    counter = count("large-v3-8bit-2xt4", *words)
    fits, no_more = (counter.plan(size, 1, checkpointed=False).training <= 0.95 * 14.6 * GIB for size in (4, 8))
    assert fits and not no_more  # 5 to 7 do not divide the global batch of 32


def test_what_would_fit_is_told_with_both_settings_or_without_any():
    _, line = tell("large-v3-8bit-2xt4", 3.0, "--training.gradient_checkpointing=false", "--training.per_device_eval_batch_size=1")
    assert line.endswith("of a card that has 3.0: --training.gradient_checkpointing true --training.per_device_train_batch_size 4 would fit")
    _, line, _ = tell("large-v3-8bit-2xt4", 1.0)
    assert line.endswith("of a card that has 1.0: a smaller model or model.quantization: 4bit is needed")


def test_a_card_that_is_too_small_for_scoring_alone_is_warned_of():
    _, line = tell("large-v3-4bit-6gb", 3.0)
    assert line == "warning: scoring may take 3.4 GiB of a card that has 3.0: --training.per_device_eval_batch_size 6 would fit"


@pytest.mark.parametrize(("total", "lines"), [(1000, 2), (1052, 2), (1053, 1), (2000, 1)])
def test_from_95_percent_of_a_card_on_it_is_warned(monkeypatch, total, lines):
    plan = MemoryPlan(weights=0, trained=0, gradients=0, kept=1000, working=0, evaluation=0)
    monkeypatch.setattr(MemoryCounter, "plan", lambda *_, **__: plan)
    monkeypatch.setattr(memory_plan, "ALLOCATOR_SHARE", 0.0)
    assert len(describe_memory(count(TURBO), total=total)) == lines
