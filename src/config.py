"""What is a valid recipe? One YAML file, strictly read, plus overrides; every mistake is told at once, before anything loads."""

import copy
import difflib
import functools
import json
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import yaml
from jsonargparse import ArgumentParser, Namespace
from peft import LoraConfig
from transformers import Seq2SeqTrainingArguments

from clashes import FIXED, UNTESTED, UNTESTED_LORA, find_clashes
from faults import UserError
from languages import language_code

DEMO_RECIPE = Path(__file__).parent.parent / "configs" / "demo.yaml"
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
        global_batch_size: clips (windows with data.pack) a step over all processes; accumulation follows; null: the training section tells.
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
    find_clashes(recipe, judge, given=known, lora_defaults=_plain(_defaults()["lora"]))
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
