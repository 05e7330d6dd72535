"""The training command on two machines that share no disk and compute other scores: a rank other than 0 has an output
folder of its own, takes every word error rate for worse from step to step, has a loss that is not finite in step 3, and leaves its state in
STATE_OF_RANK_1."""

import json
import os
import sys
from pathlib import Path

import train
import trainer
from model import trainable_parameters

RANK = int(os.environ["RANK"])
stock_scores, stock_train = trainer.compute_scores, trainer.WhisperTrainer.train
stock_loss, stock_join = trainer.mean_token_loss, train.join_processes
calls, losses = [], []


def other_scores(*args, **words):
    calls.append(1)
    return stock_scores(*args, **words) | {"wer": 10.0 * (len(calls) if RANK else 9 - len(calls))}


def other_loss(*args, **words):
    losses.append(1)
    return stock_loss(*args, **words) * (float("nan") if RANK and len(losses) == 3 else 1.0)


def train_and_tell(self, *args, **words):
    result = stock_train(self, *args, **words)
    if RANK:
        state = {"best_metric": self.state.best_metric, "best": self.state.best_model_checkpoint, "steps": self.state.global_step}
        state["weights"] = {name: tensor.tolist() for name, tensor in trainable_parameters(self.model)}
        Path(os.environ["STATE_OF_RANK_1"]).write_text(json.dumps(state))
    return result


def join_as_one(place, *, recipe, **words):
    """The recipes differ in the output folder alone, which the ranks would not accept."""
    return stock_join(place, recipe=recipe.replace(os.environ["FOLDER_OF_RANK_1"], os.environ["FOLDER_OF_RANK_0"]), **words)


if __name__ == "__main__":
    train.join_processes = join_as_one
    trainer.compute_scores, trainer.mean_token_loss = other_scores, other_loss
    trainer.WhisperTrainer.train = train_and_tell
    folder = ["--training.output_dir", os.environ["FOLDER_OF_RANK_1"]] if RANK else []
    train.start(sys.argv[1:] + folder)
