"""What does a run leave behind? Results, recipe, model card and curves; written beside and renamed, by the main process."""

import json
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import GenerationConfig, WhisperProcessor

from adapters import ADAPTER_FILE
from checkpoints import SAVING, asks_for_more, list_checkpoints, naming_the_file, open_to_read, remove_leftovers
from config import Recipe, TrainingConfig, dump_recipe
from device import Place, describe_place
from faults import UserError
from lock import lock_folder
from manifest import Row
from model import MODEL_FILE, BaseModel
from scores import NORMALIZERS, count_word_errors, paired_p_value
from versions import library_versions

RECIPE_FILE, RESULTS_FILE = "recipe.yaml", "results.json"


def write_text(path: Path, text: str) -> None:
    """Writes a file beside and renames it, so that nobody ever reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file as `write_text` does; numbers that are not finite are refused (ValueError)."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def describe_finished_run(folder: Path, recipe: Recipe) -> str:
    """What to tell in place of resuming a run whose results are written and of which nothing more is asked; else ""."""
    if recipe.run.resume == "never" or not recipe.training["do_train"]:
        return ""
    try:
        results = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
        status, why, part = results["status"], results.get("why", ""), results["train"]
        steps, last, epochs = part["steps"], part["max_steps"], part["epochs"]
    except (OSError, ValueError, TypeError, KeyError):
        return ""  # not written yet, or those of a run that only scored
    patience = recipe.run.early_stopping_patience
    ended = re.fullmatch(r"no better \S+ in (\d+) evaluations?", why)
    if status == "stopped_early" and ended and patience and patience <= int(ended[1]):
        return f"{folder} is finished ({steps:,} of {last:,} steps, {why}); to train on: --run.early_stopping_patience MORE"
    if status != "finished" or asks_for_more(recipe, steps=steps, epochs=epochs):
        return ""
    return f"{folder} is finished ({steps:,} of {last:,} steps); to train on: --training.max_steps MORE"


def prepare_output_dir(folder: Path, recipe: Recipe) -> str:
    """Makes the output folder, or looks at the earlier run in it; no other run can take it until this process ends.

    Returns the differences, a line each, between the earlier run's recipe and this one when resuming; else "". Raises
    UserError when another run is writing there, when the folder holds an earlier run and the recipe does not resume, or
    when it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / ".writable", "")
        (folder / ".writable").unlink()
        lock_folder(folder)
    except OSError as error:
        raise UserError(f"training.output_dir: {folder} cannot be written: {error.strerror}") from None
    held = [name for name in (RECIPE_FILE, RESULTS_FILE) if (folder / name).exists()]
    held += [path.name for path in list_checkpoints(folder)]
    if held and recipe.run.resume == "never":
        raise UserError(
            f"training.output_dir: {folder} holds an earlier run ({', '.join(held[:3])}). Choose another folder, "
            "or go on with it: --run.resume auto"
        )
    if not recipe.training["do_train"] and any((folder / name).is_file() for name in (ADAPTER_FILE, MODEL_FILE)):
        raise UserError(f"training.output_dir: {folder} holds a trained model, and scoring would replace its results. Choose another folder")
    if not recipe.check_only:  # a check looks at the folder of a run that may be at work
        remove_leftovers(folder)
    if not (folder / RECIPE_FILE).is_file():
        return ""
    try:
        saved = yaml.safe_load((folder / RECIPE_FILE).read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError):
        saved = None
    if not isinstance(saved, dict):
        return f"warning: {folder / RECIPE_FILE} cannot be read; whether settings differ is not known"
    differences = compare_recipes(saved, dump_recipe(recipe))
    words = r": (lora\.|model\.(name|quantization|freeze_encoder)|model\.adapter: (null ->|.* -> null$))"
    fixed = [line for line in differences.splitlines() if re.search(words, line)]
    if fixed and list_checkpoints(folder):
        raise UserError(*(f"{line}; a run goes on with the model it began with" for line in fixed))
    return differences


def compare_recipes(saved: dict[str, Any], current: str) -> str:
    """One line for every setting that differs; how the run resumes is no difference."""
    now = yaml.safe_load(current)
    lines = []
    adapters = [(recipe.get("model") or {}).get("adapter") for recipe in (saved, now)]
    for section in now:
        if section == "lora" and (adapters[0] is None) != (adapters[1] is None):
            continue  # the keys beside an adapter, whose own settings stay, are others than those of a new one
        before, after = saved.get(section) or {}, now[section] or {}
        for key in sorted({*before, *after} - {"resume"}):
            if before.get(key) != after.get(key):
                change = f"{json.dumps(before.get(key))} -> {json.dumps(after.get(key))}"
                lines.append(f"differs from the run that is resumed: {section}.{key}: {change}")
    return "\n".join(lines)


def check_files_can_be_read_back(base: BaseModel) -> None:
    """Writes processor, model config and generation config to a scratch folder and reads them back, before step 1.

    Raises UserError when they cannot be saved or come back changed: better now than after hours of training.
    """
    with tempfile.TemporaryDirectory() as scratch:
        try:
            base.processor.save_pretrained(scratch)
            base.config.save_pretrained(scratch)
            base.generation_config.save_pretrained(scratch)
            settings = GenerationConfig.from_pretrained(scratch).to_diff_dict()
            tokenizer = WhisperProcessor.from_pretrained(scratch).tokenizer
        except (OSError, ValueError) as error:
            said = " ".join(str(error).split())
            raise UserError(f"model.name: the files of {base.name} cannot be saved: {said}") from error
    if settings != base.generation_config.to_diff_dict() or tokenizer.get_vocab() != base.processor.tokenizer.get_vocab():
        raise UserError(f"model.name: the generation config or tokenizer of {base.name} does not survive saving")


def save_model(folder: Path, model: torch.nn.Module, base: BaseModel) -> None:
    """Writes adapter or model, processor and generation config into a folder beside and moves them into `folder`."""
    beside = folder / f"{SAVING}.{os.getpid()}"
    model.config.use_cache, model.config.apply_spec_augment = True, False
    with naming_the_file(beside):
        model.save_pretrained(beside)
        base.processor.save_pretrained(beside)
        base.processor.feature_extractor.save_pretrained(beside)  # preprocessor_config.json: converters look for it
        base.generation_config.save_pretrained(beside)
    open_to_read(beside)
    for path in beside.iterdir():
        os.replace(path, folder / path.name)
    beside.rmdir()


def describe_run(recipe: Recipe, arguments: TrainingConfig, *, place: Place, compute_type: torch.dtype) -> dict[str, Any]:
    """The parts of results.json that are known before training; the others are there, empty."""
    return {
        "status": "finished",
        "world_size": place.world_size,
        "global_batch_size": arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * place.world_size,
        "model": recipe.model.name,
        "quantization": recipe.model.quantization,
        "compute_type": str(compute_type).removeprefix("torch."),
        "place": describe_place(place),
        "versions": library_versions(),
        "baseline": {},
        "final": {},
        "train": {},
        "paired_p_value": {},
    }


def write_predictions(folder: Path, stage: str, texts: dict[str, list[tuple[Row, str, str | None]]]) -> None:
    """Writes predictions/STAGE-SET.jsonl: for every scored row its place, both texts, word edits by kind and reference words."""
    for name, rows in texts.items():
        references, hypotheses = [row.text for row, _, _ in rows], [text for _, text, _ in rows]
        counts = count_word_errors(references, hypotheses, languages=[language for _, _, language in rows])
        lines = [
            json.dumps(
                {
                    "file": row.file,
                    "line": row.line,
                    "audio": row.audio,
                    "reference": row.text,
                    "hypothesis": text,
                    "errors": count.errors,
                    **count._asdict(),
                },
                ensure_ascii=False,
            )
            for (row, text, _), count in zip(rows, counts, strict=True)
        ]
        write_text(folder / "predictions" / f"{stage}-{name}.jsonl", "\n".join(lines) + "\n")


def compare_predictions(folder: Path, names: Iterable[str]) -> dict[str, float]:
    """Set name -> the chance that baseline and final differ this much in word errors over the same clips by luck alone.

    Sets without both predictions are left out.
    """
    chances = {}
    for name in names:
        paths = [folder / "predictions" / f"{stage}-{name}.jsonl" for stage in ("baseline", "final")]
        if all(path.is_file() for path in paths):
            before, after = ([json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line] for path in paths)
            if [(row["file"], row["line"]) for row in before] == [(row["file"], row["line"]) for row in after]:
                chances[name] = paired_p_value([row["errors"] for row in before], [row["errors"] for row in after])
    return chances


def describe_gain(results: dict[str, Any]) -> list[str]:
    """Lines that show each set's WER and CER before and after, and say it plainly when training made it worse."""
    lines = []
    for name, final in results["final"].items():
        before = results["baseline"].get(name)
        change = f"WER {final['wer']:.2f} %, CER {final['cer']:.2f} %"
        if before:
            change = f"WER {before['wer']:.2f} -> {final['wer']:.2f} %, CER {before['cer']:.2f} -> {final['cer']:.2f} %"
            chance = results["paired_p_value"].get(name)
            if final["wer"] > before["wer"]:
                change += "; training made it worse"
            if chance is not None:
                change += f"; paired over the clips: p = {chance:.4f}{', within chance' if chance >= 0.05 else ''}"
        lines.append(f"{name}: {change} ({final['rows_scored']} of {final['rows_total']} rows)")
    return lines


def write_model_card(folder: Path, recipe: Recipe, results: dict[str, Any]) -> None:
    """README.md of the output folder: what it is, its scores and how they were taken, lines that transcribe by it, what made it."""
    rows = "\n".join(
        f"| {name} | {_cell(results['baseline'].get(name), 'wer')} | {final['wer']:.2f} "
        f"| {_cell(results['baseline'].get(name), 'cer')} | {final['cer']:.2f} | {final['rows_scored']} of {final['rows_total']} |"
        for name, final in results["final"].items()
    )
    is_local = Path(recipe.model.name).is_dir()
    base = Path(recipe.model.name).resolve().name if is_local else recipe.model.name
    languages = sorted({word for word in (recipe.model.language, *(s.language for s in recipe.data.sources().values())) if word})
    normalizers = sorted({name for final in results["final"].values() for name in final["normalizers"]})
    # Where the base is a folder, its path says nothing to other machines.
    front = {} if is_local else {"base_model": base}
    front |= {"language": languages} if languages else {}
    front |= {"library_name": "peft" if recipe.lora is not None else "transformers", "tags": ["whisper-ddp"]}
    before = "the untouched model"
    if recipe.model.adapter:
        adapter = Path(recipe.model.adapter).resolve().name
        before = f"the adapter `{adapter}` (`model.adapter`) that training went on from, not of the base model"
    stored = {"8bit": "8 bit", "4bit": "4 bit", "none": "their own type"}[results["quantization"]]
    write_text(
        folder / "README.md",
        f"""---
{yaml.safe_dump(front, sort_keys=False)}---
# {folder.resolve().name}

{base}, fine-tuned by whisper-ddp{' with LoRA' if recipe.lora is not None else ''}.
Language: {', '.join(languages) or 'as each row says'}. Task: {recipe.model.task}, where a row names no other.

| set | WER before | WER after | CER before | CER after | rows |
|---|---|---|---|---|---|
{rows}

In percent over whole sets, clips up to 30 s, {_describe_search(recipe)}. "Before" is the score of {before}.
Scores were taken with frozen weights in {stored}, computed in {results['compute_type']}; the lines below load float32, which may differ a little.
Both texts were normalised first: {'; '.join(f'`{name}`: {NORMALIZERS[name]}' for name in normalizers)}.

Trained without time tokens: timestamps of this model are worth little.

## Use

Run these lines inside this folder; elsewhere, name the folder, or the Hub repository that holds it.

```python
{_write_code(base, is_local=is_local, with_adapter=recipe.lora is not None)}```

Steps: {results['train'].get('steps', 0)}. Processes: {results['world_size']}. Global batch: {results['global_batch_size']}.
The whole recipe is in `recipe.yaml`, all figures in `results.json`, rows left out in `data_report.json`.
""",
    )


def _describe_search(recipe: Recipe) -> str:
    beams = recipe.training["generation_num_beams"] or 1
    return "greedy search" if beams == 1 else f"search with {beams} beams"


def _write_code(base: str, *, is_local: bool, with_adapter: bool) -> str:
    """The card's lines that load the model and transcribe a file. A base that was a local folder has to be put in by hand."""
    comment = "  # put here the folder of this base model, or its Hub id" if is_local else ""
    names = "GenerationConfig, WhisperForConditionalGeneration, WhisperProcessor"
    load = f"""base = WhisperForConditionalGeneration.from_pretrained("{base}", dtype="float32"){comment}
base.generation_config = GenerationConfig.from_pretrained(folder)
model = PeftModel.from_pretrained(base, folder)
"""
    if not with_adapter:
        names = names.removeprefix("GenerationConfig, ")
        load = 'model = WhisperForConditionalGeneration.from_pretrained(folder, dtype="float32")\n'
    return f"""import librosa
{"from peft import PeftModel" + chr(10) if with_adapter else ""}from transformers import {names}

folder = "."
{load}processor = WhisperProcessor.from_pretrained(folder)

sound, _ = librosa.load("clip.wav", sr=16_000)  # at most 30 s
features = processor(sound, sampling_rate=16_000, return_tensors="pt").input_features
ids = model.eval().generate(features)  # language and task of generation_config.json; others: language="fr", task="transcribe"
print(processor.batch_decode(ids, skip_special_tokens=True)[0].strip())
"""


def _cell(scores: dict[str, Any] | None, key: str) -> str:
    return f"{scores[key]:.2f}" if scores else "not measured"


def write_results(folder: Path, recipe: Recipe, results: dict[str, Any], *, history: list[dict[str, Any]]) -> None:
    """Writes model card, curves and, last, results.json: where it lies, the run is complete. `history` is the trainer's log."""
    if recipe.training["do_train"]:
        write_model_card(folder, recipe, results)
        draw_curves(folder, history, results)
    write_json(folder / RESULTS_FILE, results)


def draw_curves(folder: Path, history: list[dict[str, Any]], results: dict[str, Any]) -> None:
    """Draws training loss and the WER of every set over the steps into curves.png; step 0 is the untouched model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    losses = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    left.plot(*zip(*losses, strict=True), marker=".") if losses else None  # a line through one value would show nothing
    left.set(title="Training loss", xlabel="step", ylabel="nats per token")
    for name, final in results["final"].items():
        points = {entry["step"]: entry[f"eval_{name}_wer"] for entry in history if f"eval_{name}_wer" in entry}
        if name in results["baseline"]:
            points[0] = results["baseline"][name]["wer"]
        right.plot(*zip(*sorted(points.items()), strict=True), marker="o", label=f"{name} (final {final['wer']:.1f} %)") if points else None
    right.set(title="Word error rate", xlabel="step", ylabel="%", ylim=(0, None))
    right.legend() if right.lines else None
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    beside = folder / ".curves.png"
    figure.savefig(beside, dpi=120)
    pyplot.close(figure)
    os.replace(beside, folder / "curves.png")
