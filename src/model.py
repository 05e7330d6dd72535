"""What is trained? Whisper with frozen weights in 8 bit, 4 bit or unquantised, one whole copy on this process's device, and an adapter."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model, load_peft_weights, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import (
    BitsAndBytesConfig,
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizerFast,
)
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from adapters import build_lora_config, describe_sides
from config import ModelConfig, Recipe
from device import Place, check_placement, model_tensors
from eight_bit import use_dequantized_products
from faults import UserError, first_line
from four_bit import keep_product_type
from hub_ids import is_hub_id

MODEL_FILE = "model.safetensors"
# Tokens in front of the first text token: start, language, task, no-timestamps; English-only models have no language and task.
PROMPT_TOKENS = {True: 4, False: 2}
# The largest vocabulary of the English-only models; a multilingual one has at least one token more.
ENGLISH_VOCABULARY = 51864
# Generation settings that old checkpoints keep in the model's config, where they would decide unseen.
_GENERATION_KEYS = ("max_length", "suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids", "num_beams")


def token_id(tokenizer: WhisperTokenizerFast, token: str) -> int:
    """The id of a special token by its name. Raises KeyError when this tokenizer has none."""
    found = tokenizer.convert_tokens_to_ids(token)
    if found is None or tokenizer.convert_ids_to_tokens(found) != token:
        raise KeyError(f"the tokenizer has no {token}")
    return found


@dataclass
class BaseModel:
    """All of a base model but its weights. `notes` are lines worth telling."""

    name: str
    config: WhisperConfig
    processor: WhisperProcessor
    generation_config: GenerationConfig
    notes: list[str]

    @property
    def prompt_length(self) -> int:
        """Tokens that generation starts from."""
        return PROMPT_TOKENS[self.is_multilingual]

    @property
    def is_multilingual(self) -> bool:
        """False for English-only models, which take neither language nor task."""
        return bool(self.generation_config.is_multilingual)


def read_base_model(model: ModelConfig, *, max_new_tokens: int | None, num_beams: int | None) -> BaseModel:
    """Reads config, tokenizer and generation config of the base model; weights are not touched.

    `max_new_tokens` None: as many as there is room for. Raises UserError when something is missing, is not Whisper, or
    does not fit the recipe.
    """
    folder = Path(model.name)
    is_local = folder.is_dir()
    if not is_local and not is_hub_id(model.name):
        raise UserError(f"model.name: there is no folder {model.name}")
    name = str(folder.resolve()) if is_local else model.name
    try:
        if is_local and not (folder / "config.json").is_file():
            raise FileNotFoundError("there is no config.json")  # the library would take its defaults
        config = WhisperConfig.from_pretrained(name, local_files_only=is_local)
        tokenizer = WhisperTokenizerFast.from_pretrained(name, local_files_only=is_local)
        for token in ("<|startoftranscript|>", "<|endoftext|>", "<|notimestamps|>"):
            token_id(tokenizer, token)
    except Exception as error:
        said = first_line(error)
        if not is_local:
            said = f"there is no such folder here, and as a Hub id: {said}; give a folder, or a Hub id that this machine can reach"
        raise UserError(f"model.name: {model.name} cannot be read: {said}") from error
    if config.model_type != "whisper":
        raise UserError(f"model.name: {model.name} is a {config.model_type} model, not Whisper")
    if len(tokenizer) > config.vocab_size:
        raise UserError(f"model.name: {model.name}: the tokenizer has {len(tokenizer)} tokens, the model {config.vocab_size}")
    _check_vocabulary(model.name, tokenizer)
    if is_local and not any(folder.glob("*.safetensors")):
        raise UserError(f"model.name: {model.name} holds no weights as safetensors; others are not read")
    try:
        generation_config = GenerationConfig.from_pretrained(name, local_files_only=is_local)
    except OSError as error:
        if (folder / "generation_config.json").is_file():
            raise UserError(f"model.name: {model.name} cannot be read: {first_line(error)}") from error
        if not is_local and "does not appear to have a file" not in str(error):
            raise UserError(f"model.name: {model.name} cannot be read: {first_line(error)}") from error
        generation_config = GenerationConfig()
    notes: list[str] = []
    if config.encoder_layerdrop or config.decoder_layerdrop:
        notes.append("layer drop is set to 0: skipped layers would leave gradients missing")
    config.encoder_layerdrop = config.decoder_layerdrop = 0.0
    for key in _GENERATION_KEYS:
        if key in config.__dict__:
            delattr(config, key)
    for key, value in model.spec_augment().items():
        setattr(config, key, value)
    config.use_cache = False
    complete_generation_config(generation_config, config, tokenizer=tokenizer, model=model)
    _check_language(model, generation_config)
    base = BaseModel(
        name=name,
        config=config,
        # Every Whisper hears 30 s at 16 kHz; only the number of mel bins differs.
        processor=WhisperProcessor(WhisperFeatureExtractor(feature_size=config.num_mel_bins), tokenizer),
        generation_config=generation_config,
        notes=notes,
    )
    room = config.max_target_positions - base.prompt_length
    max_new_tokens = max_new_tokens or room
    if max_new_tokens > room:
        notes.append(f"training.generation_max_length: {max_new_tokens} is cut to {room}, the model's positions less the prompt")
    # Whisper adds the prompt to this length.
    generation_config.max_length = min(max_new_tokens, room)
    generation_config.num_beams = num_beams or 1
    return base


def complete_generation_config(
    generation_config: GenerationConfig, config: WhisperConfig, *, tokenizer: WhisperTokenizerFast, model: ModelConfig
) -> None:
    """Makes a generation config, bare or from a base model, hold all that generation with and without language, task
    and timestamps needs; ids are looked up by name. The recipe's language, task and suppressed tokens become its own."""
    # A file with this word is read without Whisper's own keys, such as lang_to_id.
    generation_config._from_model_config = False
    if getattr(generation_config, "is_multilingual", None) is None:
        generation_config.is_multilingual = config.vocab_size > ENGLISH_VOCABULARY
    generation_config.no_timestamps_token_id = token_id(tokenizer, "<|notimestamps|>")
    if generation_config.is_multilingual:
        known = [f"<|{code}|>" for code in LANGUAGES]
        vocabulary = tokenizer.get_vocab()
        generation_config.lang_to_id = {token: vocabulary[token] for token in known if token in vocabulary}
        generation_config.task_to_id = {task: token_id(tokenizer, f"<|{task}|>") for task in ("transcribe", "translate")}
        generation_config.language = model.language
        generation_config.task = model.task
    end = token_id(tokenizer, "<|endoftext|>")
    generation_config.decoder_start_token_id = config.decoder_start_token_id
    generation_config.bos_token_id = generation_config.eos_token_id = generation_config.pad_token_id = end
    generation_config.forced_decoder_ids = None
    generation_config.use_cache = True
    # A cache of fixed size, and steps of several guessed tokens, need the mask that attention.py does without.
    generation_config.cache_implementation = generation_config.prompt_lookup_num_tokens = None
    generation_config.max_new_tokens = None
    generation_config.do_sample = False
    # Sampling words without sampling make the file invalid and a save fail.
    generation_config.temperature = generation_config.top_p = generation_config.top_k = None
    if model.suppress_tokens is not None:
        generation_config.suppress_tokens = model.suppress_tokens
    if getattr(generation_config, "suppress_tokens", None) is None:
        generation_config.suppress_tokens = []
    by_position = list(WhisperConfig().begin_suppress_tokens)  # ids of the English-only vocabulary, in every bare config
    if getattr(generation_config, "begin_suppress_tokens", None) in (None, by_position):
        # As the base models: neither a blank nor the end comes first.
        generation_config.begin_suppress_tokens = [*tokenizer.encode(" ", add_special_tokens=False), end]


def _check_vocabulary(name: str, tokenizer: WhisperTokenizerFast) -> None:
    """Whisper's last tokens are the times from 0 to 30 s. Refuses a vocabulary that was cut there or goes on behind them: which
    model it is and where its times begin follow from the number of tokens, here and in every other runtime."""
    first, last = (tokenizer.get_vocab().get(f"<|{time}|>") for time in ("0.00", "30.00"))
    if first is None or last != first + 1500 or last != len(tokenizer) - 1:
        raise UserError(
            f"model.name: {name} has a changed vocabulary ({len(tokenizer)} tokens): <|0.00|> to <|30.00|> must be the last 1501; "
            "start from a base model as it was published"
        )


def _check_language(model: ModelConfig, generation_config: GenerationConfig) -> None:
    if not generation_config.is_multilingual:
        if model.language not in (None, "en"):
            raise UserError(f"model.language: {model.language}: {model.name} knows English only; leave it out")
        if model.task != "transcribe":
            raise UserError(f"model.task: {model.name} knows English only and cannot translate")
    elif model.language and f"<|{model.language}|>" not in generation_config.lang_to_id:
        raise UserError(f"model.language: {model.name} has no token for {model.language}")


def load_model(recipe: Recipe, base: BaseModel, place: Place, *, compute_type: torch.dtype) -> torch.nn.Module:
    """Loads one whole copy of the base model onto this process's device and puts the adapter on it.

    Frozen weights are 8-bit or 4-bit codes or of `compute_type`; everything trainable is float32, full fine-tuning
    included. Raises RuntimeError when a tensor, hidden ones of quantised layers included, is anywhere else than on the
    device.
    """
    model = WhisperForConditionalGeneration.from_pretrained(
        base.name,
        config=base.config,
        quantization_config=build_quantization_config(recipe.model.quantization, compute_type),
        device_map={"": place.device},
        dtype=compute_type if recipe.lora else torch.float32,
        attn_implementation=recipe.model.attn_implementation,
        use_safetensors=True,
        local_files_only=Path(base.name).is_dir(),
    )
    use_dequantized_products(model)
    keep_product_type(model)
    model.generation_config = base.generation_config
    encoder = model.model.encoder
    if recipe.lora is not None:
        model.requires_grad_(False)
        if recipe.model.adapter:
            model = _attach_adapter(model, recipe.model.adapter)
        else:
            model = get_peft_model(model, build_lora_config(recipe.lora, freeze_encoder=recipe.model.freeze_encoder))
    else:
        # The encoder's positions are sinusoids; loading makes them trainable.
        encoder.embed_positions.requires_grad_(False)
    if recipe.model.freeze_encoder:
        encoder.requires_grad_(False)
    for _, parameter in trainable_parameters(model):
        parameter.data = parameter.data.float()
    check_placement(model_tensors(model), place, what="the model")
    return model


def build_quantization_config(quantization: str, compute_type: torch.dtype) -> BitsAndBytesConfig | None:
    """How bitsandbytes stores linear weights while they are loaded; None: as they are."""
    if quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    if quantization == "4bit":
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute_type,
        )
    return None


def _attach_adapter(model: torch.nn.Module, folder: str) -> PeftModel:
    # Read to the CPU: the default device of an adapter file is card 0 on every process.
    return PeftModel.from_pretrained(model, folder, is_trainable=True, torch_device="cpu")


def trainable_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Name and parameter of all that is trained."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def describe_generation(base: BaseModel) -> str:
    """One line for the log: the generation settings that differ between recipes."""
    settings = base.generation_config
    suppressed = len(settings.suppress_tokens)
    return (
        f"generation: {'greedy' if settings.num_beams == 1 else f'{settings.num_beams} beams'}, "
        f"at most {settings.max_length} tokens, {suppressed} tokens suppressed"
    )


def describe_model(model: torch.nn.Module, recipe: Recipe, compute_type: torch.dtype) -> str:
    """One line for the log: parameters, how they are stored, what is trained and on which side."""
    total = sum(count_weights(parameter) for parameter in model.parameters())
    trained = sum(parameter.numel() for _, parameter in trainable_parameters(model))
    stored = {"8bit": "8-bit", "4bit": "4-bit", "none": "unquantised"}[recipe.model.quantization]
    adapted = [name for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    line = f"{recipe.model.name}: {total / 1e6:.1f} M parameters, {stored}, computed in {str(compute_type).removeprefix('torch.')}"
    if not recipe.training["do_train"]:
        return line + (f"; with the adapter {recipe.model.adapter}" if recipe.model.adapter else "")
    return (
        f"{line}; {trained / 1e6:.2f} M trained in float32 ({100 * trained / total:.2f} %)"
        + (f", adapters on {describe_sides(adapted)}" if adapted else "")
        + (", the encoder frozen" if recipe.model.freeze_encoder else "")
    )


def count_weights(parameter: torch.nn.Parameter) -> int:
    """The number of weights that a parameter stands for; a 4-bit one holds two in a byte."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()


def load_weights(model: torch.nn.Module, folder: str | Path) -> None:
    """Reads the trained weights of `folder`, an adapter or a full model, back into `model`, by way of the CPU.

    Raises RuntimeError when a weight is missing there.
    """
    if isinstance(model, PeftModel):
        result = set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
        missing = [name for name, _ in trainable_parameters(model) if name in result.missing_keys]
        unexpected = result.unexpected_keys
    else:
        missing, unexpected = model.load_state_dict(load_file(Path(folder) / MODEL_FILE), strict=False)
        missing = [name for name in missing if name != "proj_out.weight"]  # tied to the embedding
    if missing or unexpected:
        raise RuntimeError(f"{folder}: weights missing: {missing[:3]}, unexpected: {unexpected[:3]}")
