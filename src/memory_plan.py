"""How much memory of a card will a run take? Counted on the model's shape, term by term, before the weights are loaded.

Counted is what the allocator of torch reserves; the CUDA context (a few hundred MB) is the driver's own and comes on top.
A tensor counts as long as something holds it: in training what autograd keeps for the backward pass, layer by layer, in
scoring the cache of the decoder. Dropout within the base model, which Whisper does not use, is not counted.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers import WhisperConfig

from adapters import build_shape
from config import Recipe
from lora_products import compute_in_one_type

FLOAT_BYTES = 4
# Beyond its tensors the allocator reserves remains of blocks and the workspace of the matrix products.
ALLOCATOR_SHARE = 0.05
# nf4 with double quantisation: half a byte a weight, one byte a block of 64, four bytes for 256 of those.
FOUR_BIT_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)
# Two float32 numbers a row: the scales as the stock layer stores them, and those that eight_bit.py computes with.
ROW_SCALE_BYTES = 2 * FLOAT_BYTES
# Of each logit at the worst moment of the loss: its logarithmic probability, that one's gradient, and its own, all float32.
LOSS_BYTES = 3 * FLOAT_BYTES
MASK_BYTES = 1  # of each number that may be dropped, on a card


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one card.

    `weights` are frozen ones, `trained` those trained with both moments, `gradients` theirs and the copies that processes
    exchange. `kept` is what the backward pass waits for at the worst moment of a step, `working` what is made and given
    back around it. `evaluation` takes the place of the last three while a batch is scored.
    """

    weights: int
    trained: int
    gradients: int
    kept: int
    working: int
    evaluation: int

    @property
    def training(self) -> int:
        """The most that a training step takes."""
        return round((self.weights + self.trained + self.gradients + self.kept + self.working) * (1 + ALLOCATOR_SHARE))

    @property
    def scoring(self) -> int:
        """The most that scoring takes, in the midst of training."""
        return round((self.weights + self.trained + self.evaluation) * (1 + ALLOCATOR_SHARE))

    @property
    def total(self) -> int:
        """The most that the run takes."""
        return max(self.training, self.scoring)


class MemoryCounter:
    """Counts for one recipe, its batch sizes apart; labels are at most `label_length` long and texts `generated_length` tokens."""

    def __init__(
        self, recipe: Recipe, config: WhisperConfig, *, compute_type: torch.dtype, world_size: int, label_length: int, generated_length: int
    ):
        self.recipe, self.config, self.world_size = recipe, config, world_size
        self.label_length, self.generated_length = label_length, generated_length
        self.shape = build_shape(recipe, config)
        in_one_type = compute_in_one_type(self.shape) or compute_type == torch.float32
        self.autocast = not in_one_type
        # Bytes of what products give, and of what runs between the layers: autocast makes norms, and so their sums, float32.
        self.product = compute_type.itemsize
        self.stream = FLOAT_BYTES if self.autocast else self.product
        self.clamps = compute_type == torch.float16 and in_one_type
        self.compiled = recipe.training["torch_compile"]
        self.is_fused = recipe.model.attn_implementation == "sdpa"
        self.encoder, self.decoder = find_sides(self.shape)

    def plan(self, batch_size: int, eval_batch_size: int, *, checkpointed: bool) -> MemoryPlan:
        """The memory of training batches and scored batches of so many clips."""
        kept, working = max(self._moments_of_a_step(batch_size, checkpointed=checkpointed), key=sum)
        evaluation = self.count_evaluation(eval_batch_size) + self.dequantized
        return MemoryPlan(*self.weights, kept=kept, working=working + self.dequantized, evaluation=evaluation)

    # --- weights

    @cached_property
    def weights(self) -> tuple[int, int, int]:
        """Bytes of frozen weights; of trained ones with two float32 moments each; of their gradients.

        Frozen linear layers are stored as the recipe says, all else in the compute type (without adapters in float32).
        Trained weights are float32; under autocast each is cast once a step and that copy kept. Several processes hold a
        second copy of all gradients, in the buckets that they exchange.
        """
        rows = {id(layer.weight): len(layer.weight) for _, layer in self._quantized_layers()}
        plain = self.product if self.recipe.lora is not None else FLOAT_BYTES
        frozen = trained = 0.0
        for weight in self.shape.parameters():
            if weight.requires_grad:
                trained += weight.numel()
            elif id(weight) not in rows:
                frozen += plain * weight.numel()
            elif self.recipe.model.quantization == "8bit":
                frozen += weight.numel() + ROW_SCALE_BYTES * rows[id(weight)]
            else:
                frozen += FOUR_BIT_BYTES * weight.numel()
        copies = self.product if self.autocast else 0
        exchanged = FLOAT_BYTES if self.world_size > 1 else 0
        return round(frozen), round(trained * (3 * FLOAT_BYTES + copies)), round(trained * (FLOAT_BYTES + exchanged))

    @cached_property
    def dequantized(self) -> int:
        """The largest quantised weight, which stands in the compute type while its product is computed."""
        return self.product * max((layer.weight.numel() for _, layer in self._quantized_layers()), default=0)

    def _quantized_layers(self) -> Iterator[tuple[str, torch.nn.Linear]]:
        # The output layer is the embedding and stays as it is.
        if self.recipe.model.quantization != "none":
            for name, module in self.shape.named_modules():
                if isinstance(module, torch.nn.Linear) and not module.weight.requires_grad and not name.endswith("proj_out"):
                    yield name, module

    # --- a training step

    def _moments_of_a_step(self, batch: int, *, checkpointed: bool) -> list[tuple[int, int]]:
        """What is kept and what is worked with when a step may take the most: at the loss, in the last layer of the decoder on
        the way back, and in the last layer of the encoder, which is the widest (forward, where it is not trained)."""
        config = self.config
        width, positions = config.d_model, batch * config.max_source_positions
        tokens, heard = batch * self.label_length, self.stream * positions * width
        encoder = decoder = again_encoder = again_decoder = 0
        hears = learns(self.encoder.conv1)
        if hears:  # both convolutions at twice the positions, and what the activations behind them took
            encoder += self.product * 5 * positions * width
        for layer in self.encoder.layers:
            hears = hears or learns(layer)
            if hears:
                whole, held = self.count_layer(layer, batch, config.max_source_positions)
                encoder += held if checkpointed else whole
                again_encoder = whole - held if checkpointed else 0
        encoder += 2 * heard if hears else heard  # around the last norm; behind it every layer of the decoder reads it
        flows = hears or learns(self.decoder.embed_tokens) or learns(self.decoder.embed_positions)
        for layer in self.decoder.layers:
            flows = flows or learns(layer)
            if flows:
                whole, held = self.count_layer(layer, batch, self.label_length)
                decoder += held if checkpointed else whole
                again_decoder = whole - held if checkpointed else 0
        decoder += 2 * self.stream * tokens * width
        # The gradient between the layers, and those before and behind the activation function.
        back_decoder = tokens * (self.stream * width + 2 * self.product * config.decoder_ffn_dim)
        # Gradients of keys and values, and what the encoder is given back: from both, and the sum over later layers.
        back_decoder += 2 * self.product * positions * width + (3 * heard if hears else 0)
        back_encoder = positions * (self.stream * width + 2 * self.product * config.encoder_ffn_dim)
        return [
            (encoder + decoder, LOSS_BYTES * tokens * config.vocab_size),
            (encoder + decoder, back_decoder + again_decoder),
            (encoder, back_encoder + again_encoder),
        ]

    def count_layer(self, layer: torch.nn.Module, batch: int, length: int) -> tuple[int, int]:
        """Bytes that the backward pass of one layer needs, and those of them that checkpointing holds until it begins: its input
        and, compiled, what fused attention gave; the rest is then made again.

        Norms need their input and two float32 numbers a position; fused attention its queries, keys, values, result and
        a float32 number a position and head; the activation function its input. A linear layer needs its input only
        where it learns, and an adapter the narrow product between its matrices.
        """
        config = self.config
        is_decoder = hasattr(layer, "encoder_attn")
        width, rows, source = config.d_model, batch * length, batch * config.max_source_positions
        inner = config.decoder_ffn_dim if is_decoder else config.encoder_ffn_dim
        heads = config.decoder_attention_heads if is_decoder else config.encoder_attention_heads
        states = self.stream * rows * width
        attentions = [(layer.self_attn, rows, length)]
        attentions += [(layer.encoder_attn, source, config.max_source_positions)] if is_decoder else []
        whole = (len(attentions) + 1) * (states + 2 * FLOAT_BYTES * rows)
        held = states
        for attention, keys, key_length in attentions:
            result = self.product * rows * width + (FLOAT_BYTES * rows * heads if self.is_fused else 0)
            whole += result + self.product * width * (rows + 2 * keys)
            if not self.is_fused:
                whole += self.product * heads * rows * key_length
            elif self.compiled:
                held += result
            is_there = False
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
                heard = is_decoder and attention is layer.encoder_attn and linear is not attention.q_proj  # kept once for all layers
                whole += self._count_linear(linear, keys if heard else rows, input_is_there=is_there or heard)
                is_there = is_there or _needs_input(linear)
            whole += self._count_adapter(attention.out_proj, rows)
        whole += self._count_linear(layer.fc1, rows) + self.product * rows * inner + self._count_linear(layer.fc2, rows)
        if self.clamps and not is_decoder:  # float16 is clamped behind a layer
            whole += states
        return whole, held

    def _count_linear(self, linear: torch.nn.Module, rows: int, *, input_is_there: bool = False) -> int:
        """What a learning layer keeps of its input; autocast makes a copy of it for every such layer."""
        if not learns(linear):
            return 0
        own = self.product * rows * linear.in_features if _needs_input(linear) and (self.autocast or not input_is_there) else 0
        return own + self._count_adapter(linear, rows)

    def _count_adapter(self, linear: torch.nn.Module, rows: int) -> int:
        """The narrow product of an adapter, and with dropout the input as it was dropped from and its mask."""
        if not isinstance(linear, LoraLayer):
            return 0
        dropped = (self.product + MASK_BYTES) * linear.in_features if _drops(linear) else 0
        return rows * (self.product * sum(linear.r.values()) + dropped)

    # --- scoring

    def count_evaluation(self, batch: int) -> int:
        """The most that scoring a batch takes beside the weights: while it is heard, at its loss, or while its text is generated.

        The cache holds keys and values of every layer of the decoder, of all positions heard and of all tokens so far, for
        each beam; the logits of the loss stay meanwhile. The encoder's output is there twice, as it came and by task.
        """
        config, beams = self.config, self.recipe.training["generation_num_beams"] or 1
        positions, width = batch * config.max_source_positions, config.d_model
        heard = self.stream * positions * width
        hearing = positions * (2 * self.stream * width + 2 * self.product * config.encoder_ffn_dim)
        logits = batch * self.label_length * config.vocab_size
        keys = 2 * self.product * width
        loss = heard + keys * positions + logits * (self.product + 2 * FLOAT_BYTES)
        cache = keys * config.decoder_layers * beams * (positions + batch * self.generated_length)
        generating = heard * (1 + beams) + cache + self.product * logits
        return max(hearing, loss, generating)


def find_sides(shape: torch.nn.Module) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Encoder and decoder of a Whisper, with or without adapters."""
    whisper = shape.get_base_model() if isinstance(shape, PeftModel) else shape
    return whisper.model.encoder, whisper.model.decoder


def _drops(linear: torch.nn.Module) -> bool:
    return isinstance(linear, LoraLayer) and any(isinstance(dropout, torch.nn.Dropout) for dropout in linear.lora_dropout.values())


def _needs_input(linear: torch.nn.Module) -> bool:
    """Whether a linear module learns from its input as it is."""
    return learns(linear) and not _drops(linear)


def learns(module: torch.nn.Module) -> bool:
    """Whether anything of a module is trained."""
    return any(weight.requires_grad for weight in module.parameters())


# --- telling it

FULL_SHARE = 0.95  # of a card: above it a run that fits is luck


def card_bytes(device: str) -> int:
    """All the memory of a card."""
    return torch.cuda.get_device_properties(device).total_memory


def describe_memory(counter: MemoryCounter, *, total: int) -> list[str]:
    """For the log: the memory of a card with its sum beside the `total` bytes that it has, and warnings when it may not do,
    each with what to change first."""
    training = counter.recipe.training
    batch, scored = training["per_device_train_batch_size"], training["per_device_eval_batch_size"]
    checkpointed = training["gradient_checkpointing"]
    plan = counter.plan(batch, scored, checkpointed=checkpointed)
    what = "adapters and optimiser" if counter.recipe.lora is not None else "trained weights and optimiser"
    if plan.training >= plan.scoring:
        parts = {"weights": plan.weights, what: plan.trained + plan.gradients, "activations": plan.kept + plan.working}
        other = f"while scoring {_gib(plan.scoring)}"
    else:
        parts = {"weights": plan.weights, what: plan.trained, "cache and activations": plan.evaluation}
        other = f"while training {_gib(plan.training)}"
    parts["allocator"] = plan.total - sum(parts.values())
    listed = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())
    at = "" if plan.training >= plan.scoring else " while scoring"
    lines = [f"memory of a card: about {_gib(plan.total)} GiB{at} ({listed}; {other}) of {_gib(total)}"]
    room = FULL_SHARE * total
    if plan.training > room:
        smaller = _smaller(counter, batch)
        fits = _first(smaller, lambda size: counter.plan(size, 1, checkpointed=checkpointed).training <= room)
        ways = [f"--training.per_device_train_batch_size {fits}"] if fits else []
        if not checkpointed:
            fits = _first([batch, *smaller], lambda size: counter.plan(size, 1, checkpointed=True).training <= room)
            more = "" if fits == batch else f" --training.per_device_train_batch_size {fits}"
            ways += [f"--training.gradient_checkpointing true{more}"] if fits else []
        lines.append(_warn("a training step", plan.training, total, ways, counter.recipe))
    if plan.scoring > room:
        fits = _first(range(scored - 1, 0, -1), lambda size: counter.plan(1, size, checkpointed=checkpointed).scoring <= room)
        ways = [f"--training.per_device_eval_batch_size {fits}"] if fits else []
        lines.append(_warn("scoring", plan.scoring, total, ways, counter.recipe))
    return lines


def _first(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The first of ever smaller sizes that fits."""
    place = bisect_left(sizes, True, key=fits)
    return sizes[place] if place < len(sizes) else None


def _smaller(counter: MemoryCounter, batch: int) -> list[int]:
    """Smaller batches that a global batch can be split into, the largest first."""
    whole = counter.recipe.run.global_batch_size
    return [size for size in range(batch - 1, 0, -1) if not whole or whole % (size * counter.world_size) == 0]


def _warn(what: str, needed: int, total: int, ways: list[str], recipe: Recipe) -> str:
    left = "a smaller model" + (" or model.quantization: 4bit" if recipe.lora is not None and recipe.model.quantization != "4bit" else "")
    advice = f"{' or '.join(ways)} would fit" if ways else f"{left} is needed"
    return f"warning: {what} may take {_gib(needed)} GiB of a card that has {_gib(total)}: {advice}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
