"""Fine-tunes Whisper on every GPU of a machine: accelerate launch src/train.py --config configs/X.yaml"""

import os

# Before any library starts threads: loader workers are forked later.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Before CUDA starts: memory that grows in place, where blocks of many sizes would leave holes between them.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
# Before the processes meet: the last collectives are remembered, for the report of a stall.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "200")

import json
import shlex
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import set_seed

import checkpoints
import output
from adapters import check_adapter
from compiling import arrange_computation
from config import Recipe, TrainingConfig, best_metric, dump_recipe, load_recipe
from console import quieten, say
from device import Place, choose_compute_type, describe_launch, describe_place, is_main_process, peak_memory_gib, settle_place
from estimates import check_free_disk, describe_needs, find_shared_memory_shortage
from faults import RunFailure, UserError, describe_failure, progress
from labels import LabelBuilder
from learning import LearningCheck, check_saved_weights
from machines import check_same_disk
from meeting import Meeting, connect_store, describe_members, is_stuck, join_processes
from model import describe_generation, describe_model, load_model, read_base_model
from sets import CheckedSet, check_sets, describe_plan
from stopping import end_with_launcher, stop_request
from trainer import ExplodingLoss, Patience, RecipeSteps, WhisperTrainer, build_arguments, build_examples, thin_out
from versions import check_versions
from watchdog import Watchdog, collective_seconds

# Ranks come to the same mistake within the spread of their imports; one that is only another rank's is told after it.
SECONDS_FOR_THE_MAIN_PROCESS = 20


def main(argv: list[str], *, listen: bool = False) -> None:
    """One run, cheapest failure first. Raises UserError for what the user can mend.

    With `listen` signals ask for a stop from the moment on that the processes have met; before, they end this one at once.
    """
    # 1. The recipe.
    recipe = load_recipe(argv)
    stop_request.set_time_limit(recipe.run.time_limit_seconds)

    # 2. The place of this process, and the other processes; from here on a silent stop is noticed.
    place = settle_place(use_cpu=recipe.training["use_cpu"])
    quieten(is_main=place.is_main)
    check_versions()
    say(describe_place(place))
    compute_type = choose_compute_type(place, bf16=recipe.training["bf16"], fp16=recipe.training["fp16"])
    resolved, seconds = dump_recipe(recipe), collective_seconds(recipe)
    meeting = join_processes(place, recipe=resolved, compute_type=compute_type, timeout_seconds=seconds)
    say(*describe_members(meeting.members))
    if listen:
        stop_request.listen()
    store = connect_store(place) if place.world_size > 1 else None
    limit, folder = recipe.run.stall_timeout_seconds, Path(recipe.training["output_dir"])
    with Watchdog(progress, stop_request, place, store=store, limit=limit, folder=folder) as watchdog:
        watchdog.stop_status = int(recipe.check_only)  # 0 would say that the run can start
        run(recipe, argv, meeting=meeting, watchdog=watchdog, compute_type=compute_type)


def run(recipe: Recipe, argv: list[str], *, meeting: Meeting, watchdog: Watchdog, compute_type: torch.dtype) -> None:
    """All that follows the meeting of the processes: checks, weights, training, scores, files."""
    place, folder = meeting.place, watchdog.folder
    arguments = build_arguments(recipe, compute_type, world_size=place.world_size, on_cpu=place.device == "cpu")

    # 3. The folder that receives the run.
    say(meeting.once(lambda: output.prepare_output_dir(folder, recipe).encode()).decode())
    check_same_disk(recipe, meeting)
    if finished := meeting.once(lambda: output.describe_finished_run(folder, recipe).encode()).decode():
        say(finished)
        return

    results = output.describe_run(recipe, arguments, place=place, compute_type=compute_type)
    if not recipe.check_only:
        watchdog.end_early = lambda why: output.write_json(folder / output.RESULTS_FILE, results | {"status": "stopped_early", "why": why})

    # 4. and 5. All that can fail before the weights are there.
    labels, checked = check(recipe, arguments, meeting=meeting, folder=folder)
    if recipe.check_only:
        say(f"--check: this run can start: {describe_launch(place)} {shlex.join(w for w in argv if w != '--check')}")
        return

    # 6. and 7. The weights, and the trainer around them.
    trainer = build_trainer(recipe, arguments, labels=labels, checked=checked, place=place, compute_type=compute_type)

    # 8. Scores before, training, scores after.
    if place.is_main:
        output.write_text(folder / output.RECIPE_FILE, dump_recipe(recipe))
    if arguments.do_train:
        results |= train(recipe, trainer, folder, meeting=meeting)
    if trainer.stopped:
        if place.is_main:
            output.write_json(folder / output.RESULTS_FILE, results)
        say(results["why"])
        watchdog.end_early, progress.keeps = None, False
        return
    results["final"] = trainer.score(trainer.sets, "final")

    # 9. The files.
    with progress.during("save", patient=True, keeps=True):
        if place.is_main:
            output.write_predictions(folder, "final", trainer.texts)
            results["paired_p_value"] = output.compare_predictions(folder, trainer.sets)
            output.write_results(folder, recipe, results, history=trainer.state.log_history)
        watchdog.end_early = None
    say(*output.describe_gain(results), f"all of it is in {folder}")
    trainer.accelerator.end_training()


def check(
    recipe: Recipe, arguments: TrainingConfig, *, meeting: Meeting, folder: Path
) -> tuple[LabelBuilder, dict[str, CheckedSet]]:
    """Reads all of the base model but its weights, decodes every clip once, and tells the plan; gives what builds labels and the sets."""
    place = meeting.place
    with progress.during("load", patient=True):
        base = read_base_model(recipe.model, max_new_tokens=arguments.generation_max_length, num_beams=arguments.generation_num_beams)
        output.check_files_can_be_read_back(base)
        notes = check_adapter(recipe, base.config)
    say(*base.notes, *notes, describe_generation(base))

    labels = LabelBuilder(base, recipe.model, allow_empty_text=recipe.data.allow_empty_text)
    with progress.during("data", patient=True):
        checked = check_sets(recipe.data, labels, meeting=meeting, folder=folder, with_training=arguments.do_train)
    if arguments.do_train:
        say(describe_plan(checked["train"], recipe.data, arguments, place=place))
        say(*describe_needs(recipe, arguments, labels=labels, train=checked["train"], place=place))
    room = meeting.once(lambda: check_free_disk(folder, recipe, arguments, base.config, checked, world_size=place.world_size).encode())
    say(room.decode())
    say(find_shared_memory_shortage(arguments, mel_bins=base.config.num_mel_bins, place=place))
    say(*labels.describe_translation(row for part in checked.values() for row in part.rows))
    return labels, checked


def build_trainer(
    recipe: Recipe,
    arguments: TrainingConfig,
    *,
    labels: LabelBuilder,
    checked: dict[str, CheckedSet],
    place: Place,
    compute_type: torch.dtype,
) -> WhisperTrainer:
    """Loads a whole copy of the model onto this process's own device; gives the trainer of it."""
    set_seed(arguments.seed)
    with progress.during("load", patient=True):
        model = load_model(recipe, labels.base, place, compute_type=compute_type)
        computation = arrange_computation(model, recipe, compute_type=compute_type)
    say(describe_model(model, recipe, compute_type))

    # Scores of the untouched model are logged before the library knows where logs go.
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(Path(arguments.output_dir) / "logs")
    train_set, sets = build_examples(recipe, checked, labels, place=place)
    trainer = WhisperTrainer(
        model=model,
        args=arguments,
        train_dataset=train_set,
        eval_dataset={name: thin_out(examples, recipe.run.max_eval_samples) for name, examples in sets.items()},
        callbacks=[RecipeSteps(), ExplodingLoss(labels.base.config.vocab_size)],
        place=place,
        labels=labels,
        computation=computation,
        sets=sets,
        rows_total={name: checked[name].rows_total for name in sets},
        max_skipped_steps=recipe.run.max_skipped_steps,
    )
    trainer.add_callback(LearningCheck(model, trainer.finite_steps.was_skipped))
    return trainer


def train(recipe: Recipe, trainer: WhisperTrainer, folder: Path, *, meeting: Meeting) -> dict[str, Any]:
    """Scores the untouched model, trains from the start or from the newest complete checkpoint, saves and reads back.

    Returns the parts `baseline`, `train`, `best` and `status` of the results.
    """
    place = meeting.place
    checkpoint, baseline = None, {}
    if recipe.run.resume == "auto":
        # One rank looks at the disk, so that all take the same branch.
        found = json.loads(meeting.once(lambda: checkpoints.find_earlier_part(folder, recipe, world_size=place.world_size)))
        checkpoint, baseline = found["checkpoint"] and Path(found["checkpoint"]), found["baseline"]
        say(*found["notes"], f"going on from {checkpoint}" if checkpoint else "no complete checkpoint: starting anew")
    if recipe.run.baseline and checkpoint is None:
        say(f"scoring {f'the adapter {recipe.model.adapter} as it is' if recipe.model.adapter else 'the untouched model'}")
        baseline = trainer.score(trainer.sets, "baseline")
        if place.is_main:
            output.write_json(folder / checkpoints.BASELINE_FILE, baseline)
            output.write_predictions(folder, "baseline", trainer.texts)
    if recipe.run.early_stopping_patience:
        trainer.add_callback(Patience(recipe.run.early_stopping_patience))
    if checkpoint and found["is_finished"]:
        trainer.finish_at(checkpoint)
    else:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    trainer.pop_callback(Patience)
    summary = trainer.summarize() | {"peak_memory_gib": peak_memory_gib(place)}
    best = {"metric": best_metric(recipe), "value": trainer.state.best_metric, "step": trainer.state.best_global_step}
    parts: dict[str, Any] = {"baseline": baseline, "train": summary, "best": best}
    if trainer.stopped:
        return parts | {"status": "stopped_early", "why": describe_stop(trainer, folder)}
    with progress.during("save", patient=True, keeps=True):
        if place.is_main:
            output.save_model(folder, trainer.model, trainer.labels.base)
            check_saved_weights(trainer.model, folder, trainer.sample_loss)
    if trainer.state.global_step < trainer.state.max_steps:
        patience = recipe.run.early_stopping_patience
        parts |= {"status": "stopped_early", "why": f"no better {best['metric']} in {patience} evaluations"}
    return parts


def describe_stop(trainer: WhisperTrainer, folder: Path) -> str:
    """Why training stopped and from where it can go on; the checkpoint has been read back by the main process."""
    step = trainer.state.global_step
    if step == 0:
        return f"stopped by {trainer.stopped} before the first step"
    if trainer.place.is_main:
        checkpoints.verify(folder / f"checkpoint-{step}")
    saved = f"saved in checkpoint-{step}; the same command goes on from there with --run.resume auto"
    return f"stopped by {trainer.stopped} behind step {step}, {saved}"


@record
def start(argv: list[str]) -> None:
    """Runs `main` and ends as the contract says: 2 for the user's mistakes, in plain words and from one process; else
    any failure with its traceback once, and last the rank, phase, step and error."""
    end_with_launcher()
    try:
        main(argv, listen=True)
        if dist.is_initialized():
            # Only at a good end: after a failure it would wait for ranks that are busy or gone.
            dist.destroy_process_group()
    except UserError as error:
        if not is_main_process(os.environ):
            # The launcher ends all ranks when the first one leaves: the main process must have told the mistake by then.
            end = time.monotonic() + SECONDS_FOR_THE_MAIN_PROCESS
            while not stop_request.look() and time.monotonic() < end:
                time.sleep(0.1)
        print(*error.problems, sep="\n", file=sys.stderr, flush=True)
        if is_stuck():
            os._exit(2)
        sys.exit(2)
    except Exception as error:
        traceback.print_exc()
        raise RunFailure(describe_failure(error, rank=os.environ.get("RANK", "0"))) from None


if __name__ == "__main__":
    start(sys.argv[1:])
