"""How is it trained and scored? The stock trainer, mended where Whisper or several ranks need it."""

import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.utils import AutocastKwargs
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler, Subset
from transformers import EarlyStoppingCallback, EvalPrediction, Seq2SeqTrainer, TrainerCallback, TrainerState
from transformers.modeling_outputs import BaseModelOutput

from compiling import Computation, padded_length
from config import Recipe, TrainingConfig, accumulation_steps, best_metric
from console import say
from device import Place, check_placement
from faults import UserError, progress
from labels import LabelBuilder
from manifest import Row
from mixing import WeightedSampler
from model import load_weights
from output import write_checksums
from packing import PackedSampler, build_packed_sampler
from scores import compute_scores, decode_ids
from sets import CheckedSet
from speech import SpeechDataset, collate
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


class FiniteLoss:
    """Stops the run at a loss that is not finite, naming the clips; looks one micro-batch late so as not to wait for the device."""

    def __init__(self, row_names: Callable[[Sequence[int]], str]):
        self.row_names = row_names
        self._last: tuple[torch.Tensor, torch.Tensor, torch.cuda.Event | None] | None = None

    def watch(self, loss: torch.Tensor, row_ids: torch.Tensor) -> None:
        """Judges the loss before this one, then remembers this one."""
        self.judge()
        event = None
        if loss.is_cuda:
            event = torch.cuda.Event()
            value = loss.detach().to("cpu", non_blocking=True)
            event.record()
        else:
            value = loss.detach().clone()
        self._last = (value, row_ids, event)

    def judge(self) -> None:
        """Raises FloatingPointError when the remembered loss is not finite."""
        if self._last is None:
            return
        value, row_ids, event = self._last
        self._last = None
        if event is not None:
            event.synchronize()
        if not torch.isfinite(value):
            raise FloatingPointError(f"the loss is {value.item()} on {self.row_names(row_ids.tolist())}")


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
        self.finite_loss = FiniteLoss(self._name_clips)
        self.seconds = {"all": 0.0, "data": 0.0, "evaluate": 0.0, "save": 0.0}
        self.windows, self.audio_seconds = 0, 0.0
        self._unchecked = {"training", "evaluation"}

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
        result = super().train(*args, **kwargs)
        self.finite_loss.judge()
        if self.stream:
            self.stream.judge()
        progress.phase = "load"
        self.seconds["all"] = time.perf_counter() - started
        return result

    def summarize(self) -> dict[str, Any]:
        """Figures of the training just done: steps in all, last logged loss (nats per token), speed over all processes
        without evaluations and saves, and the shares of the wall clock that went into waiting for data and evaluating.

        Seconds of audio are those that this process has heard, times the number of processes."""
        seconds = self.seconds
        training = max(seconds["all"] - seconds["evaluate"] - seconds["save"], 1e-9)
        losses = [entry["loss"] for entry in self.state.log_history if "loss" in entry]
        return {
            "steps": self.state.global_step,
            "loss": losses[-1] if losses else None,
            "windows": self.windows,
            "windows_per_second": self.windows / training,
            "audio_seconds_per_second": self.audio_seconds / training,
            "data_wait_share": seconds["data"] / training,
            "evaluation_share": seconds["evaluate"] / max(seconds["all"], 1e-9),
            "seconds": seconds["all"],
        }

    def finish_at(self, checkpoint: Path) -> None:
        """Takes weights and state of a checkpoint that holds the last step already: there is nothing left to train."""
        self.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        load_weights(self.model, checkpoint)
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
            self._load_best_model()

    def get_train_dataloader(self) -> DataLoader:
        """The stock loader, or that of a stream, which shares its rows out between the processes itself."""
        if self.stream is None:
            loader = super().get_train_dataloader()
            if isinstance(self._mixing, (WeightedSampler, PackedSampler)):
                loader.set_sampler(self._mixing)  # so that the epoch reaches it when the first batches are skipped, too
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

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        mix, clips = getattr(self.train_dataset, "mix", None), getattr(self.train_dataset, "clips", None)
        if clips:
            self._mixing = build_packed_sampler(clips, self.args, world_size=self.args.world_size)
        elif mix is None or mix.is_plain:
            self._mixing = super()._get_train_sampler(train_dataset)
        else:
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            self._mixing = WeightedSampler(mix, seed=seed)
        return self._mixing

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
        super().log(logs, *args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The stock method, with the time that it waits for data taken."""
        started = time.perf_counter()
        with progress.during("data"):
            batches, items = super().get_batch_samples(*args, **kwargs)
            for batch in batches if self.stream else ():
                self.stream.add(batch["row_id"].tolist(), batch.pop("note"))
        self.seconds["data"] += time.perf_counter() - started
        self.windows += sum(len(batch["labels"]) for batch in batches) * self.args.world_size
        self.audio_seconds += sum(sum(batch.pop("seconds")) for batch in batches) * self.args.world_size
        return batches, items

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """The stock step; raises RuntimeError when several processes would train without averaging."""
        progress.phase, progress.step = "forward", self.state.global_step + 1
        if self.args.world_size > 1 and not isinstance(model, DistributedDataParallel):
            raise RuntimeError("the model is not wrapped for several processes: gradients would not be averaged")
        return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The loss of a micro-batch by `mean_token_loss`; raises FloatingPointError when one before it was not finite."""
        self._check_first_batch(inputs, "training")
        row_ids = inputs.pop("row_id")
        inputs = {name: value for name, value in inputs.items() if name not in ("language", "task")}
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.finite_loss.watch(loss, row_ids)
        progress.phase = "backward"
        return loss

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
        self.finite_loss.judge()
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
        table = torch.stack([inputs["row_id"].double(), losses, (labels != -100).sum(1).double()], dim=1)
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
        self.scores[names[0]] = scores
        if self.is_in_train:
            step, best = self.state.global_step, self.state.best_global_step
            self.kept = {number: sets for number, sets in self.kept.items() if number in (step, best)}
            self.kept.setdefault(step, {})[names[0]] = (scores, self.texts[names[0]])
        return {key: value for key, value in scores.items() if isinstance(value, (int, float))}

    # --- saving

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        started = time.perf_counter()
        self.finite_loss.judge()
        with progress.during("save"):
            super()._save_checkpoint(model, trial)
            if self.args.should_save:
                write_checksums(Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}")
        self.seconds["save"] += time.perf_counter() - started

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # numpy 1 and 2 call one function by two names in their files, and safe loading takes only that of the version at hand.
        rebuild = np.random.get_state()[1].__reduce__()[0]
        names = [(rebuild, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
        with torch.serialization.safe_globals(names):
            super()._load_rng_state(checkpoint)

    # The stock trainer lets peft read an adapter to the default device, which is card 0 on every rank.
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        load_weights(self.model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        # By its name in this run's folder, which may have been moved since.
        load_weights(self.model, Path(self.args.output_dir) / Path(self.state.best_model_checkpoint).name)


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


class RecipeSteps(TrainerCallback):
    """Keeps the recipe's logging, evaluation and saving steps on resume, where the library takes the checkpoint's."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Computes the steps from the arguments of this run."""
        state.compute_steps(args, state.max_steps)


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
