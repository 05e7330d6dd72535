"""What does a run leave behind? Results, recipe, model card and curves; written beside and renamed, by the main process."""

import json
import os
import platform
import re
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import GenerationConfig, WhisperProcessor

from checkpoints import SAVING, list_checkpoints, naming_the_file, remove_leftovers
from config import Recipe, TrainingConfig, dump_recipe
from device import Place, describe_place
from faults import UserError
from manifest import Row
from model import BaseModel
from scores import count_word_errors, paired_p_value

RECIPE_FILE, RESULTS_FILE = "recipe.yaml", "results.json"
LIBRARIES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "datasets", "evaluate", "jiwer", "librosa")


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


def prepare_output_dir(folder: Path, recipe: Recipe) -> str:
    """Makes the output folder, or looks at the earlier run in it.

    Returns the differences, a line each, between the earlier run's recipe and this one when resuming; else "". Raises
    UserError when the folder holds an earlier run and the recipe does not resume, or when it cannot be written.
    """
    held = [name for name in (RECIPE_FILE, RESULTS_FILE) if (folder / name).exists()]
    held += [path.name for path in list_checkpoints(folder)]
    if held and recipe.run.resume == "never":
        raise UserError(
            f"training.output_dir: {folder} holds an earlier run ({', '.join(held[:3])}). Choose another folder, "
            "or go on with it: --run.resume auto"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / ".writable", "")
        (folder / ".writable").unlink()
    except OSError as error:
        raise UserError(f"training.output_dir: {folder} cannot be written: {error.strerror}") from None
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
    fixed = [line for line in differences.splitlines() if re.search(r": (lora\.|model\.(name|quantization|freeze_encoder))", line)]
    if fixed and list_checkpoints(folder):
        raise UserError(*(f"{line}; a run goes on with the model it began with" for line in fixed))
    return differences


def compare_recipes(saved: dict[str, Any], current: str) -> str:
    """One line for every setting that differs; how the run resumes is no difference."""
    now = yaml.safe_load(current)
    lines = []
    for section in now:
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
    for path in beside.iterdir():
        os.replace(path, folder / path.name)
    beside.rmdir()


def library_versions() -> dict[str, str]:
    """Library name -> version, Python included."""
    return {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES}


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
            if final["wer"] > before["wer"]:
                change += "; training made it worse"
            if name in results["paired_p_value"]:
                change += f"; paired over the clips: p = {results['paired_p_value'][name]:.4f}"
        lines.append(f"{name}: {change} ({final['rows_scored']} of {final['rows_total']} rows)")
    return lines


def write_model_card(folder: Path, recipe: Recipe, results: dict[str, Any]) -> None:
    """README.md of the output folder: what it is, its scores, how to load it, what made it."""
    rows = "\n".join(
        f"| {name} | {_cell(results['baseline'].get(name), 'wer')} | {final['wer']:.2f} "
        f"| {_cell(results['baseline'].get(name), 'cer')} | {final['cer']:.2f} | {final['rows_scored']} of {final['rows_total']} |"
        for name, final in results["final"].items()
    )
    if recipe.lora is None:
        load = f'model = WhisperForConditionalGeneration.from_pretrained("{folder.name}")'
    else:
        load = (
            f'base = WhisperForConditionalGeneration.from_pretrained("{recipe.model.name}")\n'
            f'base.generation_config = GenerationConfig.from_pretrained("{folder.name}")\n'
            f'model = PeftModel.from_pretrained(base, "{folder.name}")'
        )
    first, names = "", "WhisperForConditionalGeneration, WhisperProcessor"
    if recipe.lora is not None:
        first, names = "from peft import PeftModel\n", f"GenerationConfig, {names}"
    normalizers = sorted({name for final in results["final"].values() for name in final["normalizers"]})
    front = {"base_model": recipe.model.name, "library_name": "peft" if recipe.lora else "transformers", "tags": ["whisper-ddp"]}
    write_text(
        folder / "README.md",
        f"""---
{yaml.safe_dump(front, sort_keys=False)}---
# {folder.name}

{recipe.model.name}, fine-tuned by whisper-ddp{' with LoRA' if recipe.lora is not None else ''}.

Scores in percent over whole sets, greedy or beam search as in `generation_config.json`, clips up to 30 s.
Normalised by: {', '.join(normalizers)}.

| set | WER before | WER after | CER before | CER after | rows |
|---|---|---|---|---|---|
{rows}

Trained without time tokens: timestamps of this model are worth little.

```python
{first}from transformers import {names}

{load}
processor = WhisperProcessor.from_pretrained("{folder.name}")
```

Steps: {results['train'].get('steps', 0)}. Processes: {results['world_size']}. Global batch: {results['global_batch_size']}.
The whole recipe is in `recipe.yaml`, all figures in `results.json`, rows left out in `data_report.json`.
""",
    )


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
    left.plot(*zip(*losses, strict=True)) if losses else None
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
