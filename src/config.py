"""What is a valid recipe? One YAML file, strictly read, plus overrides; every mistake is told at once, before anything loads."""

import copy
import difflib
import functools
import json
import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import yaml
from jsonargparse import ArgumentParser, Namespace
from peft import LoraConfig
from transformers import Seq2SeqTrainingArguments
from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

from faults import UserError

DEMO_RECIPE = Path(__file__).parent.parent / "configs" / "demo.yaml"
SCORES = ("wer", "cer", "wer_raw", "cer_raw", "loss")
SECRETS = ("hub_token",)


@dataclass
class ModelConfig:
    """The base model and how it is loaded.

    Args:
        name: Hub id, or a folder (then nothing is looked up).
        quantization: how the frozen weights are stored.
        freeze_encoder: train the decoder alone; the encoder then needs no backward pass.
        language: for rows without their own; a code (hi) or an English name (Hindi); null: every row must have one.
        task: for rows without their own.
        attn_implementation: the attention kernel, in the words of transformers.
        adapter: folder of an adapter to go on from, or to score.
        suppress_tokens: token ids never generated; null: those of the base model.
        apply_spec_augment: mask features in training; the values below null: those of the base model.
        mask_time_prob: share of the frames that time masks cover.
        mask_time_length: frames of one time mask.
        mask_time_min_masks: least number of time masks.
        mask_feature_prob: share of the mel bins that feature masks cover.
        mask_feature_length: mel bins of one feature mask.
        mask_feature_min_masks: least number of feature masks.
    """

    name: str | None = None
    quantization: Literal["8bit", "4bit", "none"] = "8bit"
    freeze_encoder: bool = False
    language: str | None = None
    task: Literal["transcribe", "translate"] = "transcribe"
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    adapter: str | None = None
    suppress_tokens: list[int] | None = None
    apply_spec_augment: bool = False
    mask_time_prob: float | None = None
    mask_time_length: int | None = None
    mask_time_min_masks: int | None = None
    mask_feature_prob: float | None = None
    mask_feature_length: int | None = None
    mask_feature_min_masks: int | None = None

    def spec_augment(self) -> dict[str, Any]:
        """The augmentation settings in WhisperConfig's words; those left to the base model are absent."""
        masks = {f.name: getattr(self, f.name) for f in fields(self) if f.name.startswith("mask_")}
        return {"apply_spec_augment": self.apply_spec_augment} | {k: v for k, v in masks.items() if v is not None}


@dataclass
class DataSource:
    """One manifest, or one split of a set on the Hub: either `path` or `hub`.

    Args:
        path: a .jsonl, .csv or .tsv file, or a folder with metadata.jsonl, .csv or .tsv; relative to the working directory.
        audio_folder: what audio paths of a manifest are relative to, itself relative to the manifest; null: next to it.
        hub: a set on the Hub (owner/name), or a local folder of Parquet files in its layout (then nothing is looked up).
        config: the set's configuration, where it has several.
        split: the set's split; needed with hub.
        revision: branch, tag or commit of the set.
        weight: how many times an epoch meets each row; with data.streaming the relative chance of the source; training only.
        language: of every row, whatever a column says; a code or an English name.
        task: of every row, whatever a column says.
        audio_column: as in the data section, for this source alone.
        text_column: as in the data section, for this source alone.
        speaker_column: the column that names the speaker, or several that do so together; null: speaker.
        speaker_share: [low, high] from 0 to 1: only speakers whose hash falls into this part are read.
    """

    path: str | None = None
    audio_folder: str | None = None
    hub: str | None = None
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    weight: float = 1.0
    language: str | None = None
    task: Literal["transcribe", "translate"] | None = None
    audio_column: str | None = None
    text_column: str | None = None
    speaker_column: str | list[str] | None = None
    speaker_share: list[float] | None = None

    @property
    def name(self) -> str:
        """What rows of this source are listed under: the manifest as typed, or hub:NAME/CONFIG/SPLIT."""
        return self.path or "hub:" + "/".join(part for part in (self.hub, self.config, self.split) if part)

    def fixed_fields(self) -> dict[str, str]:
        """The columns that have one value in every row of this source."""
        return {key: value for key, value in (("language", self.language), ("task", self.task)) if value}


@dataclass
class DataConfig:
    """Which speech is trained on and which is scored.

    Args:
        train: the manifests and Hub sets trained on.
        validation: named sets; each has its own scores.
        audio_column: the manifest's key for the audio path; null: the one well-known name that is there.
        text_column: the manifest's key for the transcript; null: the one well-known name that is there.
        min_duration_seconds: shorter clips are bad rows.
        max_duration_seconds: longer clips are bad rows; 30 is the model's window.
        on_bad_row: drop them and go on, or fail.
        max_dropped_share: of a set; more is an error.
        allow_empty_text: teach silence as an empty transcript.
        streaming: read the training sets, all on the Hub, while training; they are never downloaded whole.
        pack: short clips of one language and one task share a 30 s window; training only.
    """

    train: list[DataSource] = field(default_factory=list)
    validation: dict[str, DataSource] = field(default_factory=dict)
    audio_column: str | None = None
    text_column: str | None = None
    min_duration_seconds: float = 0.1
    max_duration_seconds: float = 30.0
    on_bad_row: Literal["drop", "fail"] = "drop"
    max_dropped_share: float = 0.1
    allow_empty_text: bool = False
    streaming: bool = False
    pack: bool = False

    def sources(self) -> dict[str, DataSource]:
        """Every source by its place in the recipe: data.train[0], data.validation.dev."""
        train = {f"data.train[{number}]": source for number, source in enumerate(self.train)}
        return train | {f"data.validation.{name}": source for name, source in self.validation.items()}


@dataclass
class RunConfig:
    """How the run goes.

    Args:
        global_batch_size: clips, or windows of them (data.pack), a step over all processes; gradient accumulation follows; null: the training section decides.
        baseline: score the untouched model first.
        resume: auto goes on from the newest complete checkpoint in output_dir.
        max_eval_samples: a fixed seeded subset of each set during training; the full sets are scored at the end.
        early_stopping_patience: evaluations without a better metric_for_best_model before training stops.
        time_limit_seconds: after so long the run saves behind a whole step and stops; resume: auto goes on.
        stall_timeout_seconds: after so long without any progress on the rank that is late the job is ended with a report.
        max_skipped_steps: steps in a row that may be skipped because their loss or gradient is not finite.
    """

    global_batch_size: int | None = None
    baseline: bool = True
    resume: Literal["never", "auto"] = "never"
    max_eval_samples: int | None = None
    early_stopping_patience: int | None = None
    time_limit_seconds: float | None = None
    stall_timeout_seconds: float = 600.0
    max_skipped_steps: int = 3


@dataclass
class TrainingConfig(Seq2SeqTrainingArguments):
    """`Seq2SeqTrainingArguments` under its own names; only defaults differ, each for the reason beside it."""

    # Null: the card decides (device.choose_compute_type); a value given is honoured.
    bf16: bool | None = None
    fp16: bool | None = None
    do_train: bool = True
    learning_rate: float = 1e-4
    logging_steps: float = 10
    logging_first_step: bool = True
    # A NaN must be seen, not replaced by the mean of earlier losses.
    logging_nan_inf_filter: bool = False
    report_to: None | str | list[str] = "tensorboard"
    eval_strategy: Literal["no", "steps", "epoch"] = "epoch"
    save_strategy: Literal["no", "steps", "epoch", "best"] = "epoch"
    save_total_limit: int | None = 2
    load_best_model_at_end: bool = True
    # Scores come from generated text; whole logits are never kept.
    predict_with_generate: bool = True
    generation_max_length: int | None = 225
    generation_num_beams: int | None = 1
    # Log-mel features are made in the loader's workers.
    dataloader_num_workers: int = 2
    # The adapter hides the model's signature, so the stock trainer would drop every column or guess the labels.
    remove_unused_columns: bool | None = False
    label_names: list[str] | None = field(default_factory=lambda: ["labels"])
    # Ranks other than the main one say nothing but errors.
    log_level_replica: str = "error"
    # Every adapter takes part in every step; the search costs time and breaks checkpointing.
    ddp_find_unused_parameters: bool | None = False
    # Whisper has no buffer that training changes.
    ddp_broadcast_buffers: bool | None = False


@dataclass
class Recipe:
    """One checked recipe. `lora` None: full fine-tuning; `lora_given` names its keys that were written, not filled in.
    `training` holds keyword arguments of `TrainingConfig`: the object itself is made after the place is settled, since
    making it touches the device."""

    source: str
    model: ModelConfig
    lora: dict[str, Any] | None
    data: DataConfig
    run: RunConfig
    training: dict[str, Any]
    check_only: bool = False
    lora_given: tuple[str, ...] = field(default=(), compare=False)


LORA_DEFAULTS = {"r": 32, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"]}
SECTIONS = {"model": ModelConfig, "lora": LoraConfig, "data": DataConfig, "run": RunConfig, "training": TrainingConfig}

# Keys that scripts often hand the word None or null, which then means not set.
_WORDS_FOR_NULL_IN = ("model.language", "model.adapter", "run.resume")
# Keys of older trainers and of public Whisper scripts, with the word to use here.
OLD_KEYS = {
    "model.load_in_8bit": "write model.quantization: 8bit",
    "model.load_in_4bit": "write model.quantization: 4bit",
    "model.device_map": "every process holds one whole copy on its own card; there is nothing to set",
    "model.max_memory": "every process holds one whole copy on its own card; there is nothing to set",
    "model.torch_dtype": "the compute type follows the card, or training.bf16 / training.fp16",
    "model.dtype": "the compute type follows the card, or training.bf16 / training.fp16",
    "model.model_name_or_path": "write model.name",
    "model.use_cache": "the cache is off in training and on in generation",
    "model.forced_decoder_ids": "write model.language and model.task",
    "lora.rank": "write lora.r",
    "lora.alpha": "write lora.lora_alpha",
    "lora.dropout": "write lora.lora_dropout",
    "data.max_duration": "write data.max_duration_seconds",
    "data.max_duration_in_seconds": "write data.max_duration_seconds",
    "data.min_duration_in_seconds": "write data.min_duration_seconds",
    "data.audio_column_name": "write data.audio_column",
    "data.text_column_name": "write data.text_column",
    "training.evaluation_strategy": "write training.eval_strategy",
    "training.per_gpu_train_batch_size": "write training.per_device_train_batch_size",
    "training.per_gpu_eval_batch_size": "write training.per_device_eval_batch_size",
    "training.no_cuda": "write training.use_cpu",
    "training.overwrite_output_dir": "an earlier run is never overwritten; choose another training.output_dir or run.resume: auto",
    "training.warmup_ratio": "write training.warmup_steps; a number below 1 is a share of all steps",
    "training.group_by_length": "every window is 30 seconds; there is nothing to group",
    "training.gradient_checkpointing_use_reentrant": "checkpointing is always non-reentrant",
    "training.resume_from_checkpoint": "write run.resume: auto",
    "training.save_safetensors": "weights are always saved as safetensors",
    "training.logging_dir": "logs go into training.output_dir",
    "training.deepspeed": "one whole copy per card needs no sharding; leave it out",
    "training.fsdp": "one whole copy per card needs no sharding; leave it out",
    "training.fsdp_config": "one whole copy per card needs no sharding; leave it out",
}
# Training arguments outside the tested combinations: the reason each is refused when it is switched on.
UNTESTED = {
    "deepspeed": "one whole copy per card needs no sharding",
    "fsdp": "one whole copy per card needs no sharding",
    "parallelism_config": "one whole copy per card needs no sharding",
    "torch_compile_backend": "layers are compiled as they were tested; write training.torch_compile: true",
    "torch_compile_mode": "layers are compiled as they were tested; write training.torch_compile: true",
    "use_liger_kernel": "it has no kernels for Whisper",
    "neftune_noise_alpha": "it needs text embeddings as input",
    "auto_find_batch_size": "ranks would disagree on the number of steps",
    "push_to_hub": "pushing is not part of this version; upload output_dir afterwards",
    "batch_eval_metrics": "scores are computed on the whole set",
    "eval_use_gather_object": "rows are gathered as tensors",
    "enable_jit_checkpoint": "it is not part of the tested combinations",
    "prediction_loss_only": "scores need generated text",
    "generation_config": "set training.generation_max_length, training.generation_num_beams, model.suppress_tokens",
    "bf16_full_eval": "the compute type is one in training, evaluation and generation",
    "fp16_full_eval": "the compute type is one in training, evaluation and generation",
    "activation_checkpointing": "write training.gradient_checkpointing",
    "save_only_model": "a checkpoint without optimiser state cannot be resumed",
    "ignore_data_skip": "a resumed run goes on with the same order of data",
    "resume_from_checkpoint": "write run.resume: auto",
    "sortish_sampler": "every window is 30 seconds; there is nothing to sort",
    "hub_token": "pushing is not part of this version, and a token would lie in every checkpoint",
    "save_on_each_node": "the main process alone writes, into a folder that all machines share",
    "accelerator_config": "ranks must do equal work",
    "include_for_metrics": "the features of a whole set would be kept in memory",
    "dataloader_drop_last": "rows of scored sets would be dropped too",
}
# Training arguments that must keep the one value that is tested.
FIXED = {
    "average_tokens_across_devices": (True, "the loss is the mean over the whole global batch"),
    "eval_do_concat_batches": (True, "scores are computed on the whole set"),
    "train_sampling_strategy": ("random", "every window is 30 seconds; there is nothing to group"),
}
# Keys of peft's LoraConfig outside the tested combinations: the reason each is refused when it has another value than peft's own.
UNTESTED_LORA = {
    "task_type": "leave it out: with a task type the adapter sends input_ids, which Whisper does not take",
    "inference_mode": "an adapter in inference mode does not train",
    "auto_mapping": "peft fills it in",
    "peft_type": "peft fills it in",
    "peft_version": "peft fills it in",
    "base_model_name_or_path": "write model.name",
    "revision": "model.name is a folder or the newest revision on the Hub",
    "fan_in_fan_out": "Whisper's layers store their weights as out x in",
    "target_parameters": "every weight of Whisper belongs to a module; write lora.target_modules",
    "layer_replication": "peft cannot repeat Whisper's layers",
    "megatron_config": "Whisper has no Megatron layers",
    "megatron_core": "Whisper has no Megatron layers",
    "runtime_config": "the whole model is on the card; there is nothing to bring over for a moment",
    "loftq_config": "see lora.init_lora_weights: it quantises the base model itself",
    "eva_config": "see lora.init_lora_weights: it needs a pass over the data before the adapter is made",
    "corda_config": "see lora.init_lora_weights: it needs a pass over the data before the adapter is made",
    "lora_ga_config": "it needs gradients before the adapter is made",
    "velora_config": "its gradients are approximate, and quantised layers have none of it",
    "kasa_config": "it cuts the frozen weights and needs a loss of its own",
    "monteclora_config": "it needs a loss of its own",
    "arrow_config": "it chooses between adapters that are trained already",
    "use_bdlora": "it is for serving over several cards",
    "alora_invocation_tokens": "it needs a causal language model",
    "use_qalora": "it needs GPTQ weights",
    "qalora_group_size": "it needs GPTQ weights",
}
# Words of lora.init_lora_weights that no model here can take, and those that need weights as they are.
_UNTESTED_INITS = {
    False: "the adapter would change the model before any training, and the baseline with it",
    "eva": UNTESTED_LORA["eva_config"].partition(": ")[2],
    "corda": UNTESTED_LORA["corda_config"].partition(": ")[2],
    "lora_ga": UNTESTED_LORA["lora_ga_config"],
    "loftq": "it quantises the base model itself, and here that is done while loading",
    "pissa_niter_": "it is drawn at random anew whenever the adapter is loaded; write pissa",
}
_UNQUANTIZED_INITS = ("olora", "pissa", "mica", "orthogonal")


# --- reading -----------------------------------------------------------------------------------------------------

# The core schema of YAML 1.2: `no` is a word (Norwegian), `1e-5` a number.
_SCALARS = [
    (re.compile(r"~|null|Null|NULL|"), lambda text: None),
    (re.compile(r"true|True|TRUE"), lambda text: True),
    (re.compile(r"false|False|FALSE"), lambda text: False),
    (re.compile(r"[-+]?[0-9]{1,99}"), int),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
]


def _read_scalar(text: str) -> Any:
    """The value of a word without quotes."""
    return next((make(text) for pattern, make in _SCALARS if pattern.fullmatch(text)), text)


class _Reader:
    """Turns a YAML node tree into plain values; keeps the line of every key and every problem."""

    def __init__(self, source: str):
        self.source = source
        self.lines: dict[str, int] = {}
        self.problems: list[str] = []

    def value(self, node: yaml.Node | None, path: str = "") -> Any:
        """The plain value of a node, whose key in full is `path`."""
        if node is None:
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            places = [f"{path}[{index}]" for index in range(len(node.value))]
            self.lines |= {place: item.start_mark.line + 1 for place, item in zip(places, node.value, strict=True)}
            return [self.value(item, place) for place, item in zip(places, node.value, strict=True)]
        return node.value if node.style in ("'", '"', "|", ">") else _read_scalar(node.value)

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Any]:
        result = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(f"{self.source}:{line}: a key must be a word")
                continue
            key = f"{path}.{key_node.value}" if path else key_node.value
            if key_node.value in result:
                self.problems.append(_one_line(f"{self.source}:{line}: {key}: is there twice (first on line {self.lines[key]})"))
                continue
            self.lines[key] = line
            result[key_node.value] = self.value(value_node, key)
        return result


def _read_yaml(text: str, reader: _Reader) -> Any:
    try:
        return reader.value(yaml.compose(text, Loader=yaml.SafeLoader))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"{reader.source}:{line}: not valid YAML: a character that no text holds (U+{error.character:04X})") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise UserError(_one_line(f"{reader.source}{where}: not valid YAML: {error.problem or error.context}")) from None
    except RecursionError:
        raise UserError(f"{reader.source}: not valid YAML: it is nested too deeply, or within itself") from None


def _one_line(message: str) -> str:
    """A message with whatever line breaks it quotes shown as blanks."""
    return " ".join(message.splitlines())


def _read_recipe_file(path: Path, reader: _Reader) -> dict[str, Any]:
    try:
        raw = _read_yaml(path.read_text(encoding="utf-8-sig"), reader)
    except FileNotFoundError:
        raise UserError(f"--config {path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: a recipe is a mapping of the sections {', '.join(SECTIONS)}")
    return raw


def split_arguments(argv: list[str]) -> tuple[str | None, dict[str, str], bool]:
    """Reads the command line: `--config FILE`, `--check`, and overrides `--section.key value` or `--section.key=value`.

    Returns the recipe's path (None: the demo recipe), the overrides as typed (the last wins), and whether to check only.
    """
    config, overrides, check, problems = None, {}, False, []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--check":
            check = True
        elif not word.startswith("--"):
            problems.append(f"{word}: not understood; write --config FILE, --check or --section.key value")
        else:
            name, equals, value = word[2:].partition("=")
            if not equals and (not words or words[0].startswith("--")):
                problems.append(f"--{name}: a value is missing; write --{name} VALUE")
                continue
            value = value if equals else words.pop(0)
            if name == "config":
                config = value
            else:
                overrides.pop(name, None)  # the order of the last ones counts: --lora null --lora.r 8
                overrides[name] = value
    if problems:
        raise UserError(*problems)
    return config, overrides, check


def _apply_override(raw: dict[str, Any], key: str, text: str, reader: _Reader) -> None:
    *parents, last = key.split(".")
    place = raw
    for depth, parent in enumerate(parents, 1):
        name = ".".join(parents[:depth])
        if isinstance(place.get(parent), list):
            example = "'[{path: a.jsonl, weight: 0.5}, b.jsonl]'" if name == "data.train" else "'[...]'"
            reader.problems.append(
                f"--{key}: {name} is a list, and its entries have no names here; give all of it, --{name} {example}, or edit the recipe"
            )
            return
        if isinstance(place.get(parent), str) and re.fullmatch(r"data\.(train|validation\.[^.]+)", name):
            place[parent] = _source(place[parent])
        if not isinstance(place.get(parent), dict):
            place[parent] = {}
            reader.lines[name] = 0
        place = place[parent]
    value_reader = _Reader(f"--{key}")
    place[last] = _read_yaml(text, value_reader)
    reader.problems += value_reader.problems
    for within in [place for place in reader.lines if place.startswith((f"{key}.", f"{key}["))]:
        del reader.lines[within]  # of what the file had there
    reader.lines[key] = 0


# --- checking ----------------------------------------------------------------------------------------------------


@functools.cache
def _known_keys() -> list[str]:
    return [f"{section}.{f.name}" for section, config in SECTIONS.items() for f in fields(config) if f.init]


@functools.cache
def _nullable_keys() -> set[str]:
    """Keys for which null is a value of its own; for all others it means not set."""
    hints = {section: get_type_hints(config) for section, config in SECTIONS.items()}
    return {key for key in _known_keys() if type(None) in get_args(hints[key.partition(".")[0]][key.partition(".")[2]])}


def _is_set(key: str, value: Any) -> bool:
    if key in _WORDS_FOR_NULL_IN and isinstance(value, str) and value.strip().lower() in ("", "none", "null"):
        return False
    return value is not None or key in _nullable_keys()


class _Judge:
    """Collects every problem of a recipe; each message begins with where the key was written."""

    def __init__(self, reader: _Reader):
        self.reader = reader
        self.problems = list(reader.problems)
        self.told: set[str] = set()
        self.meant: set[str] = set()

    def add(self, key: str, message: str) -> None:
        """Adds a problem of a key; the first one told of a key is enough."""
        if key in self.told:
            return
        self.told.add(key)
        line = next((self.reader.lines[k] for k in _prefixes(key) if k in self.reader.lines), None)
        source = self.reader.source
        where = source if line is None else f"{source}:{line}" if line else "command line"
        self.problems.append(_one_line(f"{where}: {key}: {message}"))

    def missing(self, key: str, message: str) -> None:
        """Adds that a key is missing, unless a problem told already, of a misspelt word for one, is why."""
        known = self.told | self.meant
        if not any(key.startswith(f"{k}.") or k == key or k.startswith((f"{key}.", f"{key}[")) for k in known):
            self.add(key, f"is missing; {message}")

    def keys(self, raw: dict[str, Any]) -> None:
        """Compares every key with the schema."""
        known = _known_keys()
        for section, values in raw.items():
            if section not in SECTIONS:
                self.unknown(section, [*SECTIONS, *known], "there is no such section")
            elif values is None and section == "lora":
                continue
            elif not isinstance(values, dict):
                self.add(section, f"a section of keys is expected, not {json.dumps(values)}")
            else:
                for key in values:
                    if f"{section}.{key}" in OLD_KEYS and not (f"{section}.{key}" in known and not values[key]):
                        self.add(f"{section}.{key}", OLD_KEYS[f"{section}.{key}"])
                    elif f"{section}.{key}" not in known:
                        self.unknown(f"{section}.{key}", known, "unknown key")

    def sources(self, data: dict[str, Any]) -> None:
        """Compares the keys of every set with the schema; takes out those that cannot be read."""
        train, validation = data.get("train"), data.get("validation")
        if isinstance(train, list):
            data["train"] = [item for n, item in enumerate(train) if self._is_source(item, f"data.train[{n}]")]
        if isinstance(validation, dict):
            data["validation"] = {n: item for n, item in validation.items() if self._is_source(item, f"data.validation.{n}")}

    def _is_source(self, source: Any, place: str) -> bool:
        if not isinstance(source, dict):
            self.add(place, f"a path, or a mapping with path or hub, is expected, not {json.dumps(source)}")
            return False
        known = [f"{place}.{f.name}" for f in fields(DataSource)]
        is_good = True
        for key in [key for key in source if f"{place}.{key}" not in known]:
            is_good = False
            self.unknown(f"{place}.{key}", known, "unknown key")
        for key in [key for key, value in source.items() if value is None]:
            del source[key]  # null is not set
        for key in source:
            is_good = is_good and self._has_type(source, key, place)
        if "path" not in source and "hub" not in source:
            self.missing(f"{place}.path", "the manifest; or hub: a set on the Hub")
        return is_good and ("path" in source or "hub" in source)

    def _has_type(self, source: dict[str, Any], key: str, place: str) -> bool:
        try:
            _source_parser().parse_object({"source": {key: copy.deepcopy(source[key])}}, defaults=False, env=False)
        except Exception as error:
            self.add(f"{place}.{key}", f"{_type_message(error)}, got {json.dumps(source[key])}")
            return False
        return True

    def unknown(self, key: str, known: list[str], message: str) -> None:
        """Adds that a key is not among the known ones, with the nearest: the same word elsewhere, or one spelt alike."""
        section, _, word = key.rpartition(".")
        here = [name for name in known if name.rpartition(".")[0] == section]
        close = [name for name in known if name.rpartition(".")[2] == word]
        for names, cutoff in ((here, 0.7), (known, 0.75)):
            words = {name.rpartition(".")[2]: name for name in reversed(names)}
            close = close or [words[near] for near in difflib.get_close_matches(word, words, n=1, cutoff=cutoff)]
        self.meant |= {*close[:1]}
        self.add(key, f"{message}; did you mean {close[0]}?" if close else message)


def _prefixes(key: str) -> list[str]:
    """The key itself and all that hold it: a.b[0].c, a.b[0], a.b, a."""
    return [key] + [key[: match.start()] for match in reversed([*re.finditer(r"\.|\[\d+\]", key)])]


def _source(value: Any) -> Any:
    """A set given as a plain path is one of a path key."""
    return {"path": value} if isinstance(value, str) else value


def _spread_sources(data: dict[str, Any]) -> dict[str, Any]:
    train, validation = data.get("train"), data.get("validation")
    if train is not None:
        data["train"] = [_source(item) for item in (train if isinstance(train, list) else [train])]
    if isinstance(validation, str):
        validation = {"validation": validation}
    if isinstance(validation, dict):
        data["validation"] = {name: _source(item) for name, item in validation.items()}
    return data


@functools.cache
def build_parser(*, without: frozenset[str] = frozenset()) -> ArgumentParser:
    """The parser that knows types, defaults and help of every section; default config files are not looked for.

    Keys `without` are left out.
    """
    parser = ArgumentParser(
        prog="train.py",
        usage="accelerate launch src/train.py [--config FILE] [--check] [--section.key VALUE ...]",
        description=(
            "Fine-tunes Whisper. --config names a recipe (default: configs/demo.yaml); --check tries all that can fail "
            "without loading weights. Every key of a recipe can be overridden; the last wins."
        ),
        exit_on_error=False,
        add_help=True,
    )
    for section, config in SECTIONS.items():
        skip = {key.partition(".")[2] for key in without if key.startswith(f"{section}.")}
        parser.add_class_arguments(config, section, skip=skip)
    parser.set_defaults({f"lora.{key}": value for key, value in LORA_DEFAULTS.items()})
    return parser


def describe_keys() -> str:
    """The text of --help: every key but those that are always refused."""
    refused = [f"training.{key}" for key in (*UNTESTED, *FIXED)] + [f"lora.{key}" for key in UNTESTED_LORA]
    text = build_parser(without=frozenset([*refused, *OLD_KEYS])).format_help()
    # Ways in that the parser offers for every section and list, and that recipes do not have.
    text = re.sub(r"\n  --\w+ CONFIG +Path to a configuration file\.", "", text)
    return re.sub(r",\s+--[\w.]+\+ \S+", "", text)


@functools.cache
def _source_parser() -> ArgumentParser:
    """The parser of one source, so that a wrong value is told with its place in the list."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(DataSource, "source")
    return parser


@functools.cache
def _defaults() -> Namespace:
    return build_parser().parse_object({}, env=False)


def _type_message(error: Exception) -> str:
    """The parser's complaint in one line: what was expected and what was given."""
    text = str(error)
    choices = re.search(r"Literal\[[^\]]*\]", text)
    expected = [choices.group(0)[8:-1].replace("'", "").replace(", ", " | ")] if choices else []
    expected += [name for name in re.findall(r"Expected a <class '(\w+)'>", text) if name != "NoneType"]
    enum = re.search(r"Expected a member of <enum '\w+'>: (\{[^}]*\})", text)
    expected += [enum.group(1)] if enum else []
    if expected:
        return f"expected {' or '.join(dict.fromkeys(expected))}"
    return text.splitlines()[-1].strip() if text else type(error).__name__


def _parse_types(raw: dict[str, Any], judge: _Judge) -> dict[str, Any]:
    """Types and defaults by the parser: all sections as plain dictionaries. Wrong values are told and left out."""
    parser = build_parser()
    parsed = _defaults().clone()
    for section, values in raw.items():
        for key, value in values.items():
            # Each key by itself, since the parser stops at its first error; a copy, since it changes what it is given.
            try:
                alone = parser.parse_object({section: {key: copy.deepcopy(value)}}, defaults=False, env=False)
                parsed[section][key] = alone[section][key]
            except Exception as error:
                judge.add(f"{section}.{key}", f"{_type_message(error)}, got {json.dumps(value)}")
    return {section: parsed[section].as_dict() for section in SECTIONS}


def load_recipe(argv: list[str]) -> Recipe:
    """Reads the command line and the recipe it names.

    Returns the checked recipe. Raises UserError with every problem found: unknown keys, wrong types and choices, keys
    written twice, clashing settings, keys of older trainers. `--help` prints all keys and exits.
    """
    if "--help" in argv or "-h" in argv:
        print(describe_keys())
        raise SystemExit(0)
    config, overrides, check_only = split_arguments(argv)
    path = Path(config) if config else DEMO_RECIPE
    reader = _Reader(config or "configs/demo.yaml")
    raw = _read_recipe_file(path, reader)
    for key, text in overrides.items():
        _apply_override(raw, key, text, reader)
    judge = _Judge(reader)
    judge.keys(raw)
    without_adapters = "lora" in raw and raw["lora"] is None
    known = {
        section: {
            key: value
            for key, value in values.items()
            if f"{section}.{key}" in _known_keys() and _is_set(f"{section}.{key}", value)
        }
        for section, values in raw.items()
        if section in SECTIONS and isinstance(values, dict)
    }
    known["data"] = _spread_sources(known.get("data", {}))
    judge.sources(known["data"])
    parsed = _parse_types(known, judge)
    recipe = _assemble(reader.source, parsed, without_adapters, check_only)
    recipe.lora_given = tuple(known.get("lora", {}))
    _find_clashes(recipe, judge, given=known)
    _find_source_clashes(recipe.data, judge, given=known["data"])
    if recipe.data.streaming and recipe.training["do_train"]:
        _find_streaming_clashes(recipe, judge)
    if judge.problems:
        raise UserError(*judge.problems)
    return recipe


def _assemble(source: str, parsed: dict[str, Any], without_adapters: bool, check_only: bool) -> Recipe:
    data = dict(parsed["data"])
    data["train"] = [_build_source(item) for item in data["train"]]
    data["validation"] = {name: _build_source(item) for name, item in data["validation"].items()}
    model = ModelConfig(**parsed["model"])
    model.language = language_code(model.language)
    return Recipe(
        source=source,
        model=model,
        lora=None if without_adapters else _plain(parsed["lora"]),
        data=DataConfig(**data),
        run=RunConfig(**parsed["run"]),
        training=_plain(parsed["training"]),
        check_only=check_only,
    )


def _build_source(item: Any) -> DataSource:
    source = DataSource(**_plain(item))
    source.language = language_code(source.language)
    return source


def _plain(value: Any) -> Any:
    """Nested namespaces as dictionaries, enumeration members as their words."""
    if hasattr(value, "as_dict"):
        value = value.as_dict()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(item) for item in value]
    return getattr(value, "value", value)


def language_code(language: str | None) -> str | None:
    """The two- or three-letter code of a language given as code or English name in any case; None for not set.

    A name that Whisper does not know comes back unchanged, for the caller to refuse.
    """
    word = (language or "").strip().lower()
    if word in ("", "none", "null"):
        return None
    return TO_LANGUAGE_CODE.get(word, word)


def nearest_languages(language: str) -> str:
    """The advice for a language that Whisper has no token for: nearest names and how to borrow another's token."""
    names = [*LANGUAGES, *TO_LANGUAGE_CODE]
    close = difflib.get_close_matches(language.lower(), names, n=3, cutoff=0.5)
    nearest = f"; nearest: {', '.join(close)}" if close else ""
    return f"Whisper has no language {language!r}{nearest}. To teach a new one, borrow the token of a related language"


def _find_clashes(recipe: Recipe, judge: _Judge, *, given: dict[str, dict[str, Any]]) -> None:
    """Settings that are each valid and do not go together, with the key to change."""
    model, lora, data, run, training = recipe.model, recipe.lora, recipe.data, recipe.run, recipe.training
    if not model.name:
        judge.missing("model.name", "a Hub id such as openai/whisper-small, or a folder")
    if model.language and model.language not in LANGUAGES:
        judge.add("model.language", nearest_languages(model.language))
    if lora is None and model.quantization != "none":
        judge.add("lora", f"full fine-tuning (lora: null) cannot change {model.quantization} weights; write model.quantization: none")
    if lora is None and model.adapter:
        judge.add("model.adapter", "full fine-tuning (lora: null) has no adapter; leave one of them out")
    if lora is not None:
        _find_lora_clashes(lora, model, judge)
    if not data.train and training["do_train"]:
        judge.missing("data.train", "the manifest to train on")
    if not data.validation:
        judge.missing("data.validation", "at least one named set, so that the gain can be measured")
    for name in data.validation:
        if not re.fullmatch(r"[A-Za-z0-9-][A-Za-z0-9_-]*", name) or name == "train":
            judge.add(f"data.validation.{name}", "a set's name is letters, digits, - and _, and not train")
    if not 0 < data.max_duration_seconds <= 30:
        judge.add("data.max_duration_seconds", "at most 30, the model's window, and above 0")
    if not 0 <= data.max_dropped_share <= 1:
        judge.add("data.max_dropped_share", "a share between 0 and 1")
    for key in ("global_batch_size", "max_eval_samples", "early_stopping_patience"):
        value = getattr(run, key)
        if value is not None and value < 1:
            judge.add(f"run.{key}", "at least 1, or null")
    if run.max_skipped_steps < 0:
        judge.add("run.max_skipped_steps", "0, which stops at the first, or more")
    if run.global_batch_size and "gradient_accumulation_steps" in given.get("training", {}):
        judge.add("run.global_batch_size", "gradient accumulation follows from it; leave training.gradient_accumulation_steps out")
    _find_training_clashes(recipe, judge)


def _find_lora_clashes(lora: dict[str, Any], model: ModelConfig, judge: _Judge) -> None:
    unchanged = _plain(_defaults()["lora"])
    for key, reason in UNTESTED_LORA.items():
        if lora[key] != unchanged[key]:
            judge.add(f"lora.{key}", f"not supported: {reason}")
    ranks = {"r": lora["r"]} | {f"rank_pattern.{word}": rank for word, rank in (lora["rank_pattern"] or {}).items()}
    for key, rank in ranks.items():
        if not isinstance(rank, int) or rank < 1:
            judge.add(f"lora.{key}", "a whole number, at least 1")
        elif lora["init_lora_weights"] == "orthogonal" and rank % 2:
            judge.add(f"lora.{key}", "init_lora_weights: orthogonal needs an even rank")
    for word, alpha in (lora["alpha_pattern"] or {}).items():
        if not isinstance(alpha, (int, float)):
            judge.add(f"lora.alpha_pattern.{word}", "a number is expected")
    if not lora["target_modules"]:
        judge.add("lora.target_modules", "at least one name, or a regular expression")
    words = {key: lora[key] for key in ("target_modules", "exclude_modules") if isinstance(lora[key], str)}
    words |= {f"{key}.{word}": word for key in ("rank_pattern", "alpha_pattern") for word in lora[key] or {}}
    for key, word in words.items():
        try:
            re.compile(word)
        except (re.error, OverflowError, RecursionError) as error:
            judge.add(f"lora.{key}", f"is no regular expression: {error}")
    problem = find_init_problem(lora["init_lora_weights"], model.quantization)
    if problem:
        judge.add("lora.init_lora_weights", f"not supported: {problem}")
    if lora["bias"] != "none" and model.quantization != "none":
        judge.add("lora.bias", f"{model.quantization} layers keep their biases as they are; write model.quantization: none, or leave it out")


def find_init_problem(init: bool | str, quantization: str) -> str | None:
    """Why an adapter that begins by this word of peft's init_lora_weights cannot be trained; None: it can."""
    for word, reason in _UNTESTED_INITS.items():
        if init == word or (isinstance(init, str) and init.startswith("pissa_niter_") and word == "pissa_niter_"):
            return reason
    if quantization != "none" and init in _UNQUANTIZED_INITS:
        return f"it is made from the weights as they are, not from {quantization} ones; write model.quantization: none"
    return None


def _find_training_clashes(recipe: Recipe, judge: _Judge) -> None:
    training = recipe.training
    if not training["output_dir"]:
        judge.missing("training.output_dir", "the folder that receives the run")
    for key, reason in UNTESTED.items():
        if training.get(key):
            judge.add(f"training.{key}", f"not supported: {reason}")
    for key, (value, reason) in FIXED.items():
        if training[key] != value:
            judge.add(f"training.{key}", f"must be {json.dumps(value)}: {reason}")
    if training["lr_scheduler_type"] == "reduce_lr_on_plateau":
        judge.add("training.lr_scheduler_type", "reduce_lr_on_plateau is not among the tested schedules")
    if training["do_train"] and not training["learning_rate"] > 0:
        judge.add("training.learning_rate", "must be above 0; with 0 nothing is learnt")
    if training["do_train"] and training["max_steps"] <= 0 and not training["num_train_epochs"] > 0:
        judge.add("training.num_train_epochs", "must be above 0, or training.max_steps")
    if training["bf16"] and training["fp16"]:
        judge.add("training.fp16", "bf16 and fp16 are both true; choose one, or neither and the card decides")
    checkpointing = training["gradient_checkpointing_kwargs"] or {}
    if not isinstance(checkpointing, dict):
        judge.add("training.gradient_checkpointing_kwargs", f"a mapping is expected, not {json.dumps(checkpointing)}")
    elif checkpointing.get("use_reentrant"):
        judge.add(
            "training.gradient_checkpointing_kwargs",
            "use_reentrant: true cuts the graph in front of the convolutions and breaks DDP; leave it out",
        )
    if training["torch_compile"] and recipe.model.quantization == "4bit":
        judge.add("training.torch_compile", "a compiler would keep 4-bit weights in 16 bit between the passes; write model.quantization: 8bit")
    if training["ddp_find_unused_parameters"]:
        judge.add("training.ddp_find_unused_parameters", "every adapter takes part in every step; leave it out")
    if training["remove_unused_columns"]:
        judge.add("training.remove_unused_columns", "the adapter hides the signature and all columns would go; leave it out")
    if training["label_names"] != ["labels"]:
        judge.add("training.label_names", "Whisper's labels are called labels; leave it out")
    if not training["predict_with_generate"]:
        judge.add("training.predict_with_generate", "scores need generated text; leave it out")
    counts = ["per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"]
    for key in (*counts, "generation_max_length", "generation_num_beams"):
        if training[key] is not None and training[key] < 1:
            judge.add(f"training.{key}", "at least 1")
    if recipe.run.early_stopping_patience and training["eval_strategy"] == "no":
        judge.add("run.early_stopping_patience", "needs evaluations; set training.eval_strategy")
    _find_best_model_clashes(recipe, judge)


def _find_best_model_clashes(recipe: Recipe, judge: _Judge) -> None:
    training = recipe.training
    names = [f"{name}_{score}" for name in recipe.data.validation for score in SCORES]
    metric = training["metric_for_best_model"] or (names[0] if names else None)
    if metric and names and metric.removeprefix("eval_") not in names:
        close = [name for name in names if name.endswith(tuple(difflib.get_close_matches(metric.rpartition("_")[2], SCORES, n=1)))]
        judge.add(
            "training.metric_for_best_model",
            f"{metric} is not measured; {'did you mean ' + close[0] + '? ' if close else ''}there are {', '.join(names)}",
        )
    if training["greater_is_better"]:
        judge.add("training.greater_is_better", "WER, CER and loss are better when lower; leave it out")
    if not training["load_best_model_at_end"] or not training["do_train"]:
        return
    if training["eval_strategy"] == "no":
        judge.add("training.eval_strategy", "load_best_model_at_end needs evaluations: steps or epoch")
    elif training["save_strategy"] not in (training["eval_strategy"], "best"):
        judge.add("training.save_strategy", f"the best model can only be kept when it equals eval_strategy ({training['eval_strategy']})")
    elif training["eval_strategy"] == training["save_strategy"] == "steps":
        if training["eval_steps"] not in (None, training["save_steps"]):
            message = f"must equal eval_steps ({training['eval_steps']:g}), so that every model scored is also kept"
            judge.add("training.save_steps", message)


def _find_source_clashes(data: DataConfig, judge: _Judge, *, given: dict[str, Any]) -> None:
    for place, source in data.sources().items():
        if source.path and source.hub:
            judge.add(place, "has path and hub; leave one of them out")
        for key in ("config", "split", "revision"):
            if source.path and not source.hub and getattr(source, key):
                judge.add(f"{place}.{key}", "belongs to sets from the Hub; a manifest has none")
        if source.hub and not source.path and source.audio_folder:
            judge.add(f"{place}.audio_folder", "belongs to manifests; a set from the Hub has its sound within")
        if source.hub and not source.split:
            judge.missing(f"{place}.split", "such as train or test")
        if not 0 < source.weight < math.inf:
            judge.add(f"{place}.weight", "must be above 0")
        if source.language and source.language not in LANGUAGES:
            judge.add(f"{place}.language", nearest_languages(source.language))
        if source.speaker_share is not None:
            low, *high = source.speaker_share or [math.nan]
            if len(high) != 1 or not 0 <= low < high[0] <= 1:
                judge.add(f"{place}.speaker_share", "two numbers are expected, [low, high] with 0 <= low < high <= 1")
    validation = given.get("validation")
    for name, source in validation.items() if isinstance(validation, dict) else ():
        if isinstance(source, dict) and "weight" in source:
            judge.add(f"data.validation.{name}.weight", "scored sets are read once; leave it out")


def _find_streaming_clashes(recipe: Recipe, judge: _Judge) -> None:
    """A stream has no known length: what counts in epochs cannot be used, and only the Hub is streamed."""
    for number, source in enumerate(recipe.data.train):
        if source.path:
            judge.add(f"data.train[{number}].path", "data.streaming reads sets from the Hub only; write hub, or data.streaming: false")
    if recipe.data.pack:
        judge.add("data.pack", "needs to know the length of every clip, which a stream does not tell (data.streaming); leave one of them out")
    if recipe.training["max_steps"] <= 0:
        judge.add("training.max_steps", "needed with data.streaming: a stream has no known length, so epochs cannot be counted")
    for key in ("eval_strategy", "save_strategy", "logging_strategy"):
        if recipe.training[key] == "epoch":
            judge.add(f"training.{key}", "is epoch, which a stream has none of (data.streaming); write steps")


# --- using -------------------------------------------------------------------------------------------------------


def best_metric(recipe: Recipe) -> str:
    """The name, set and score, that chooses the best checkpoint: as given, else the WER of the first validation set."""
    given = recipe.training["metric_for_best_model"]
    return (given or f"{next(iter(recipe.data.validation))}_wer").removeprefix("eval_")


def accumulation_steps(recipe: Recipe, world_size: int) -> int:
    """Micro-batches a step on each process, so that the global batch is what the recipe says.

    Raises UserError when run.global_batch_size cannot be split evenly.
    """
    if recipe.run.global_batch_size is None:
        return recipe.training["gradient_accumulation_steps"]
    at_once = world_size * recipe.training["per_device_train_batch_size"]
    steps, rest = divmod(recipe.run.global_batch_size, at_once)
    if rest or not steps:
        raise UserError(
            f"run.global_batch_size: {recipe.run.global_batch_size} is no multiple of {at_once} "
            f"({world_size} process{'es' if world_size > 1 else ''} x training.per_device_train_batch_size {at_once // world_size})"
        )
    return steps


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML: complete, re-runnable, without secrets."""

    def section(config: Any) -> dict[str, Any]:
        """Every key of a section."""
        return {f.name: _plain(getattr(config, f.name)) for f in fields(config)}

    def source_keys(source: DataSource) -> dict[str, Any]:
        """The keys of a source that are set."""
        return {key: value for key, value in section(source).items() if value is not None}

    lora = recipe.lora
    if lora is not None and recipe.model.adapter:  # whose own settings stay
        lora = {key: lora[key] for key in recipe.lora_given}

    # Accumulation follows from the global batch size; both together would be refused.
    left_out = (*SECRETS, "gradient_accumulation_steps") if recipe.run.global_batch_size else SECRETS
    data = section(recipe.data)
    data["train"] = [source_keys(source) for source in recipe.data.train]
    data["validation"] = {name: source_keys(source) for name, source in recipe.data.validation.items()}
    for source in data["validation"].values():
        del source["weight"]  # scored sets are read once
    sections = {
        "model": section(recipe.model),
        "lora": lora,
        "data": data,
        "run": section(recipe.run),
        "training": {key: value for key, value in recipe.training.items() if key not in left_out},
    }
    return yaml.dump(sections, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Puts quotes around words that the reader of recipes would take for something else, such as 1e5."""

    def represent_word(self, word: str) -> yaml.Node:
        """A text, in quotes only where it needs them."""
        return self.represent_scalar("tag:yaml.org,2002:str", word, style=None if _read_scalar(word) == word else "'")


_Dumper.add_representer(str, _Dumper.represent_word)
