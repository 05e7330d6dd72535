"""The notebook's own cells run on this machine, in order, and once more from where an earlier session ended."""

import json
import os
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest

from launching import ROOT, write_recipe
from toy import build_whisper, write_manifest, write_speech

NOTEBOOK = json.loads((ROOT / "scripts" / "two_t4.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
DEMO = Path(os.environ.get("WHISPER_DDP_DEMO", ROOT / "demo"))


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """A repository with the code as it is, to be cloned; the demo's data, where there are some, lie in it."""
    folder = tmp_path_factory.mktemp("repository")
    for name in ("src", "configs", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "requirements.txt", folder)
    if (DEMO / "train.jsonl").is_file():
        (folder / "demo").symlink_to(DEMO)
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "all"]):
        subprocess.run([*git, *words], cwd=folder, check=True)
    return folder


@pytest.fixture
def run_cells(repository, tmp_path, monkeypatch):
    """A function that runs every code cell as one session, with variables of the first cell from the environment; gives the results."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("REPOSITORY", str(repository))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def run(session: str, *overrides: str, **variables: str) -> dict:
        variables = {"FOLDER": str(tmp_path / session / "code"), "OUTPUT_DIR": str(tmp_path / session / "out")} | variables
        for name, value in (variables | {"OVERRIDES": " ".join(overrides)}).items():
            monkeypatch.setenv(name, value)
        names: dict = {}
        for cell in CODE:
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
        return names["results"]

    return run


def test_outputs_are_cleared_and_no_execution_is_counted():
    assert CODE and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)


def test_every_variable_of_the_first_cell_yields_to_the_environment(monkeypatch):
    first = "".join(CODE[0]["source"])
    defaults: dict = {}
    exec(first, defaults)
    names = [name for name in defaults if name.isupper()]
    assert len(names) >= 7
    for name in names:
        monkeypatch.setenv(name, f"another {name}")
    changed: dict = {}
    exec(first, changed)
    assert [changed[name] for name in names] == [f"another {name}" for name in names]


def test_a_second_session_goes_on_from_what_the_first_one_left(run_cells, tmp_path, capsys):
    build_whisper(tmp_path / "model")
    write_speech(tmp_path, ["one", "two", "three", "four"])
    write_speech(tmp_path, ["five", "six"], name="dev")
    recipe = write_recipe(tmp_path, training={"save_total_limit": None})
    first = run_cells("one", RECIPE=str(recipe))
    said = capsys.readouterr().out
    assert first["train"]["steps"] == 2 and "--check: this run can start" in said and "dev: WER " in said
    # The session ended before its last results were written, and the next one is to do two steps more.
    second = run_cells("two", "--training.max_steps 4", RECIPE=str(recipe), EARLIER_OUTPUT=str(tmp_path / "one" / "out"))
    said = capsys.readouterr().out
    assert "checkpoints here: ['checkpoint-2']" in said and f"going on from {tmp_path / 'two' / 'out' / 'checkpoint-2'}" in said
    assert second["train"]["steps"] == 4 and second["train"]["windows"] == 2


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """A folder in place of the Hub's repositories; gone checkpoints are deleted there as the patterns say."""
    import huggingface_hub

    def upload_folder(*, repo_id, folder_path, allow_patterns=("*",), delete_patterns):
        assert delete_patterns == "checkpoint-*/*"
        for old in (hub / repo_id).glob("checkpoint-*"):
            shutil.rmtree(old)
        for path in Path(folder_path).rglob("*"):
            name = str(path.relative_to(folder_path))
            if path.is_file() and any(fnmatch(name, pattern) for pattern in allow_patterns):
                (hub / repo_id / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, hub / repo_id / name)

    hub = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub, "create_repo", lambda name, *, private, exist_ok: (hub / name).mkdir(parents=True, exist_ok=exist_ok))
    monkeypatch.setattr(huggingface_hub, "repo_exists", lambda name: (hub / name).is_dir())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, *, local_dir: shutil.copytree(hub / name, local_dir))
    monkeypatch.setattr(huggingface_hub, "upload_folder", upload_folder)
    return hub


def training_cell(folder: Path, command: str) -> dict:
    """Names for the cell that trains, with `command` in place of the training."""
    names: dict = {"Path": Path, "OUTPUT_DIR": str(folder), "HUB_REPOSITORY": "me/run", "command": [command], "words": []}

    def run(*words):
        raise RuntimeError(f"{words[0]} ended")

    return names | {"run": run}


def test_an_interrupted_session_leaves_its_complete_checkpoints_on_the_hub_and_no_others(hub, tmp_path):
    (cell,) = [cell for cell in CODE if "def upload_checkpoints" in "".join(cell["source"])]
    for name in ("checkpoint-2/checksums.json", "checkpoint-2/optimizer.pt", "checkpoint-4/optimizer.pt", "recipe.yaml", "logs/x"):
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("")
    names = training_cell(tmp_path / "out", "training")
    with pytest.raises(RuntimeError, match="training ended"):
        exec("".join(cell["source"]), names)
    there = sorted(str(path.relative_to(hub / "me" / "run")) for path in hub.rglob("*") if path.is_file())
    assert there == ["checkpoint-2/checksums.json", "checkpoint-2/optimizer.pt", "recipe.yaml"]
    shutil.rmtree(tmp_path / "out" / "checkpoint-2")
    (tmp_path / "out" / "checkpoint-4" / "checksums.json").write_text("")
    assert names["upload_checkpoints"](["checkpoint-2"]) == ["checkpoint-4"]
    assert sorted(path.name for path in (hub / "me" / "run").glob("checkpoint-*")) == ["checkpoint-4"]


def test_an_upload_that_fails_is_tried_again_and_ends_no_training(hub, tmp_path, monkeypatch, capsys):
    import huggingface_hub

    (cell,) = [cell for cell in CODE if "def upload_checkpoints" in "".join(cell["source"])]
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "checksums.json").write_text("")
    names = training_cell(tmp_path, "training")
    with pytest.raises(RuntimeError):
        exec("".join(cell["source"]), names)
    answers = [ConnectionError("the Hub is away"), None]
    monkeypatch.setattr(huggingface_hub, "upload_folder", lambda **_: (answer := answers.pop(0)) and (_ for _ in ()).throw(answer))
    waits = [False, True]
    names["keep_uploading"](SimpleNamespace(wait=lambda seconds: waits.pop(0)))
    assert answers == [] and "not uploaded yet: the Hub is away" in capsys.readouterr().out


def test_a_token_comes_from_kaggles_secrets_where_there_are_some(hub, tmp_path, monkeypatch):
    (cell,) = [cell for cell in CODE if "UserSecretsClient" in "".join(cell["source"])]
    client = SimpleNamespace(get_secret=lambda name: f"secret {name}")
    monkeypatch.setitem(sys.modules, "kaggle_secrets", SimpleNamespace(UserSecretsClient=lambda: client))
    monkeypatch.setenv("HF_TOKEN", "to be restored")
    monkeypatch.delenv("HF_TOKEN")
    exec("".join(cell["source"]), {"os": os, "Path": Path, "HUB_REPOSITORY": "me/run", "EARLIER_OUTPUT": "", "OUTPUT_DIR": str(tmp_path / "out")})
    assert os.environ.pop("HF_TOKEN") == "secret HF_TOKEN"


@pytest.mark.fetched
def test_the_demo_runs_in_a_session_on_real_weights(run_cells, tmp_path):
    for name in ("train", "heldout"):
        rows = [json.loads(line) for line in (DEMO / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:2]]
        write_manifest(tmp_path / f"{name}.jsonl", [row | {"audio": str(DEMO / row["audio"])} for row in rows])
    steps = " ".join(f"--training.{key} 1" for key in ("max_steps", "eval_steps", "save_steps"))
    sets = f"--data.train {tmp_path / 'train.jsonl'} --data.validation.heldout {tmp_path / 'heldout.jsonl'}"
    results = run_cells("demo", f"{steps} --training.warmup_steps 0 --training.generation_max_length 12 --run.baseline false", sets)
    assert results["train"]["steps"] == 1
    assert results["final"]["heldout"]["loss"] < 4  # guessing would be 10.9
