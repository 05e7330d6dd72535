"""Which weights get an adapter? LoRA settings held against the layers that this Whisper has, before any weight is read."""

import re
import warnings
from collections.abc import Iterable
from dataclasses import MISSING, Field, asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import ModulesToSaveWrapper
from safetensors import SafetensorError, safe_open
from transformers import WhisperConfig, WhisperForConditionalGeneration

from clashes import UNTESTED_LORA, find_init_problem
from config import Recipe
from faults import UserError, first_line

ADAPTER_FILE = "adapter_model.safetensors"
# Every module of the encoder; the decoder's attention to it is called encoder_attn.
_ENCODER = r"model\.encoder\..*"
_LINEAR_WORDS = "q_proj, k_proj, v_proj, out_proj, fc1, fc2"
# Initialisations that take singular or orthogonal vectors of a weight: there are no more of them than its smaller side.
_VECTOR_INITS = ("olora", "pissa", "mica")


def build_lora_config(lora: dict[str, Any], *, freeze_encoder: bool = False) -> LoraConfig:
    """peft's LoraConfig from the recipe's section; only what differs from peft's own defaults is handed over.

    `freeze_encoder` leaves every module of the encoder out.
    """
    given = {
        f.name: lora[f.name]
        for f in fields(LoraConfig)
        if f.name in lora and f.name not in UNTESTED_LORA and lora[f.name] != _default(f)
    }
    if freeze_encoder:
        excluded = given.get("exclude_modules") or []
        words = [excluded] if isinstance(excluded, str) else [rf"(.*\.)?{re.escape(word)}" for word in excluded]
        given["exclude_modules"] = "|".join(f"({word})" for word in [_ENCODER, *words])
    return LoraConfig(**given)


def _default(field: Field) -> Any:
    value = field.default if field.default_factory is MISSING else field.default_factory()
    return asdict(value) if is_dataclass(value) else value


def side_of(name: str) -> str:
    """encoder or decoder: where the module or weight of that full name is."""
    return "encoder" if re.search(r"(^|\.)model\.encoder\.", name) else "decoder"


def describe_sides(names: Iterable[str]) -> str:
    """How many of these modules are in the encoder and how many in the decoder, in words."""
    sides = [side_of(name) for name in names]
    return f"{sides.count('encoder')} modules of the encoder and {sides.count('decoder')} of the decoder"


def check_adapter(recipe: Recipe, config: WhisperConfig) -> list[str]:
    """Tries the recipe's adapter, a new one or the one it goes on from, on the model's shape, without weights.

    Returns lines worth telling. Raises UserError when peft refuses it, when something that the lora section names
    matches nothing or only one side of the model, or when the adapter folder was made for another shape or by other
    settings than the recipe's.
    """
    if recipe.lora is None:
        return []
    with torch.device("meta"):
        whisper = WhisperForConditionalGeneration(config)
    if recipe.model.adapter:
        return _check_adapter_folder(whisper, recipe)
    _Fit(whisper, recipe).check()
    return []


def count_kept_weights(recipe: Recipe, config: WhisperConfig) -> tuple[int, int]:
    """How many weights are trained, and how many a checkpoint holds: without adapters frozen ones, too. Counted on the model's
    shape, after `check_adapter` has passed."""
    with torch.device("meta"):
        model = WhisperForConditionalGeneration(config)
    if recipe.lora is None:
        frozen = model.model.encoder if recipe.model.freeze_encoder else model.model.encoder.embed_positions
        frozen.requires_grad_(False)
    else:
        if recipe.model.adapter:
            lora = replace(LoraConfig.from_pretrained(recipe.model.adapter), inference_mode=False)
        else:
            lora = build_lora_config(recipe.lora, freeze_encoder=recipe.model.freeze_encoder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a model without weights has no name
            model = get_peft_model(model, replace(lora, init_lora_weights=True))
        if recipe.model.freeze_encoder:
            model.base_model.model.model.encoder.requires_grad_(False)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return trained, trained if recipe.lora is not None else sum(parameter.numel() for parameter in model.parameters())


# --- a new adapter -----------------------------------------------------------------------------------------------


class _Fit:
    """The lora section beside the modules of a model without weights."""

    def __init__(self, whisper: torch.nn.Module, recipe: Recipe):
        self.whisper, self.recipe, self.lora = whisper, recipe, recipe.lora
        self.modules = {name: module for name, module in whisper.named_modules() if name}
        layers = {"encoder": whisper.config.encoder_layers, "decoder": whisper.config.decoder_layers}
        self.layers = layers
        self.counts = f"the encoder has {layers['encoder']} layers, the decoder {layers['decoder']}"

    def check(self) -> None:
        """Raises UserError with the first thing that does not fit."""
        try:
            config = build_lora_config(self.lora, freeze_encoder=self.recipe.model.freeze_encoder)
        except (ValueError, TypeError, ImportError) as error:
            raise UserError(f"lora: {first_line(error)}") from error
        self._check_names()
        self._check_layers(config)
        chosen = self.matched(config)
        self._check_some_are_left(config, chosen)
        self._check_kinds(chosen)
        self._check_patterns(chosen)
        self._check_tokens()
        self._check_saved_modules(self._try(config))

    def matched(self, config: LoraConfig, **changes: Any) -> list[str]:
        """Full names of the modules that get an adapter by this config, with `changes` to it."""
        config = replace(config, **changes)
        if config.target_modules == "all-linear":  # peft's word for it leaves the output layer out
            config.target_modules = {n for n, m in self.modules.items() if isinstance(m, torch.nn.Linear) and n != "proj_out"}
        return [name for name in self.modules if check_target_module_exists(config, name)]

    def _check_names(self) -> None:
        for key in ("target_modules", "exclude_modules", "modules_to_save"):
            words = self.lora[key]
            for word in words if isinstance(words, list) else []:
                if not any(name == word or name.endswith(f".{word}") for name in self.modules):
                    raise UserError(f"lora.{key}: no module is called {word}; there are {_LINEAR_WORDS} ({self.counts})")

    def _check_layers(self, config: LoraConfig) -> None:
        layers = config.layers_to_transform
        if layers is None:
            return
        touched = {side_of(name) for name in self.matched(config, layers_to_transform=None, layers_pattern=None)}
        for side in sorted(touched):
            absent = [str(i) for i in ([layers] if isinstance(layers, int) else layers) if not 0 <= i < self.layers[side]]
            if absent:
                raise UserError(
                    f"lora.layers_to_transform: the {side} has no layer {', '.join(absent)} ({self.counts}); name layers that "
                    "both have, or leave one side out: lora.exclude_modules, a regular expression such as .*encoder[.]layers.*"
                )

    def _check_some_are_left(self, config: LoraConfig, chosen: list[str]) -> None:
        if chosen:
            return
        before = self.matched(config, exclude_modules=None, modules_to_save=None)
        if not before:
            targets = self.lora["target_modules"]
            example = "full names are such as model.encoder.layers.0.self_attn.q_proj"
            raise UserError(f"lora.target_modules: {targets} matches no module; {example} ({self.counts})")
        keys = ["lora.exclude_modules", "lora.modules_to_save"]
        if self.recipe.model.freeze_encoder and {side_of(name) for name in before} == {"encoder"}:
            keys = ["model.freeze_encoder"]
        named = [key for key in keys if key == "model.freeze_encoder" or self.lora[key.removeprefix("lora.")]]
        raise UserError(f"{named[0]}: leaves none of the {describe_sides(before)} that lora.target_modules names ({self.counts})")

    def _check_kinds(self, chosen: list[str]) -> None:
        init = self.lora["init_lora_weights"]
        for name in chosen:
            module = self.modules[name]
            # Whisper reads the stride of its convolutions and the size of its positions off the module, looks decoder
            # positions up by place, and has one weight for head and embedding: a merged adapter would change both.
            if not isinstance(module, torch.nn.Linear) or name == "proj_out":
                kind = "the output layer, tied to the embedding" if name == "proj_out" else type(module).__name__
                raise UserError(
                    f"lora.target_modules: {name} is {kind}; adapters sit on linear layers within encoder and decoder "
                    f"({_LINEAR_WORDS}); lora.modules_to_save trains other modules whole"
                )
            if self.lora["lora_bias"] and module.bias is None:
                raise UserError(f"lora.lora_bias: {name} has no bias, so that the adapter could not be merged; leave it out")
            rank = max([self.lora["r"], *(self.lora["rank_pattern"] or {}).values()])
            if init in _VECTOR_INITS and rank > min(module.weight.shape):
                raise UserError(f"lora.r: {rank} is more than {name} has columns or rows, and init_lora_weights: {init} takes as many")

    def _check_patterns(self, chosen: list[str]) -> None:
        for key in ("rank_pattern", "alpha_pattern"):
            for word in self.lora[key] or {}:
                if not any(re.match(rf"(.*\.)?({word})$", name) for name in chosen):  # as peft matches it
                    raise UserError(f"lora.{key}: {word} matches none of the {describe_sides(chosen)} with an adapter ({self.counts})")

    def _check_tokens(self) -> None:
        given = self.lora["trainable_token_indices"] or []
        if isinstance(given, dict) and [*given] != ["embed_tokens"]:
            raise UserError("lora.trainable_token_indices: a list of token ids, or of embed_tokens; there is no other embedding of tokens")
        size = self.whisper.config.vocab_size
        absent = [i for i in (given["embed_tokens"] if isinstance(given, dict) else given) if not 0 <= i < size]
        if absent:
            raise UserError(f"lora.trainable_token_indices: the model has tokens 0 to {size - 1}, not {absent[0]}")

    def _try(self, config: LoraConfig) -> torch.nn.Module:
        try:
            # Initialisations by the weights need weights.
            return get_peft_model(self.whisper, replace(config, init_lora_weights=True))
        except (ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"lora: {first_line(error)} ({self.counts})") from error

    def _check_saved_modules(self, model: torch.nn.Module) -> None:
        whole = {n: m.original_module for n, m in model.named_modules() if isinstance(m, ModulesToSaveWrapper)}
        for name, module in whole.items():
            name = name.removeprefix("base_model.model.")
            if self.recipe.model.quantization != "none" and isinstance(module, torch.nn.Linear) and name != "proj_out":
                raise UserError(f"lora.modules_to_save: {name} is stored in {self.recipe.model.quantization} and cannot be trained whole")
            if self.recipe.model.freeze_encoder and side_of(name) == "encoder":
                raise UserError(f"lora.modules_to_save: {name} is in the encoder, which model.freeze_encoder leaves as it is")


# --- an adapter that is there ------------------------------------------------------------------------------------


def _check_adapter_folder(whisper: torch.nn.Module, recipe: Recipe) -> list[str]:
    folder = recipe.model.adapter
    if not (Path(folder) / ADAPTER_FILE).is_file():
        raise UserError(f"model.adapter: {folder} holds no {ADAPTER_FILE}")
    try:
        config = LoraConfig.from_pretrained(folder)
        with safe_open(Path(folder) / ADAPTER_FILE, framework="pt") as file:
            stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a model without weights has no name
            model = get_peft_model(whisper, replace(config, init_lora_weights=True))
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
        raise UserError(f"model.adapter: {folder} cannot be read: {first_line(error)}") from error
    expected = {name: tuple(tensor.shape) for name, tensor in get_peft_model_state_dict(model).items()}
    if stored != expected:
        differing = sorted(name for name in {*stored, *expected} if stored.get(name) != expected.get(name))
        raise UserError(f"model.adapter: {folder} does not fit this model: {differing[0]} and {len(differing) - 1} more differ")
    problem = find_init_problem(config.init_lora_weights, recipe.model.quantization)
    if problem:
        raise UserError(f"model.adapter: {folder} was begun with init_lora_weights: {config.init_lora_weights}: {problem}")
    differences = _compare_settings(recipe, config)
    if recipe.training["do_train"]:
        if differences:
            raise UserError(*(f"{line}; leave the key out" for line in differences))
        if recipe.model.freeze_encoder and {side_of(name) for name in stored} == {"encoder"}:
            raise UserError(f"model.freeze_encoder: {folder} has adapters on the encoder alone: nothing would be trained")
    made_for = config.base_model_name_or_path
    if made_for in (None, "", recipe.model.name, str(Path(recipe.model.name).resolve())):
        return differences
    return differences + [f"model.adapter: {folder} was made for {made_for}; the model here is {recipe.model.name}"]


def _compare_settings(recipe: Recipe, stored: LoraConfig) -> list[str]:
    """A line for each written key of the recipe that differs from the adapter's own settings, which rule."""
    own = build_lora_config({key: recipe.lora[key] for key in recipe.lora_given})
    lines = []
    for key in recipe.lora_given:
        here, there = (_as_written(getattr(config, key)) for config in (own, stored))
        if here != there:
            lines.append(f"lora.{key}: {here} here, {there} in the adapter {recipe.model.adapter}, whose settings stay")
    return lines


def _as_written(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, list, tuple)) else value
