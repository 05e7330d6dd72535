"""How is it trained and scored? The stock trainer, mended where Whisper or several ranks need it."""

import math
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import AutocastKwargs, broadcast, broadcast_object_list, gather_object
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import (
    EarlyStoppingCallback,
    EvalPrediction,
    PrinterCallback,
    ProgressCallback,
    Seq2SeqTrainer,
    TrainerCallback,
    TrainerState,
)
from transformers.modeling_outputs import BaseModelOutput

from checkpoints import (
    SAVING,
    STATE_FILE,
    naming_the_file,
    publish,
    read_random_states,
    reading_random_states,
    remove_leftovers,
    write_random_states,
)
from compiling import Computation, padded_length
from config import Recipe, TrainingConfig, accumulation_steps, best_metric
from console import say
from device import Place, check_placement
from faults import UserError, progress
from finite import FiniteSteps
from labels import LabelBuilder
from learning import check_weights
from manifest import Row
from mixing import Mix, TrainingSampler
from model import load_weights, trainable_parameters
from packing import PackedSampler, build_packed_sampler
from scores import compute_scores, decode_ids
from sets import CheckedSet
from speech import SpeechDataset, collate
from stopping import StopAsked, stop_request
from streaming import StreamedSpeech, StreamReport, build_loader

SHOWN_CLIPS = 64  # named when a loss is not finite: about as many as eight packed windows hold


def mean_token_loss(
    outputs: Any, labels: torch.Tensor, *, num_items_in_batch: torch.Tensor, label_smoothing: float = 0.0
) -> torch.Tensor:
    """The share of this micro-batch in the mean over all label tokens of the global batch.

    The stock trainer believes that the model divides by `num_items_in_batch`; Whisper ignores it, so gradients would
    grow with accumulation and ranks. Summed over micro-batches and ranks this is the mean, however the batch is split.
    Computed in float32 over `outputs.logits` (batch x length x vocabulary); labels of -100 do not count.
    """
    total = F.cross_entropy(
        outputs.logits.float().flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=label_smoothing
    )
    return total / num_items_in_batch


class ExplodingLoss(TrainerCallback):
    """Stops a run that unlearns: a logged loss over three times the first one and over ln(vocabulary), that of guessing.

    No text is that bad by itself, so a hard batch is no alarm. Logged losses are means over all ranks: all stop at once.
    """

    def __init__(self, vocabulary: int):
        self.guessing = math.log(vocabulary)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raises FloatingPointError when the loss just logged has exploded; what an earlier part of the run logged counts."""
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        if "loss" in state.log_history[-1] and losses[-1] > max(3 * losses[0], self.guessing):
            raise FloatingPointError(
                f"the loss went from {losses[0]:.2f} to {losses[-1]:.2f}, worse than guessing ({self.guessing:.2f}); "
                "lower training.learning_rate"
            )


def build_arguments(recipe: Recipe, compute_type: torch.dtype, *, world_size: int, on_cpu: bool) -> TrainingConfig:
    """The stock trainer's arguments, with all that must hold for Whisper with an adapter and that a recipe cannot forget.

    Touches the device, so the place must be settled. Raises UserError for values that the library refuses.
    """
    wants_best = recipe.training["load_best_model_at_end"] or recipe.run.early_stopping_patience
    settled = {
        "bf16": compute_type == torch.bfloat16,
        "fp16": compute_type == torch.float16,
        "gradient_accumulation_steps": accumulation_steps(recipe, world_size),
        # Where no best model is wanted, a name would make the library keep the best checkpoint in place of the newest.
        "metric_for_best_model": best_metric(recipe) if wants_best else recipe.training["metric_for_best_model"],
        "greater_is_better": False,
        # compiling.py does both, layer by layer.
        "torch_compile": False,
        "gradient_checkpointing": False,
    }
    if recipe.training["eval_strategy"] == recipe.training["save_strategy"] == "steps":
        # The library would take logging_steps, and a best model without a checkpoint could not come back.
        settled["eval_steps"] = recipe.training["eval_steps"] or recipe.training["save_steps"]
    if recipe.run.early_stopping_patience:
        settled["restore_callback_states_from_checkpoint"] = True
    if on_cpu:
        # Without the word, transformers 5.24 takes two processes on CPU for one.
        settled |= {"use_cpu": True, "dataloader_pin_memory": False}
    try:
        arguments = TrainingConfig(**recipe.training | settled)
    except (ValueError, TypeError, ImportError) as error:
        raise UserError(f"training: {str(error).strip().splitlines()[0]}") from error
    if on_cpu:
        # The library's name for it is cpu:0, which torch 2.11 cannot load an optimiser state to.
        arguments.__dict__["_setup_devices"] = torch.device("cpu")
    # Several visible cards without a launcher would mean old-style data parallel.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


class WhisperTrainer(Seq2SeqTrainer):
    """`Seq2SeqTrainer` with Whisper's loss, generation by row, each row scored once, and clocks.

    Args beyond the stock ones:
        place: where this process is; batches are checked to be there once in training and once in evaluation.
        labels: builds labels, and knows the base model with its one effective generation config.
        computation: how the model computes, in training, evaluation and generation alike.
        sets: the scored sets by name; the row ids of two sets differ.
        rows_total: set name -> rows the manifest had, dropped ones included.
        max_skipped_steps: optimiser steps in a row that may be skipped because they are not finite.
    """

    # The names of public methods below are the stock trainer's own.

    def __init__(
        self,
        *,
        place: Place,
        labels: LabelBuilder,
        computation: Computation,
        sets: dict[str, SpeechDataset],
        rows_total: dict[str, int],
        max_skipped_steps: int,
        **stock: Any,
    ):
        args, base = stock["args"], labels.base
        super().__init__(
            data_collator=partial(
                collate,
                start=base.config.decoder_start_token_id,
                pad=base.config.pad_token_id,
                features_type=computation.features_type,
                length_of=partial(padded_length, most=base.config.max_target_positions) if computation.compiled else int,
            ),
            compute_loss_func=partial(mean_token_loss, label_smoothing=args.label_smoothing_factor),
            compute_metrics=self.compute_row_scores,
            processing_class=base.processor,
            **stock,
        )
        # Accelerate wraps the model's forward by itself.
        self.accelerator.autocast_handler = AutocastKwargs(enabled=computation.needs_autocast)
        if not place.is_main:  # the first process of another machine would talk, too
            self.remove_callback(PrinterCallback)
            self.remove_callback(ProgressCallback)
        # The loss hook smooths; the stock smoother would take the labels away first.
        self.label_smoother = None
        self.place, self.base, self.labels, self.computation = place, base, labels, computation
        self.sets = sets
        self.scored_rows = {
            row_id: (name, row) for name, rows in sets.items() for row_id, row in enumerate(rows.rows, rows.first_id)
        }
        self.rows_total = rows_total
        self.scores: dict[str, dict[str, Any]] = {}
        # What was generated last for each set: row, text, language.
        self.texts: dict[str, list[tuple[Row, str, str | None]]] = {}
        # The same of evaluations during training, by step and set; those of the best step and of the last one.
        self.kept: dict[int, dict[str, Any]] = {}
        self.expected_rows = 0
        self.stream: StreamReport | None = None
        if isinstance(self.train_dataset, StreamedSpeech):
            self.stream = StreamReport(self.train_dataset.data, place.world_size)
            self.add_callback(TellDropped(self.stream))
        self.finite_steps = FiniteSteps(self._name_clips, most_skipped=max_skipped_steps)
        self.seconds = {"all": 0.0, "data": 0.0, "evaluate": 0.0, "save": 0.0}
        self.windows, self.audio_seconds = 0, 0.0
        self._unchecked = {"training", "evaluation"}
        # Why training ended on purpose before its last step; empty when it did not.
        self.stopped = ""
        self._resumed: Path | None = None
        self._random_states: tuple | None = None
        self.add_callback(StopTogether(self))

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager:
        """The one place where products get their type: training, evaluation and generation all run inside it."""
        if self.computation.needs_autocast:
            return torch.autocast(self.args.device.type, self.computation.compute_type)
        return nullcontext()

    # --- training

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains as the stock trainer does, with the clocks set to zero first."""
        # Scoring before training marks the bare model as prepared; accelerate would then not wrap it, and every rank
        # would train alone, without an error.
        if hasattr(self.model, "_is_accelerate_prepared"):
            del self.model._is_accelerate_prepared
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self.windows, self.audio_seconds, started = 0, 0.0, time.perf_counter()
        self._logged, self._began = None, started
        resumed = kwargs.get("resume_from_checkpoint")
        self._resumed = Path(resumed) if resumed else None
        result = None
        try:
            with progress.during("load", keeps=True):
                result = super().train(*args, **kwargs)
        except StopAsked as reason:
            self.stopped = str(reason)  # progress.keeps stays: the results of the stop are to be written
        except _TrainingIsOver:
            progress.keeps = False
            if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
                self._load_best_model()
        if result is None:
            self.is_in_train = False
        if self.stream:
            self.stream.judge()
        progress.phase = "load"
        self.seconds["all"] = time.perf_counter() - started
        return result

    def summarize(self) -> dict[str, Any]:
        """Figures of the training just done: steps in all, loss (nats per token, the mean over the steps of the last line
        of the log), speed over all processes without evaluations and saves, and the shares of the wall clock that went
        into waiting for data and evaluating. Seconds of audio are those of this process, times the number of processes."""
        seconds = self.seconds
        training = max(seconds["all"] - seconds["evaluate"] - seconds["save"], 1e-9)
        losses = [entry["loss"] for entry in self.state.log_history if "loss" in entry]
        return {
            "steps": self.state.global_step,
            "max_steps": self.state.max_steps,
            "epochs": self.state.epoch,
            "loss": losses[-1] if losses else None,
            "skipped_steps": self.finite_steps.skipped,
            "windows": self.windows,
            "windows_per_second": self.windows / training,
            "audio_seconds_per_second": self.audio_seconds / training,
            "data_wait_share": seconds["data"] / training,
            "evaluation_share": seconds["evaluate"] / max(seconds["all"], 1e-9),
            "seconds": seconds["all"],
        }

    def finish_at(self, checkpoint: Path) -> None:
        """Takes weights and state of a checkpoint that holds the last step already: at most the last evaluation is left to do."""
        self.state = TrainerState.load_from_json(str(checkpoint / STATE_FILE))
        if self._is_evaluation_due():
            self.train(resume_from_checkpoint=str(checkpoint))
            return
        load_weights(self.model, checkpoint)
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
            self._load_best_model()

    def get_train_dataloader(self) -> DataLoader:
        """The stock loader, or that of a stream, which shares its rows out between the processes itself."""
        if self.stream is None:
            loader = super().get_train_dataloader()
            loader.set_sampler(self._sampler)  # so that the epoch reaches it when the first batches are skipped, too
            return loader
        return build_loader(
            self.train_dataset,
            device=self.args.device,
            batch_size=self._train_batch_size,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
        )

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> TrainingSampler | PackedSampler:
        if self.train_dataset.clips:
            self._sampler = build_packed_sampler(self.train_dataset.clips, self.args, world_size=self.args.world_size)
            return self._sampler
        mix = self.train_dataset.mix or Mix([len(self.train_dataset)], [1.0])
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        global_batch_size = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        self._sampler = TrainingSampler(mix, seed=seed, global_batch_size=global_batch_size)
        return self._sampler

    def _name_clips(self, row_ids: Sequence[int]) -> str:
        if self.stream:
            return ", ".join(self.stream.names[row_id] for row_id in row_ids[:16])
        return _name_rows([self.train_dataset.rows[row_id] for row_id in row_ids])

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The stock method; beside a training loss stands the share of the time since the one before that went into waiting for data."""
        if "loss" in logs:
            now, seconds = time.perf_counter(), self.seconds
            spent = seconds["data"], seconds["evaluate"] + seconds["save"], now
            data, pauses, passed = (new - old for new, old in zip(spent, self._logged or (0.0, 0.0, self._began), strict=True))
            logs["data_wait_share"] = round(data / max(passed - pauses, 1e-9), 4)
            self._logged = spent
            steps, finite = self.finite_steps.count_finite()
            if finite:
                logs["loss"] *= steps / finite
            else:
                del logs["loss"]
            if not math.isfinite(logs.get("grad_norm", 0.0)):
                del logs["grad_norm"]
            if self.finite_steps.skipped:
                logs["skipped_steps"] = self.finite_steps.skipped
        # How long the library took to place the model, again with every set.
        logs = {key: value for key, value in logs.items() if not key.endswith("_model_preparation_time")}
        super().log(logs, *args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The stock method, with the time that it waits for data taken."""
        started = time.perf_counter()
        self._loss_before = self._tr_loss.clone()
        with progress.during("data", patient=True):
            batches, items = super().get_batch_samples(*args, **kwargs)
            for batch in batches if self.stream else ():
                self.stream.add(batch["row_id"], batch.pop("note"))
        self.seconds["data"] += time.perf_counter() - started
        self.windows += sum(len(batch["labels"]) for batch in batches) * self.args.world_size
        self.audio_seconds += sum(sum(batch.pop("seconds")) for batch in batches) * self.args.world_size
        return batches, items

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """The stock step; raises RuntimeError when several processes would train without averaging."""
        progress.step = self.state.global_step + 1
        progress.beat("forward")
        if self.args.world_size > 1 and not isinstance(model, DistributedDataParallel):
            raise RuntimeError("the model is not wrapped for several processes: gradients would not be averaged")
        return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The loss of a micro-batch by `mean_token_loss`, NaN when it is not finite."""
        self._check_first_batch(inputs, "training")
        row_ids = inputs.pop("row_id")
        progress.clips = partial(self._name_clips, row_ids)
        inputs = {name: value for name, value in inputs.items() if name not in ("language", "task")}
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        loss = self.finite_steps.watch(loss, row_ids)
        progress.beat("backward")
        return loss

    # Called before every optimiser step, whether gradients are clipped or not.
    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        # The loss of a skipped step is none that the model was trained on, and NaN would spoil the mean that is logged.
        self._tr_loss = torch.where(torch.isfinite(norm), self._tr_loss, self._loss_before)
        is_scaled = self.accelerator.scaler is not None
        self.finite_steps.guard(norm, self.optimizer, step=self.state.global_step + 1, is_scaled=is_scaled)
        return norm

    def _check_first_batch(self, inputs: dict[str, Any], kind: str) -> None:
        if kind in self._unchecked:
            self._unchecked.remove(kind)
            tensors = ((name, value) for name, value in inputs.items() if isinstance(value, torch.Tensor))
            check_placement(tensors, self.place, what=f"the first {kind} batch")

    # --- scoring

    def score(self, sets: dict[str, SpeechDataset], stage: str) -> dict[str, dict[str, Any]]:
        """Scores whole sets; gives set name -> scores, the same on every rank. `stage` is a word for the log."""
        step = self.state.global_step
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
            step = int(self.state.best_model_checkpoint.rpartition("-")[2])
        known = self.kept.get(step, {})
        if all(name in known and known[name][0]["rows_scored"] == len(rows) for name, rows in sets.items()):
            # The weights are those of an evaluation during training, which scored the same whole sets.
            self.scores = {name: known[name][0] for name in sets}
            self.texts = {name: known[name][1] for name in sets}
        else:
            self.scores = {}
            self.evaluate(eval_dataset=sets, metric_key_prefix=stage)
        return dict(self.scores)

    @torch.no_grad()
    def sample_loss(self, count: int = 2) -> float:
        """The mean loss (nats per token) of the first few scored clips on this process alone, no collective involved."""
        self.model.eval()
        examples = next(iter(self.sets.values()))
        batch = self._prepare_inputs(self.data_collator([examples[i] for i in range(min(count, len(examples)))]))
        with self.compute_loss_context_manager():
            logits = self.model(
                input_features=batch["input_features"], decoder_input_ids=batch["decoder_input_ids"], use_cache=False
            ).logits
        return F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten()).item()

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The stock evaluation of one set or a dictionary of sets."""
        started = time.perf_counter()
        self.finite_steps.judge()
        examples = kwargs.get("eval_dataset") or self.eval_dataset
        if isinstance(examples, str):
            examples = self.eval_dataset[examples]
        self.expected_rows = len(examples)
        with progress.during("evaluate"):
            metrics = super().evaluate(*args, **kwargs)
        if not isinstance(examples, dict):
            # For a dictionary of sets the stock trainer calls this once for each.
            self.seconds["evaluate"] += time.perf_counter() - started
        return metrics

    @torch.no_grad()
    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None, **_: Any
    ) -> tuple[None, torch.Tensor, torch.Tensor]:
        """Scores one batch.

        Returns None, the generated ids (batch x length, int64, -100 behind the end) and a table (batch x 3, float64) of
        row id, summed loss over the row's label tokens (nats) and their number.
        """
        progress.beat()
        if self.is_in_train and (reason := stop_request.agree()):
            raise _EvaluationStopped(reason)
        row_ids = inputs["row_id"]
        progress.clips = lambda: _name_rows([self.scored_rows[row_id][1] for row_id in row_ids])
        inputs = self._prepare_inputs(inputs)
        self._check_first_batch(inputs, "evaluation")
        labels = inputs["labels"]
        whisper = self.accelerator.unwrap_model(self.model)
        with self.compute_loss_context_manager():
            # Heard once, for the loss and for the text. Every window is 3000 frames and the encoder hears all of it.
            heard = whisper.get_encoder()(inputs["input_features"]).last_hidden_state
            outputs = whisper(encoder_outputs=(heard,), decoder_input_ids=inputs["decoder_input_ids"], use_cache=False)
            losses = F.cross_entropy(outputs.logits.float().transpose(1, 2), labels, reduction="none").double().sum(1)
            ids = self.generate(heard, inputs["language"], inputs["task"])
        numbers = torch.tensor(row_ids, dtype=torch.float64, device=losses.device)
        table = torch.stack([numbers, losses, (labels != -100).sum(1).double()], dim=1)
        return None, ids, table

    def generate(self, heard: torch.Tensor, languages: Sequence[str | None], tasks: Sequence[str]) -> torch.Tensor:
        """Generates with each row's own language and task, under the model's one generation config.

        `heard` is the encoder's output (batch x positions x width). Returns ids (batch x length, int64); what lies behind
        a row's end is -100. `generate` takes a list of languages but one task a call, so rows are grouped by task.
        """
        whisper = self.accelerator.unwrap_model(self.model)
        parts: list[tuple[list[int], torch.Tensor]] = []
        for task in sorted(set(tasks)):
            chosen = [i for i, own in enumerate(tasks) if own == task]
            words = {}
            if self.labels.is_multilingual:
                words = {"language": [languages[i] for i in chosen], "task": task}
            # Every window is heard whole: a mask of ones says so, since padding and end share an id.
            mask = torch.ones(len(chosen), 2 * heard.shape[1], dtype=torch.long, device=heard.device)
            ids = whisper.generate(
                encoder_outputs=BaseModelOutput(last_hidden_state=heard[chosen]), attention_mask=mask, **words
            )
            parts.append((chosen, ids))
        length = max(ids.shape[1] for _, ids in parts)
        result = torch.full((len(tasks), length), -100, device=heard.device)
        for chosen, ids in parts:
            for row, own in zip(chosen, ids, strict=True):
                ends = (own == self.labels.end).nonzero()
                own = own[: ends[0, 0] + 1] if len(ends) else own
                result[row, : len(own)] = own
        return result

    def compute_row_scores(self, prediction: EvalPrediction) -> dict[str, float]:
        """Scores of one whole set, each row once: the gathered batches repeat rows to fill the last one."""
        table = {int(row_id): (i, loss, tokens) for i, (row_id, loss, tokens) in enumerate(prediction.label_ids)}
        row_ids = sorted(table)
        if len(row_ids) != self.expected_rows:
            raise RuntimeError(f"{len(row_ids)} rows came back of a set of {self.expected_rows}")
        places = [table[row_id][0] for row_id in row_ids]
        names, rows = zip(*(self.scored_rows[row_id] for row_id in row_ids), strict=True)
        broken = [row for row_id, row in zip(row_ids, rows, strict=True) if not math.isfinite(table[row_id][1])]
        if broken:
            raise FloatingPointError(f"the evaluation loss is not finite on {_name_rows(broken)}")
        ids = prediction.predictions[places]
        limit = self.base.generation_config.max_length
        texts = decode_ids(ids, self.base.processor.tokenizer)
        languages = [self.labels.language_of(row) for row in rows]
        self.texts[names[0]] = list(zip(rows, texts, languages, strict=True))
        scores: dict[str, Any] = compute_scores(
            [row.text for row in rows],
            texts,
            languages=languages,
            at_length_limit=[len(own[own != -100]) >= limit for own in ids],
        )
        scores["loss"] = sum(table[i][1] for i in row_ids) / sum(table[i][2] for i in row_ids)
        scores["rows_total"] = self.rows_total[names[0]]
        # Of the same rows on every rank; still one of them decides, so that none saves or stops alone.
        (scores,) = broadcast_object_list([scores])
        self.scores[names[0]] = scores
        if self.is_in_train:
            step, best = self.state.global_step, self.state.best_global_step
            self.kept = {number: sets for number, sets in self.kept.items() if number in (step, best)}
            self.kept.setdefault(step, {})[names[0]] = (scores, self.texts[names[0]])
        return {key: value for key, value in scores.items() if isinstance(value, (int, float))}

    # --- saving

    # Where the stock trainer writes a checkpoint and looks for older ones to remove: there are none.
    def _get_output_dir(self, trial: Any) -> str:
        return str(Path(self.args.output_dir) / SAVING)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        started = time.perf_counter()
        self.finite_steps.judge()
        with progress.during("save", patient=True):
            check_weights(self.model)
            checkpoint = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
            if self.args.should_save:
                remove_leftovers(Path(self.args.output_dir))
            with naming_the_file(checkpoint) if self.args.should_save else nullcontext():
                super()._save_checkpoint(model, trial)
                self._find_best_checkpoint()
                if self.args.should_save:
                    self.state.save_to_json(str(checkpoint / STATE_FILE))
                    (checkpoint / "README.md").unlink(missing_ok=True)  # peft's card, all of whose fields are blank
                    publish(checkpoint, most=self.args.save_total_limit, best=self.state.best_model_checkpoint)
        self.seconds["save"] += time.perf_counter() - started

    def _find_best_checkpoint(self) -> None:
        """Says on every rank where the best checkpoint lies, by the main process's disk, in which the newest is about to be."""
        best = Path(self.args.output_dir) / f"checkpoint-{self.state.best_global_step}"
        if self.state.best_global_step == self.state.global_step or best.is_dir():
            self.state.best_model_checkpoint = str(best)
        (self.state.best_model_checkpoint,) = broadcast_object_list([self.state.best_model_checkpoint])

    # Only one process writes into output_dir, which other machines need not see.
    def _save_rng_state(self, output_dir: str) -> None:
        with tempfile.TemporaryDirectory() as scratch, naming_the_file(Path(scratch)):
            super()._save_rng_state(scratch)
            own = [(path.name, path.read_bytes()) for path in Path(scratch).iterdir()]
        states = gather_object(own)
        if self.args.should_save:
            for name, state in states:
                (Path(output_dir) / name).write_bytes(state)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # A stop that comes during an evaluation saves what was there before it; the resumed run evaluates first, all sets anew.
        states = read_random_states() if self.control.should_evaluate else None
        patient = [callback for callback in self.callback_handler.callbacks if isinstance(callback, Patience)]
        counts = [callback.early_stopping_patience_counter for callback in patient]
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        except _EvaluationStopped:
            write_random_states(states)
            step = self.state.global_step
            self.state.log_history = [entry for entry in self.state.log_history if entry["step"] != step or not is_evaluation(entry)]
            for callback, count in zip(patient, counts, strict=True):
                callback.early_stopping_patience_counter = count
            self.model.train()
            self._save_checkpoint(self.model, None)
            raise

    def evaluate_what_is_due(self) -> None:
        """Makes up for the evaluation that a stop left out behind the checkpoint's last step."""
        if self._resumed is None or not self._is_evaluation_due():
            return
        self._load_rng_state(str(self._resumed))
        say("evaluating the checkpoint, which the stop left out")
        if self._determine_best_metric(self._evaluate(None, None), None):
            self.state.best_model_checkpoint = str(self._resumed)
        self._random_states = read_random_states()
        if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            raise _TrainingIsOver

    def _is_evaluation_due(self) -> bool:
        state, strategy = self.state, self.args.eval_strategy
        if state.global_step == 0 or any(entry["step"] == state.global_step and is_evaluation(entry) for entry in state.log_history):
            return False
        is_last = state.global_step >= state.max_steps
        if strategy == "epoch":
            return (is_last or float(state.epoch).is_integer()) and state.epoch >= self.args.eval_delay
        return strategy == "steps" and (is_last or state.global_step % state.eval_steps == 0) and state.global_step >= self.args.eval_delay

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._random_states is not None:
            # Those of the checkpoint, moved on by the evaluation that was due.
            write_random_states(self._random_states)
            self._random_states = None
            return
        with reading_random_states():
            super()._load_rng_state(checkpoint)

    # The stock trainer takes the checkpoint's patience, too, where only its count belongs to the state.
    def _load_callback_state(self) -> None:
        of_recipe = [callback.early_stopping_patience for callback in self.callback_handler.callbacks if isinstance(callback, Patience)]
        super()._load_callback_state()
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, Patience):
                callback.early_stopping_patience = of_recipe[0]

    # The stock trainer lets peft read an adapter to the default device, which is card 0 on every rank.
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        load_weights(self.model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        # By its name in this run's folder, which may have been moved since; from the main process's disk.
        if self.place.is_main:
            load_weights(self.model, Path(self.args.output_dir) / Path(self.state.best_model_checkpoint).name)
        for _, tensor in trainable_parameters(self.model):
            tensor.data.copy_(broadcast(tensor.data.contiguous()))


def _name_rows(rows: Sequence[Row]) -> str:
    more = f" and {len(rows) - SHOWN_CLIPS} more" if len(rows) > SHOWN_CLIPS else ""
    return ", ".join(f"{row.file}:{row.line} ({row.audio})" for row in rows[:SHOWN_CLIPS]) + more


class Patience(EarlyStoppingCallback):
    """The stock early stopping, blind to evaluations of sets that do not choose the best model."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        """Counts only where the chosen score was measured."""
        if f"eval_{args.metric_for_best_model}" in metrics:
            super().on_evaluate(args, state, control, metrics, **kwargs)


class TellDropped(TrainerCallback):
    """Says with the log what the stream dropped, when that is more than before."""

    def __init__(self, report: StreamReport):
        self.report, self.told = report, 0

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One line of the main process, about its own rows."""
        if self.report.dropped.total() > self.told:
            self.told = self.report.dropped.total()
            say(self.report.describe())


class _EvaluationStopped(StopAsked):
    """A stop that came during an evaluation."""


class _TrainingIsOver(Exception):
    """The evaluation that was due has shown that nothing is left to train."""


class StopTogether(TrainerCallback):
    """Ends training on all ranks behind one step when one of them is asked to stop: saved, without the evaluation that may be due."""

    def __init__(self, trainer: "WhisperTrainer"):
        self.trainer, self.reason = trainer, ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Makes up for an evaluation that an earlier stop left out."""
        self.trainer.evaluate_what_is_due()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Asks all ranks."""
        self.reason = stop_request.agree()
        if self.reason:
            control.should_log = control.should_save = True
            control.should_evaluate = False

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raises StopAsked behind the save, so that nothing that belongs to the end of training follows."""
        if self.reason:
            raise StopAsked(self.reason)


def is_evaluation(entry: dict[str, Any]) -> bool:
    """Whether an entry of the log holds scores."""
    return any(key.startswith("eval_") for key in entry)


class RecipeSteps(TrainerCallback):
    """Logs the last step, too, and keeps the recipe's logging, evaluation and saving steps on resume, where the library takes
    the checkpoint's."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Computes the steps from the arguments of this run."""
        state.compute_steps(args, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last steps of a run are no multiple of logging_steps, as a rule."""
        if state.global_step >= state.max_steps:
            control.should_log = True


def build_examples(
    recipe: Recipe, checked: dict[str, CheckedSet], labels: LabelBuilder, *, place: Place
) -> tuple[SpeechDataset | StreamedSpeech | None, dict[str, SpeechDataset]]:
    """The training examples (None when the recipe only scores) and the scored sets by name, with row ids of their own."""
    sets: dict[str, SpeechDataset] = {}
    first_id = 0
    for name in recipe.data.validation:
        sets[name] = SpeechDataset(checked[name].rows, labels, first_id=first_id)
        first_id += len(sets[name])
    if not recipe.training["do_train"]:
        return None, sets
    part, with_mask = checked["train"], recipe.model.apply_spec_augment
    if part.streams:
        seed = recipe.training["seed"] if recipe.training["data_seed"] is None else recipe.training["data_seed"]
        return StreamedSpeech(part.streams, labels, data=recipe.data, place=place, seed=seed, with_mask=with_mask), sets
    return SpeechDataset(part.rows, labels, with_mask=with_mask, mix=part.mix, clips=part.clips), sets


def thin_out(examples: SpeechDataset, most: int | None) -> Dataset:
    """The examples themselves, or `most` of them, the same ones in every run."""
    if most is None or most >= len(examples):
        return examples
    return Subset(examples, sorted(random.Random(0).sample(range(len(examples)), most)))
