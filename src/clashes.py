"""Which settings do not go together, or were never tried? Every rule that refuses a recipe whose keys and types are right."""

import difflib
import json
import math
import re
from typing import TYPE_CHECKING, Any, Protocol

from transformers.models.whisper.tokenization_whisper import LANGUAGES

from languages import nearest_languages

if TYPE_CHECKING:  # config.py knows these rules, not the other way round
    from config import DataConfig, ModelConfig, Recipe

SCORES = ("wer", "cer", "wer_raw", "cer_raw", "loss")

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
    "save_on_each_node": "the main process alone writes, into a folder that all machines share",
    "save_only_model": "a checkpoint without optimiser state cannot be resumed",
    "ignore_data_skip": "a resumed run goes on with the same order of data",
    "resume_from_checkpoint": "write run.resume: auto",
    "sortish_sampler": "every window is 30 seconds; there is nothing to sort",
    "hub_token": "pushing is not part of this version, and a token would lie in every checkpoint",
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


class Judge(Protocol):
    """Collects the problems of a recipe."""

    def add(self, key: str, message: str) -> None:
        """Adds a problem of a key."""

    def missing(self, key: str, message: str) -> None:
        """Adds that a key is missing."""


def find_clashes(recipe: "Recipe", judge: Judge, *, given: dict[str, dict[str, Any]], lora_defaults: dict[str, Any]) -> None:
    """Tells `judge` of all settings that are each valid and do not go together, with the key to change.

    `given` are the sections as written; `lora_defaults` are peft's and the recipe's own, so that changes are known.
    """
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
        _find_lora_clashes(lora, model, judge, defaults=lora_defaults)
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
    for key in ("time_limit_seconds", "stall_timeout_seconds"):
        value = getattr(run, key)
        if value is not None and not 0 < value < math.inf:
            judge.add(f"run.{key}", "must be above 0")
    if run.global_batch_size and "gradient_accumulation_steps" in given.get("training", {}):
        judge.add("run.global_batch_size", "gradient accumulation follows from it; leave training.gradient_accumulation_steps out")
    _find_training_clashes(recipe, judge)
    _find_source_clashes(data, judge, given=given["data"])
    if data.streaming and training["do_train"]:
        _find_streaming_clashes(recipe, judge)


def _find_lora_clashes(lora: dict[str, Any], model: "ModelConfig", judge: Judge, *, defaults: dict[str, Any]) -> None:
    for key, reason in UNTESTED_LORA.items():
        if lora[key] != defaults[key]:
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


def _find_training_clashes(recipe: "Recipe", judge: Judge) -> None:
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


def _find_best_model_clashes(recipe: "Recipe", judge: Judge) -> None:
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


def _find_source_clashes(data: "DataConfig", judge: Judge, *, given: dict[str, Any]) -> None:
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


def _find_streaming_clashes(recipe: "Recipe", judge: Judge) -> None:
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
