"""The training command with one addition: the gradients of each optimiser step, as the optimiser sees them, go to a file a rank."""

import os
import sys
from pathlib import Path

import torch
from transformers import TrainerCallback

import train
from model import trainable_parameters
from trainer import WhisperTrainer


class KeepGradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        gradients = {name: tensor.grad.clone() for name, tensor in trainable_parameters(model)}
        torch.save(gradients, Path(os.environ["GRADIENTS"]) / f"step{state.global_step}-rank{args.process_index}.pt")


class KeepingTrainer(WhisperTrainer):
    def __init__(self, **stock):
        super().__init__(**stock)
        self.add_callback(KeepGradients())


if __name__ == "__main__":
    train.WhisperTrainer = KeepingTrainer
    train.start(sys.argv[1:])
