"""One run of the demo recipe on real weights and real speech, cut to a few clips."""

import json
import os
from pathlib import Path

import pytest

from launching import ROOT, train_here
from toy import write_manifest

DEMO = Path(os.environ.get("WHISPER_DDP_DEMO", ROOT / "demo"))


@pytest.mark.fetched
def test_the_demo_recipe_trains_real_weights_on_real_speech(tmp_path):
    for name, most in (("train", 8), ("heldout", 4)):
        rows = [json.loads(line) for line in (DEMO / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:most]]
        write_manifest(tmp_path / f"{name}.jsonl", [row | {"audio": str(DEMO / row["audio"])} for row in rows])
    results = train_here(
        ROOT / "configs" / "demo.yaml",
        *["--model.name", str(DEMO / "whisper-base"), "--training.output_dir", str(tmp_path / "out")],
        *["--data.train", str(tmp_path / "train.jsonl"), "--data.validation.heldout", str(tmp_path / "heldout.jsonl")],
        *["--training.max_steps", "3", "--training.eval_steps", "3", "--training.save_steps", "3", "--training.warmup_steps", "0"],
    )
    before, after = results["baseline"]["heldout"], results["final"]["heldout"]
    assert before["wer"] < 40  # untrained weights would be far above
    assert after["loss"] < before["loss"]
    assert results["quantization"] == "8bit"
    assert results["train"]["steps"] == 3
