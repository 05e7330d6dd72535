"""Fine-tunes Whisper on every GPU of a machine: accelerate launch src/train.py --config configs/X.yaml"""

import os

# Before any library starts threads: loader workers are forked later.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Before CUDA starts: memory that grows in place, where blocks of many sizes would leave holes between them.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import json
import shlex
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import set_seed

import output
from adapters import check_adapter
from compiling import arrange_computation
from config import Recipe, best_metric, dump_recipe, load_recipe
from console import quieten, say
from device import Meeting, choose_compute_type, describe_place, is_main_process, join_processes, peak_memory_gib, settle_place
from estimates import find_shared_memory_shortage
from faults import RunFailure, UserError, progress
from labels import LabelBuilder
from learning import LearningCheck, check_saved_weights
from model import describe_generation, describe_model, load_model, read_base_model
from sets import check_sets, describe_plan
from trainer import ExplodingLoss, Patience, RecipeSteps, WhisperTrainer, build_arguments, build_examples, thin_out

# Ranks come to the same mistake within the spread of their imports; one that is only another rank's is told after it.
SECONDS_FOR_THE_MAIN_PROCESS = 20


def main(argv: list[str]) -> None:
    """One run, cheapest failure first. Raises UserError for what the user can mend."""
    # 1. The recipe.
    recipe = load_recipe(argv)
    folder = Path(recipe.training["output_dir"])

    # 2. The place of this process, and the other processes.
    place = settle_place(use_cpu=recipe.training["use_cpu"])
    quieten(is_main=place.is_main)
    say(describe_place(place))
    compute_type = choose_compute_type(place, bf16=recipe.training["bf16"], fp16=recipe.training["fp16"])
    meeting = join_processes(place, timeout_seconds=recipe.training["ddp_timeout"])
    arguments = build_arguments(recipe, compute_type, world_size=place.world_size, on_cpu=place.device == "cpu")

    # 3. The folder that receives the run.
    say(meeting.once(lambda: output.prepare_output_dir(folder, recipe).encode()).decode())

    # 4. All of the base model but its weights.
    base = read_base_model(recipe.model, max_new_tokens=arguments.generation_max_length, num_beams=arguments.generation_num_beams)
    output.check_files_can_be_read_back(base)
    notes = check_adapter(recipe, base.config)
    say(*base.notes, *notes, describe_generation(base))

    # 5. The data, every clip decoded once.
    labels = LabelBuilder(base, recipe.model, allow_empty_text=recipe.data.allow_empty_text)
    with progress.during("data"):
        checked = check_sets(recipe.data, labels, meeting=meeting, folder=folder, with_training=arguments.do_train)
    if arguments.do_train:
        say(describe_plan(checked["train"], recipe.data, arguments, place=place))
    say(find_shared_memory_shortage(arguments, mel_bins=base.config.num_mel_bins, place=place))
    say(*labels.describe_translation(row for part in checked.values() for row in part.rows))
    if recipe.check_only:
        say(f"--check: this run can start: accelerate launch src/train.py {shlex.join(w for w in argv if w != '--check')}")
        return

    # 6. The weights: a whole copy on this process's own device.
    set_seed(arguments.seed)
    model = load_model(recipe, base, place, compute_type=compute_type)
    computation = arrange_computation(model, recipe, compute_type=compute_type)
    say(describe_model(model, recipe, compute_type))

    # 7. The trainer. Scores of the untouched model are logged before the library knows where logs go.
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "logs")
    train_set, sets = build_examples(recipe, checked, labels, place=place)
    trainer = WhisperTrainer(
        model=model,
        args=arguments,
        train_dataset=train_set,
        eval_dataset={name: thin_out(examples, recipe.run.max_eval_samples) for name, examples in sets.items()},
        callbacks=[LearningCheck(model), RecipeSteps(), ExplodingLoss(base.config.vocab_size)],
        place=place,
        labels=labels,
        computation=computation,
        sets=sets,
        rows_total={name: checked[name].rows_total for name in sets},
    )

    # 8. Scores before, training, scores after.
    if place.is_main:
        output.write_text(folder / output.RECIPE_FILE, dump_recipe(recipe))
    results = output.describe_run(recipe, arguments, place=place, compute_type=compute_type)
    if arguments.do_train:
        results |= train(recipe, trainer, folder, meeting=meeting)
    results["final"] = trainer.score(sets, "final")

    # 9. The files.
    with progress.during("save"):
        if place.is_main:
            output.write_predictions(folder, "final", trainer.texts)
            results["paired_p_value"] = output.compare_predictions(folder, sets)
            output.write_results(folder, recipe, results, history=trainer.state.log_history)
    say(*output.describe_gain(results), f"all of it is in {folder}")
    trainer.accelerator.end_training()


def train(recipe: Recipe, trainer: WhisperTrainer, folder: Path, *, meeting: Meeting) -> dict[str, Any]:
    """Scores the untouched model, trains from the start or from the newest complete checkpoint, saves and reads back.

    Returns the parts `baseline`, `train`, `best` and `status` of the results.
    """
    place = meeting.place
    checkpoint, baseline = None, {}
    if recipe.run.resume == "auto":
        # One rank looks at the disk, so that all take the same branch.
        found = json.loads(meeting.once(lambda: output.find_earlier_part(folder, world_size=place.world_size)))
        checkpoint, baseline = found["checkpoint"] and Path(found["checkpoint"]), found["baseline"]
        say(*found["notes"], f"going on from {checkpoint}" if checkpoint else "no complete checkpoint: starting anew")
    if recipe.run.baseline and checkpoint is None:
        say("scoring the untouched model")
        baseline = trainer.score(trainer.sets, "baseline")
        if place.is_main:
            output.write_json(folder / output.BASELINE_FILE, baseline)
            output.write_predictions(folder, "baseline", trainer.texts)
    if recipe.run.early_stopping_patience:
        trainer.add_callback(Patience(recipe.run.early_stopping_patience))
    if checkpoint and found["is_finished"] and trainer.args.max_steps in (-1, found["steps"]):
        trainer.finish_at(checkpoint)
    else:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    trainer.pop_callback(Patience)
    with progress.during("save"):
        if place.is_main:
            output.save_model(folder, trainer.model, trainer.labels.base)
            check_saved_weights(trainer.model, folder, trainer.sample_loss)
    summary = trainer.summarize() | {"peak_memory_gib": peak_memory_gib(place)}
    best = {"metric": best_metric(recipe), "value": trainer.state.best_metric, "step": trainer.state.best_global_step}
    parts: dict[str, Any] = {"baseline": baseline, "train": summary, "best": best}
    if trainer.state.global_step < trainer.state.max_steps:
        patience = recipe.run.early_stopping_patience
        parts |= {"status": "stopped_early", "why": f"no better {best['metric']} in {patience} evaluations"}
    return parts


@record
def start(argv: list[str]) -> None:
    """Runs `main` and ends as the contract says: 2 for the user's mistakes, in plain words and from one process; else
    any failure with its traceback once, and last the rank, phase, step and error."""
    try:
        main(argv)
        if dist.is_initialized():
            # Only at a good end: after a failure it would wait for ranks that are busy or gone.
            dist.destroy_process_group()
    except UserError as error:
        if not is_main_process(os.environ):
            # The launcher ends all ranks when the first one leaves: the main process must have told the mistake by then.
            time.sleep(SECONDS_FOR_THE_MAIN_PROCESS)
        print(*error.problems, sep="\n", file=sys.stderr, flush=True)
        sys.exit(2)
    except Exception as error:
        traceback.print_exc()
        rank = os.environ.get("RANK", "0")
        where = f"rank {rank}, phase {progress.phase}, step {progress.step}"
        raise RunFailure(f"{where}: {type(error).__name__}: {error}") from None


if __name__ == "__main__":
    start(sys.argv[1:])
