"""How long will training take? Its floating point operations over what this device does of them. A guess, told as one."""

import math
import time

import torch
from peft.tuners.lora import LoraLayer
from transformers import WhisperConfig

from memory_plan import find_sides, learns

# Of plain matrix products, in training: large-v3, 8-bit LoRA, 40 clips at once on an H200: 61 windows/s of 5.9 TFLOP each
# where products alone reach 790 TFLOP/s; uncompiled about a third. Small models on such a card reach less.
EFFICIENCY = {True: 0.46, False: 0.33}  # compiled or not
# Fused attention makes its scores again on the way back: five products for the two of the forward pass.
ATTENTION_BACKWARD = 2.5
TIMED_SECONDS = 0.3
TIMED_WINDOWS = 8
FRAMES = 2  # of the features, for each position heard


def count_operations(shape: torch.nn.Module, config: WhisperConfig, *, label_length: float, checkpointed: bool, compiled: bool) -> float:
    """Floating point operations of one training window: two for each number of a weight at each position, and attention.

    On the way back as many again for the inputs, where something before them is trained, and for weights that are trained
    themselves. Checkpointing repeats the forward pass of layers on that way, compiled without attention.
    """
    encoder, decoder = find_sides(shape)
    width, positions = config.d_model, config.max_source_positions
    hears = learns(encoder.conv1)
    first, second = (2 * 3 * width * positions * channels for channels in (FRAMES * config.num_mel_bins, width))
    total = 2 * first + 3 * second if hears else first + second  # features need no gradient
    for layer in encoder.layers:
        hears = hears or learns(layer)
        linears = [(linear, positions, hears) for linear in _linears(layer.self_attn, layer)]
        total += _count_layer(linears, 4 * positions**2 * width, hears, checkpointed=checkpointed, compiled=compiled)
    flows = hears or learns(decoder.embed_tokens) or learns(decoder.embed_positions)
    for layer in decoder.layers:
        flows = flows or learns(layer)
        linears = [(linear, label_length, flows) for linear in _linears(layer.self_attn, layer)]
        cross = layer.encoder_attn
        linears += [(linear, label_length, flows) for linear in (cross.q_proj, cross.out_proj)]
        linears += [(linear, positions, hears) for linear in (cross.k_proj, cross.v_proj)]
        attention = 4 * label_length * (label_length + positions) * width
        total += _count_layer(linears, attention, flows, checkpointed=checkpointed, compiled=compiled)
    return total + 2 * label_length * width * config.vocab_size * (1 + flows + learns(decoder.embed_tokens))


def _linears(attention: torch.nn.Module, layer: torch.nn.Module) -> list[torch.nn.Module]:
    return [attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj, layer.fc1, layer.fc2]


def _count_layer(
    linears: list[tuple[torch.nn.Module, float, bool]], attention: float, flows: bool, *, checkpointed: bool, compiled: bool
) -> float:
    """A layer's operations: of its linear modules, each with its positions and whether its input needs a gradient, and of attention."""
    forward = backward = 0.0
    for linear, rows, input_flows in linears:
        whole = 2 * rows * linear.in_features * linear.out_features
        is_adapted = isinstance(linear, LoraLayer)
        narrow = 2 * rows * (linear.in_features + linear.out_features) * sum(linear.r.values()) if is_adapted else 0
        forward += whole + narrow
        backward += whole * (input_flows + (learns(linear) and not is_adapted)) + 2 * narrow
    again = (forward + (0 if compiled else attention)) if checkpointed and flows else 0
    return forward + attention + (backward + ATTENTION_BACKWARD * attention if flows else 0) + again


def measure_products(device: str, compute_type: torch.dtype, *, config: WhisperConfig) -> float:
    """Floating point operations a second of a product as this model's widest has, in `compute_type`; takes about half a second."""
    on_card = device != "cpu"
    rows = config.max_source_positions * (TIMED_WINDOWS if on_card else 1)
    a = torch.randn(rows, config.d_model, dtype=compute_type, device=device)
    b = torch.randn(config.d_model, config.encoder_ffn_dim, dtype=compute_type, device=device)
    result = a @ b  # the first one loads the kernel

    def wait() -> None:
        if on_card:
            torch.cuda.synchronize(device)

    wait()
    started, seconds, count, batch = time.perf_counter(), 0.0, 0, 1
    while seconds < TIMED_SECONDS:
        for _ in range(batch):
            torch.mm(a, b, out=result)
        wait()
        count, batch = count + batch, batch * 2
        seconds = time.perf_counter() - started
    del a, b, result
    if on_card:
        torch.cuda.empty_cache()
    return 2 * rows * config.d_model * config.encoder_ffn_dim * count / seconds


def describe_time(operations: float, *, steps: int, windows: int, speed: float, compiled: bool) -> str:
    """For the log: the time of so many steps of `windows` windows on each process, at `speed` operations a second in products."""
    seconds = steps * windows * operations / (speed * EFFICIENCY[compiled])
    return (
        f"time: about {describe_seconds(seconds)} for {steps:,} steps, without evaluations and waiting for data "
        f"(a guess from one matrix product timed on this device: {_two_digits(speed / 1e12):g} TFLOP/s)"
    )


def describe_seconds(seconds: float) -> str:
    """A length of time in two digits: 45 s, 12 min, 3 h 10 min, 26 h."""
    if seconds < 99.5:
        return f"{max(1, round(seconds))} s"
    minutes = seconds / 60
    if minutes < 99.5:
        return f"{_two_digits(minutes):.2g} min"
    minutes = round(_two_digits(minutes))
    if minutes < 600:
        return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"
    return f"{round(_two_digits(seconds / 3600)):,} h"


def _two_digits(value: float) -> float:
    return round(value, 1 - math.floor(math.log10(value)))
