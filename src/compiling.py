"""How does a layer run in training? Compiled by itself, or as it stands; and what of it is kept for the backward pass.

A compiler that sees the whole model breaks at every layer and takes minutes; one layer is compiled once for all its likes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.models.whisper.modeling_whisper import WhisperDecoderLayer, WhisperEncoderLayer

from attention import use_attention_without_mask
from config import Recipe
from lora_products import compute_in_one_type

# Compiled decoders see labels padded to one of few lengths; each is one compilation.
LABEL_LENGTHS = (32, 64, 128, 256, 448)
# Encoder and decoder layers count together, each kind that LoRA makes by itself (layers_to_transform, rank_pattern): beyond
# the compiler's own limit of 8 every further length would run uncompiled for the rest of the run.
MOST_GRAPHS = 64
# What a compiled checkpointed layer keeps: attention costs much to repeat and little to keep.
_KEPT = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _choose_kept(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def padded_length(length: int, *, most: int) -> int:
    """The least of LABEL_LENGTHS that holds `length` tokens, but no more than the `most` that the model has positions for."""
    return min(next((longest for longest in LABEL_LENGTHS if longest >= length), most), most)


@dataclass(frozen=True)
class Computation:
    """How a model computes: `compute_type` is the type of its products; `needs_autocast`, whether parts of it are stored
    in another type and meet it by autocast; `compiled`, whether training runs compiled layers."""

    compute_type: torch.dtype
    needs_autocast: bool
    compiled: bool

    @property
    def features_type(self) -> torch.dtype:
        """The type in which the model takes its input."""
        return torch.float32 if self.needs_autocast else self.compute_type


def arrange_computation(model: torch.nn.Module, recipe: Recipe, *, compute_type: torch.dtype) -> Computation:
    """Settles how a loaded model computes, in place, and tells it."""
    compiled = recipe.training["torch_compile"]
    if recipe.model.attn_implementation == "sdpa":
        use_attention_without_mask(model)
    arrange_layers(
        model,
        compiled=compiled,
        checkpointed=recipe.training["gradient_checkpointing"],
        batch_size=recipe.training["per_device_train_batch_size"],
    )
    in_one_type = compute_in_one_type(model) or compute_type == torch.float32
    return Computation(compute_type, needs_autocast=not in_one_type, compiled=compiled)


def arrange_layers(model: torch.nn.Module, *, compiled: bool, checkpointed: bool, batch_size: int) -> None:
    """Makes encoder and decoder layers run compiled, checkpointed or both in training; elsewhere they stay as they are.

    Only batches of `batch_size` clips run compiled: the last one of an epoch, often smaller, would be compiled for
    itself. Names of modules, weights and files do not change.
    """
    if compiled:
        torch._dynamo.config.recompile_limit = MOST_GRAPHS
    layers = [module for module in model.modules() if isinstance(module, (WhisperEncoderLayer, WhisperDecoderLayer))]
    for layer in layers if compiled or checkpointed else []:
        stock = layer.forward
        learns = any(weight.requires_grad for weight in layer.parameters())
        repeat = partial(checkpoint, stock, use_reentrant=False, preserve_rng_state=_drops(layer))
        # Eagerly, choosing what to keep would cost more time on the host than it saves on the device.
        choose = partial(create_selective_checkpoint_contexts, _choose_kept)
        trained = repeat if checkpointed else stock
        fast = torch.compile(partial(repeat, context_fn=choose) if checkpointed else stock, dynamic=False) if compiled else trained
        layer.forward = partial(_run, layer, (stock, trained, fast), learns, batch_size)


def _run(
    layer: torch.nn.Module,
    ways: tuple[Callable, Callable, Callable],
    learns: bool,
    batch_size: int,
    hidden_states: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    stock, trained, fast = ways
    if not layer.training:
        return stock(hidden_states, *args, **kwargs)
    if len(hidden_states) != batch_size:
        return trained(hidden_states, *args, **kwargs)
    if learns and torch.is_grad_enabled() and not hidden_states.requires_grad:
        # The first layer of a side: one graph for it and for all the others.
        hidden_states = hidden_states.detach().requires_grad_()
    return fast(hidden_states, *args, **kwargs)


def _drops(layer: torch.nn.Module) -> bool:
    """Whether anything in a layer is random, so that repeating it needs the same random state."""
    modules = [*layer.modules()]
    return any(isinstance(module, torch.nn.Dropout) for module in modules) or any(
        isinstance(value, float) and value > 0
        for module in modules
        for value in (getattr(module, name, 0) for name in ("dropout", "activation_dropout"))
    )
