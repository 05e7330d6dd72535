"""The training command with one fault: the rank FAIL_RANK raises in the forward pass of step FAIL_STEP."""

import os
import sys

import train
from trainer import WhisperTrainer


class FailingTrainer(WhisperTrainer):
    def compute_loss(self, *args, **kwargs):
        if self.args.process_index == int(os.environ["FAIL_RANK"]) and self.state.global_step + 1 == int(os.environ["FAIL_STEP"]):
            raise ValueError("a planted fault")
        return super().compute_loss(*args, **kwargs)


if __name__ == "__main__":
    train.WhisperTrainer = FailingTrainer
    train.start(sys.argv[1:])
