"""Runs the real command on toy recipes, in processes of their own, as a user would."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
TWO_PROCESSES = ROOT / "accelerate_config.yaml"


@dataclass
class Run:
    """How a run ended: exit status, what it printed, and its results.json (None when there is none)."""

    status: int
    stdout: str
    stderr: str
    results: dict | None

    @property
    def tail(self) -> str:
        """The last 30 lines of the output."""
        return "\n".join((self.stdout + "\n" + self.stderr).rstrip().splitlines()[-30:])


def write_recipe(folder: Path, *, name: str = "recipe", **sections: dict) -> Path:
    """A small complete recipe for the toy model in `folder`; `sections` change its keys."""
    recipe = {
        "model": {"name": str(folder / "model"), "language": "hi", "quantization": "none"},
        "lora": {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0},
        "data": {"train": [str(folder / "train.jsonl")], "validation": {"dev": str(folder / "dev.jsonl")}},
        "run": {},
        "training": {
            "output_dir": str(folder / "out"),
            "max_steps": 2,
            "per_device_train_batch_size": 1,
            "per_device_eval_batch_size": 2,
            "learning_rate": 1e-3,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "steps",
            "save_steps": 2,
            "generation_max_length": 4,
            "dataloader_num_workers": 0,
            "report_to": "none",
            "disable_tqdm": True,
        },
    }
    for section, values in sections.items():
        recipe[section] = values if values is None else recipe[section] | values
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def launch(recipe: Path, *overrides: str, processes: int = 1, script: Path = ROOT / "src" / "train.py", timeout: float = 240, **env: str) -> Run:
    """Starts `script` on the recipe in processes of their own: by plain python for one, through accelerate launch for more (gloo)."""
    command = [sys.executable]
    if processes > 1:
        command = [str(Path(sys.executable).parent / "accelerate"), "launch", "--config_file", str(TWO_PROCESSES)]
        command += ["--num_processes", str(processes), "--main_process_port", "0"]
    command += [str(script), "--config", str(recipe), *overrides]
    return execute(command, output_dir=_output_dir(recipe, overrides), timeout=timeout, **env)


def train_here(recipe: Path, *overrides: str) -> dict | None:
    """Trains by one process, this one: saves the start of another. Gives results.json, None after --check."""
    import train

    train.main(["--config", str(recipe), *overrides])
    results = _output_dir(recipe, overrides) / "results.json"
    return json.loads(results.read_text()) if results.is_file() else None


def execute(command: list[str], *, output_dir: Path | None = None, timeout: float = 240, **env: str) -> Run:
    """Runs a command in the repository's root, without the network and without this process's launcher variables."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    clean |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"} | env
    clean["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])  # for scripts in tests/
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=clean, start_new_session=True, **pipes)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the launcher's children too
    results = output_dir / "results.json" if output_dir else None
    return Run(process.returncode, stdout, stderr, json.loads(results.read_text()) if results and results.is_file() else None)


def _output_dir(recipe: Path, overrides: tuple[str, ...]) -> Path:
    words = list(overrides)
    if "--training.output_dir" in words:
        return Path(words[words.index("--training.output_dir") + 1])
    return Path(yaml.safe_load(recipe.read_text())["training"]["output_dir"])
