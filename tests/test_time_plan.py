"""The time of training is a guess from operations counted, as torch counts them, and one product timed on this device."""

import pytest
import torch
from peft import get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import WhisperConfig, WhisperForConditionalGeneration

import time_plan
from adapters import build_lora_config, build_shape
from config import load_recipe
from launching import ROOT, write_recipe
from time_plan import count_operations, describe_seconds, describe_time, measure_products

LARGE = WhisperConfig(
    vocab_size=51866,
    num_mel_bins=128,
    d_model=1280,
    encoder_layers=32,
    decoder_layers=32,
    encoder_attention_heads=20,
    decoder_attention_heads=20,
    encoder_ffn_dim=5120,
    decoder_ffn_dim=5120,
)
# Wide for its length, since attention by plain products goes back with four of them where the fused kernel needs five.
TOY = WhisperConfig(
    vocab_size=300,
    num_mel_bins=80,
    d_model=128,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=512,
    decoder_ffn_dim=512,
    max_source_positions=20,
    pad_token_id=0,
    decoder_start_token_id=0,
    eos_token_id=0,
    attn_implementation="eager",
)


# Operations counted although the first layer's queries, keys and values need no gradient of their input.
OF_ENCODER, OF_DECODER = 3 * 2 * 20 * 128**2, 3 * 2 * 10 * 128**2


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (["--lora.r=4"], OF_ENCODER + OF_DECODER),
        (["--lora.r=4", "--lora.target_modules=.*decoder.*(q_proj|v_proj|fc1)"], OF_DECODER),
        (["--lora.r=4", "--model.freeze_encoder=true"], OF_DECODER),
        (["--lora=null"], 0),
        (["--lora=null", "--model.freeze_encoder=true"], 0),
    ],
    ids=["adapters", "decoder's adapters", "adapters, encoder frozen", "full", "full, encoder frozen"],
)
def test_operations_are_those_that_torch_counts(tmp_path, words, more):
    recipe = load_recipe(["--config", str(write_recipe(tmp_path)), *words])
    model = WhisperForConditionalGeneration(TOY)
    if recipe.lora is not None:
        model.requires_grad_(False)
        model = get_peft_model(model, build_lora_config(recipe.lora, freeze_encoder=recipe.model.freeze_encoder))
    elif recipe.model.freeze_encoder:
        model.model.encoder.requires_grad_(False)
    with FlopCounterMode(display=False) as counted:
        model(input_features=torch.randn(1, 80, 40), decoder_input_ids=torch.ones(1, 10, dtype=torch.long)).logits.sum().backward()
    shape = build_shape(recipe, TOY)
    operations = count_operations(shape, TOY, label_length=10, checkpointed=False, compiled=False)
    assert operations - more == pytest.approx(counted.get_total_flops(), rel=0.01)


@pytest.fixture(scope="module")
def large() -> torch.nn.Module:
    return build_shape(load_recipe(["--config", str(ROOT / "configs" / "large-v3-8bit-2xt4.yaml")]), LARGE)


def test_a_window_of_large_v3_is_what_its_formula_says(large):
    width, heard, tokens = 1280, 1500, 64
    encoder = 32 * (2 * heard * 12 * width**2 + 4 * heard**2 * width) + 2 * 3 * heard * width * (2 * 128 + width)
    keys_and_values = 32 * 2 * 2 * heard * width**2
    decoder = 32 * (2 * tokens * 14 * width**2 + 4 * tokens * (tokens + heard) * width) + 2 * tokens * width * 51866
    attention = 32 * 4 * width * (heard**2 + tokens * (tokens + heard))
    adapters = 32 * 2 * 2 * 2 * width * 32 * (heard + tokens) + 32 * 2 * 2 * width * 32 * (tokens + heard)
    forward = encoder + keys_and_values + decoder
    backward = forward - 2 * 3 * heard * width * (2 * 128 + width) + 1.5 * attention
    operations = count_operations(large, LARGE, label_length=tokens, checkpointed=False, compiled=True)
    assert operations == pytest.approx(forward + backward + 3 * adapters, rel=1e-3)
    assert operations == pytest.approx(5.9e12, rel=0.03)


def test_checkpointing_repeats_the_layers_and_compiled_not_their_attention(large):
    plain, eager, compiled = (
        count_operations(large, LARGE, label_length=64, checkpointed=checkpointed, compiled=compiled)
        for checkpointed, compiled in ((False, True), (True, False), (True, True))
    )
    attention = 32 * 4 * 1280 * (1500**2 + 64 * 1564)
    assert eager - compiled == pytest.approx(attention)
    assert plain * 1.3 < compiled < plain * 1.5


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.01, "1 s"),
        (45.4, "45 s"),
        (99.4, "99 s"),
        (100, "1.7 min"),
        (750, "12 min"),
        (5960, "99 min"),
        (6100, "1 h 40 min"),
        (7200, "2 h"),
        (11_234, "3 h 10 min"),
        (35_960, "10 h"),
        (93_000, "26 h"),
        (1_000_000, "280 h"),
    ],
)
def test_a_time_is_told_in_two_digits(seconds, words):
    assert describe_seconds(seconds) == words


@pytest.mark.parametrize(("compiled", "words"), [(True, "6.7 min"), (False, "9.3 min")])
def test_the_guess_is_told_with_what_it_comes_from(compiled, words):
    line = describe_time(5e12, steps=1000, windows=4, speed=108.7e12, compiled=compiled)
    assert line == (
        f"time: about {words} for 1,000 steps, without evaluations and waiting for data "
        "(a guess from one matrix product timed on this device: 110 TFLOP/s)"
    )


def test_a_product_is_timed_in_about_the_time_that_it_may_take(monkeypatch):
    monkeypatch.setattr(time_plan, "TIMED_SECONDS", 0.02)
    started = time_plan.time.perf_counter()
    assert measure_products("cpu", torch.float32, config=TOY) > 1e6
    assert time_plan.time.perf_counter() - started < 1
