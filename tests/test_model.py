"""The base model is read before its weights, loaded whole onto one device, trained in float32, and saved so that it loads."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import bitsandbytes
import huggingface_hub
import output
import peft
import pytest
import toy
import torch
from adapters import build_lora_config
from config import ModelConfig, Recipe, load_recipe
from device import Place, choose_device
from faults import UserError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model import (
    BaseModel,
    describe_generation,
    describe_model,
    load_model,
    load_weights,
    read_base_model,
    trainable_parameters,
)
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, WhisperForConditionalGeneration, WhisperProcessor, WhisperTokenizerFast

CPU = Place("cpu")
FULL = ("--lora=null", "--model.quantization=none")


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory) -> Path:
    return toy.build_whisper(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture(scope="module")
def bare_folder(tmp_path_factory) -> Path:
    """A multilingual model of the full vocabulary without anything useful in its generation config."""
    return toy.build_whisper(tmp_path_factory.mktemp("models") / "bare", text_tokens=50257, bare_generation_config=True)


@pytest.fixture(scope="module")
def english_folder(tmp_path_factory) -> Path:
    return toy.build_whisper(tmp_path_factory.mktemp("models") / "english.en", text_tokens=50256, bare_generation_config=True)


@pytest.fixture
def copy(toy_folder, tmp_path) -> Path:
    """The toy model, to be spoilt."""
    return Path(shutil.copytree(toy_folder, tmp_path / "copy"))


def read(folder: Path | str, *, max_new_tokens: int | None = 225, num_beams: int = 1, **model) -> BaseModel:
    return read_base_model(ModelConfig(name=str(folder), **model), max_new_tokens=max_new_tokens, num_beams=num_beams)


def recipe_for(folder: Path, tmp_path: Path, *words: str) -> Recipe:
    data = "data: {train: a.jsonl, validation: b.jsonl}"
    text = f"model: {{name: {folder}}}\n{data}\ntraining: {{output_dir: {tmp_path / 'out'}}}\n"
    (tmp_path / "recipe.yaml").write_text(text)
    return load_recipe(["--config", str(tmp_path / "recipe.yaml"), *words])


def load(folder: Path, tmp_path: Path, *words: str, compute_type=torch.float32) -> tuple[torch.nn.Module, BaseModel]:
    recipe = recipe_for(folder, tmp_path, *words)
    base = read_base_model(recipe.model, max_new_tokens=225, num_beams=1)
    return load_model(recipe, base, CPU, compute_type=compute_type), base


def change_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def features(count: int = 1) -> torch.Tensor:
    return torch.randn(count, 80, 3000, generator=torch.Generator().manual_seed(0))


def run_forward(model: torch.nn.Module) -> torch.Tensor:
    return model(input_features=features(), decoder_input_ids=torch.tensor([[257, 300, 4, 5]])).logits


# --- what is read before the weights -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["/nowhere/whisper", "./whisper", "../whisper", "~/whisper", "runs/a/b", "whisper/", "runs\\whisper"])
def test_a_folder_that_is_not_there_is_refused_and_not_looked_up(monkeypatch, name):
    monkeypatch.setattr("model.WhisperConfig.from_pretrained", lambda *_, **__: pytest.fail("looked up"))
    with pytest.raises(UserError) as caught:
        read(name)
    assert caught.value.problems == [f"model.name: there is no folder {name}"]


def test_a_hub_id_that_cannot_be_reached_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as caught:
        read("nobody/whisper-nothing")
    (problem,) = caught.value.problems
    assert problem.startswith("model.name: nobody/whisper-nothing cannot be read: there is no such folder here, and as a Hub id: ") and len(problem.splitlines()) == 1
    assert problem.endswith("give a folder, or a Hub id that this machine can reach")


def test_nothing_is_looked_up_for_a_folder(toy_folder, monkeypatch):
    import socket

    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("looked up"))
    assert read(toy_folder).name == str(toy_folder)


def test_a_model_that_is_not_whisper_is_refused(copy):
    change_json(copy / "config.json", model_type="wav2vec2")
    with pytest.raises(UserError, match=r"^model\.name: .*wav2vec2 model, not Whisper$"):
        read(copy)


@pytest.mark.parametrize("lost", [["config.json"], ["tokenizer.json"], ["tokenizer.json", "tokenizer_config.json"]])
def test_a_folder_that_lacks_a_file_is_refused_in_one_line(copy, lost):
    for name in lost:
        (copy / name).unlink()
    with pytest.raises(UserError, match=r"^model\.name: .* cannot be read: .*$"):
        read(copy)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_damaged_file_is_refused_and_not_replaced_by_defaults(copy, name):
    (copy / name).write_text((copy / name).read_text()[:-9])
    with pytest.raises(UserError, match=r"^model\.name: .* cannot be read: .*$"):
        read(copy)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(copy):
    vocabulary = json.loads((copy / "config.json").read_text())["vocab_size"]
    change_json(copy / "config.json", vocab_size=vocabulary - 1)
    with pytest.raises(UserError, match=rf"^model\.name: .*: the tokenizer has {vocabulary} tokens, the model {vocabulary - 1}$"):
        read(copy)


@pytest.mark.parametrize("changed", ["cut", "grown"])
def test_a_changed_vocabulary_is_refused(tmp_path, changed):
    folder = toy.build_whisper(tmp_path / "model", **({"vocab_size": 1900} if changed == "grown" else {}))
    tokenizer = WhisperTokenizerFast.from_pretrained(folder)
    if changed == "grown":
        tokenizer.add_tokens(["<|hakka|>", "<|laughter|>"])
        tokenizer.save_pretrained(folder)
    else:
        content = json.loads((folder / "tokenizer.json").read_text())
        content["added_tokens"] = [token for token in content["added_tokens"] if not re.fullmatch(r"<\|[0-9.]+\|>", token["content"])]
        (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="changed vocabulary .* start from a base model as it was published"):
        read(folder)


def test_weights_that_are_not_safetensors_are_refused_before_they_are_read(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"^model\.name: .* holds no weights as safetensors"):
        read(copy)


def test_layer_drop_is_set_to_zero_with_one_line(tmp_path, toy_folder):
    base = read(toy.build_whisper(tmp_path / "drop", encoder_layerdrop=0.9, decoder_layerdrop=0.1))
    assert (base.config.encoder_layerdrop, base.config.decoder_layerdrop) == (0.0, 0.0)
    (note,) = base.notes
    assert "layer drop is set to 0" in note
    assert read(toy_folder).notes == []


def test_augmentation_of_the_recipe_goes_into_the_models_config(toy_folder):
    base = read(toy_folder, apply_spec_augment=True, mask_time_prob=0.25, mask_feature_length=7)
    assert (base.config.apply_spec_augment, base.config.mask_time_prob, base.config.mask_feature_length) == (True, 0.25, 7)
    assert not read(toy_folder).config.apply_spec_augment


# --- one generation config ---------------------------------------------------------------------------------------


def test_a_bare_generation_config_is_completed_by_name(bare_folder):
    settings = read(bare_folder, language="fr", task="translate").generation_config
    assert settings.is_multilingual and len(settings.lang_to_id) == 99
    assert (settings.lang_to_id["<|en|>"], settings.lang_to_id["<|hi|>"]) == (50259, 50276)
    assert settings.task_to_id == {"transcribe": 50359, "translate": 50358}
    assert settings.no_timestamps_token_id == 50363
    assert (settings.decoder_start_token_id, settings.eos_token_id, settings.pad_token_id) == (50258, 50257, 50257)
    assert settings.begin_suppress_tokens == [220, 50257] and settings.suppress_tokens == []
    assert (settings.language, settings.task) == ("fr", "translate")


def test_a_missing_generation_config_is_made_like_a_bare_one(bare_folder, tmp_path):
    folder = Path(shutil.copytree(bare_folder, tmp_path / "none", ignore=shutil.ignore_patterns("generation_config.json")))
    made, completed = (read(path).generation_config.to_diff_dict() for path in (folder, bare_folder))
    assert made.items() <= completed.items()


def test_what_the_bases_generation_config_says_is_kept(copy):
    change_json(copy / "generation_config.json", suppress_tokens=[1, 2], begin_suppress_tokens=[5], alignment_heads=[[0, 1]])
    settings = read(copy).generation_config
    assert (settings.suppress_tokens, settings.begin_suppress_tokens, settings.alignment_heads) == ([1, 2], [5], [[0, 1]])


@pytest.mark.parametrize("suppressed", [[], [7, 8]])
def test_suppressed_tokens_of_the_recipe_win_and_are_in_the_saved_file(copy, tmp_path, suppressed):
    change_json(copy / "generation_config.json", suppress_tokens=list(range(90)), num_beams=5)
    model, base = load(copy, tmp_path, f"--model.suppress_tokens={suppressed}")
    assert f"greedy, at most 225 tokens, {len(suppressed)} tokens suppressed" in describe_generation(base)
    (tmp_path / "out").mkdir()
    output.save_model(tmp_path / "out", model, base)
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (saved["suppress_tokens"], saved.get("num_beams", 1)) == (suppressed, 1)
    assert model.generation_config is base.generation_config


def test_generation_words_in_the_models_config_are_removed_and_the_files_can_be_saved(copy, tmp_path):
    words = {"max_length": 20, "suppress_tokens": [1, 2], "begin_suppress_tokens": [3], "forced_decoder_ids": [[1, 9]], "num_beams": 5}
    change_json(copy / "config.json", **words)
    change_json(copy / "generation_config.json", temperature=0.5, do_sample=False, forced_decoder_ids=[[1, 9]])
    model, base = load(copy, tmp_path, *FULL)
    output.check_files_can_be_read_back(base)
    (tmp_path / "out").mkdir()
    output.save_model(tmp_path / "out", model, base)
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not saved.keys() & {"max_length", "suppress_tokens", "forced_decoder_ids", "num_beams"}
    assert saved.get("begin_suppress_tokens") != [3]
    settings = GenerationConfig.from_pretrained(tmp_path / "out")
    assert settings.temperature in (None, 1.0) and settings.forced_decoder_ids is None and settings.num_beams in (None, 1)
    WhisperForConditionalGeneration.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize(
    ("folder", "asked", "effective", "told"),
    [
        ("toy_folder", 225, 225, False),
        ("toy_folder", 444, 444, False),
        ("toy_folder", 445, 444, True),
        ("toy_folder", 448, 444, True),
        ("toy_folder", None, 444, False),
        ("english_folder", 446, 446, False),
        ("english_folder", 448, 446, True),
    ],
)
def test_the_generated_length_is_capped_to_the_positions_behind_the_prompt(request, folder, asked, effective, told):
    base = read(request.getfixturevalue(folder), max_new_tokens=asked)
    assert base.generation_config.max_length == effective
    line = f"training.generation_max_length: {asked} is cut to {effective}, the model's positions less the prompt"
    assert base.notes == [line] * told


def test_the_capped_length_is_what_the_model_can_generate(tmp_path):
    folder = toy.build_whisper(tmp_path / "short", max_target_positions=24)
    base = read(folder, max_new_tokens=225, suppress_tokens=list(range(256, 1864)))  # letters alone
    assert (base.prompt_length, base.generation_config.max_length) == (4, 20)
    model = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    model.generation_config = base.generation_config
    assert model.generate(features(), language="en", task="transcribe").shape == (1, 20)


# --- language ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [{"language": "hi"}, {"task": "translate"}])
def test_an_english_only_model_refuses_another_language_and_translation(english_folder, model):
    (key,) = model
    with pytest.raises(UserError, match=rf"^model\.{key}: .*knows English only"):
        read(english_folder, **model)


@pytest.mark.parametrize("language", [None, "en"])
def test_an_english_only_model_has_no_language_in_its_generation_config(english_folder, language):
    base = read(english_folder, language=language)
    assert not base.is_multilingual and base.prompt_length == 2
    assert getattr(base.generation_config, "language", None) is None and getattr(base.generation_config, "task", None) is None


def test_a_language_the_model_has_no_token_for_is_refused(bare_folder):
    with pytest.raises(UserError, match=r"^model\.language: .* has no token for yue$"):
        read(bare_folder, language="yue")


# --- placement ---------------------------------------------------------------------------------------------------


class Asked(Exception):
    """Stops a load before weights are read."""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("quantization", ["8bit", "4bit", "none"])
def test_each_rank_asks_for_one_whole_copy_on_its_own_card(toy_folder, tmp_path, monkeypatch, rank, quantization):
    environ = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    place = Place(choose_device(environ, 2), rank=rank, local_rank=rank, world_size=2, local_world_size=2)
    asked = {}

    def spy(name, **words):
        asked.update(words)
        raise Asked

    monkeypatch.setattr(WhisperForConditionalGeneration, "from_pretrained", spy)
    recipe = recipe_for(toy_folder, tmp_path, f"--model.quantization={quantization}")
    with pytest.raises(Asked):
        load_model(recipe, read(toy_folder), place, compute_type=torch.float16)
    assert asked["device_map"] == {"": f"cuda:{rank}"}
    stored = asked["quantization_config"]
    assert [bool(stored and stored.load_in_8bit), bool(stored and stored.load_in_4bit)] == [quantization == "8bit", quantization == "4bit"]
    assert asked["dtype"] == torch.float16 and asked["use_safetensors"] and asked["local_files_only"]
    assert not asked.get("trust_remote_code")


def test_a_tensor_elsewhere_after_loading_stops_the_run_by_name(toy_folder, tmp_path, monkeypatch):
    load_stock = WhisperForConditionalGeneration.from_pretrained

    def astray(*words, **more):
        model = load_stock(*words, **more)
        model.model.encoder.embed_positions.to("meta")
        return model

    monkeypatch.setattr(WhisperForConditionalGeneration, "from_pretrained", astray)
    with pytest.raises(RuntimeError, match=r"^the model: not on cpu: \S*encoder\.embed_positions\.weight on meta$"):
        load(toy_folder, tmp_path)


@pytest.fixture
def adapter_devices(monkeypatch) -> list:
    """The devices that adapter files are read to."""
    devices = []
    read_file = peft.utils.save_and_load.safe_load_file

    def spy(path, device=None):
        devices.append(device)
        return read_file(path, device=device)

    monkeypatch.setattr(peft.utils.save_and_load, "safe_load_file", spy)
    return devices


def test_adapters_are_read_to_the_cpu_and_never_to_card_0(toy_folder, tmp_path, adapter_devices, monkeypatch):
    model, _ = load(toy_folder, tmp_path)
    model.save_pretrained(tmp_path / "adapter")
    monkeypatch.setattr(peft.utils.save_and_load, "infer_device", lambda: "cuda")
    monkeypatch.setattr(peft.peft_model, "infer_device", lambda: "cuda")
    load(toy_folder, tmp_path, f"--model.adapter={tmp_path / 'adapter'}")
    load_weights(model, tmp_path / "adapter")
    assert adapter_devices == ["cpu", "cpu"]


# --- what is trained ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("quantization", "codes"), [("8bit", {torch.int8}), ("4bit", {torch.uint8}), ("none", set())])
@pytest.mark.parametrize("compute_type", [torch.float16, torch.bfloat16, torch.float32])
def test_adapters_are_float32_on_a_base_of_the_compute_type(toy_folder, tmp_path, quantization, codes, compute_type):
    model, _ = load(toy_folder, tmp_path, f"--model.quantization={quantization}", compute_type=compute_type)
    assert {parameter.dtype for _, parameter in trainable_parameters(model)} == {torch.float32}
    frozen = {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad}
    assert frozen == {compute_type} | codes
    line = describe_model(model, recipe_for(toy_folder, tmp_path, f"--model.quantization={quantization}"), compute_type)
    assert str(compute_type).removeprefix("torch.") in line and "trained in float32" in line


@pytest.mark.parametrize("words", [[], ["--lora.modules_to_save=[conv1]"], ["--lora.bias=all"]])
def test_whatever_is_trained_on_a_half_precision_checkpoint_is_float32(copy, tmp_path, words):
    WhisperForConditionalGeneration.from_pretrained(copy, dtype=torch.float16).save_pretrained(copy)
    model, _ = load(copy, tmp_path, "--model.quantization=none", *words, compute_type=torch.float16)
    assert {parameter.dtype for _, parameter in trainable_parameters(model)} == {torch.float32}


@pytest.mark.parametrize(
    ("quantization", "kind"), [("8bit", bitsandbytes.nn.Linear8bitLt), ("4bit", bitsandbytes.nn.Linear4bit)]
)
def test_linear_layers_are_quantised_and_others_are_not(toy_folder, tmp_path, quantization, kind):
    model, _ = load(toy_folder, tmp_path, f"--model.quantization={quantization}")
    kinds = {name: type(module) for name, module in model.named_modules() if hasattr(module, "weight")}
    layers = [found for name, found in kinds.items() if name.endswith(("base_layer", "k_proj", "out_proj", "fc1", "fc2"))]
    assert layers and all(issubclass(found, kind) for found in layers)
    assert model.get_output_embeddings().weight.dtype == torch.float32


def test_adapters_sit_on_q_and_v_of_encoder_and_decoder(toy_folder, tmp_path):
    model, _ = load(toy_folder, tmp_path)
    found = {name.partition("base_model.model.model.")[2].partition(".lora_")[0] for name, _ in trainable_parameters(model)}
    attentions = [f"encoder.layers.{i}.self_attn" for i in (0, 1)]
    attentions += [f"decoder.layers.{i}.{kind}" for i in (0, 1) for kind in ("self_attn", "encoder_attn")]
    assert found == {f"{attention}.{projection}" for attention in attentions for projection in ("q_proj", "v_proj")}


def test_without_a_task_type_the_adapter_takes_whispers_inputs(toy_folder, tmp_path):
    model, _ = load(toy_folder, tmp_path)
    assert isinstance(model, PeftModel) and model.peft_config["default"].task_type is None
    assert run_forward(model).shape[:2] == (1, 4)


def test_a_fresh_adapter_changes_nothing(toy_folder, tmp_path):
    model, _ = load(toy_folder, tmp_path, "--model.quantization=none")
    base = WhisperForConditionalGeneration.from_pretrained(toy_folder)
    with torch.no_grad():
        assert torch.equal(run_forward(model.eval()), run_forward(base.eval()))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {}),
        (["--lora.r=4", "--lora.target_modules=all-linear"], dict(r=4, target_modules="all-linear")),
        (
            ["--lora.rank_pattern={q_proj: 8}", "--lora.use_rslora=true", "--lora.init_lora_weights=gaussian", "--lora.bias=lora_only", "--model.quantization=none"],
            dict(rank_pattern={"q_proj": 8}, use_rslora=True, init_lora_weights="gaussian", bias="lora_only"),
        ),
        (["--lora.target_modules=.*decoder.*fc1"], dict(target_modules=".*decoder.*fc1")),
        (["--lora.modules_to_save=[layer_norm]"], dict(modules_to_save=["layer_norm"])),
    ],
)
def test_the_lora_section_is_pefts_own_config(toy_folder, tmp_path, words, expected):
    ours = dict(r=32, lora_alpha=64, target_modules=["q_proj", "v_proj"])
    assert build_lora_config(recipe_for(toy_folder, tmp_path, *words).lora) == LoraConfig(**ours | expected)


def test_going_on_from_an_adapter_trains_exactly_its_weights(toy_folder, tmp_path):
    model, _ = load(toy_folder, tmp_path)
    shake(model)
    model.save_pretrained(tmp_path / "adapter")
    again, _ = load(toy_folder, tmp_path, f"--model.adapter={tmp_path / 'adapter'}")
    before, after = dict(trainable_parameters(model)), dict(trainable_parameters(again))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("compute_type", [torch.float32, torch.bfloat16])
def test_full_fine_tuning_trains_everything_in_float32(toy_folder, tmp_path, compute_type):
    model, _ = load(toy_folder, tmp_path, *FULL, compute_type=compute_type)
    assert not isinstance(model, PeftModel)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["model.encoder.embed_positions.weight"], "sinusoids stay"
    run_forward(model).sum().backward()


# --- saved and read back -----------------------------------------------------------------------------------------


def shake(model: torch.nn.Module) -> None:
    """Moves every trained weight."""
    generator = torch.Generator().manual_seed(1)
    for _, parameter in trainable_parameters(model):
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("words", [(), FULL], ids=["adapter", "full"])
def test_weights_come_back_exactly(toy_folder, tmp_path, words):
    model, _ = load(toy_folder, tmp_path, *words)
    shake(model)
    model.save_pretrained(tmp_path / "saved")
    before = {name: parameter.clone() for name, parameter in trainable_parameters(model)}
    shake(model)
    load_weights(model, tmp_path / "saved")
    assert all(torch.equal(before[name], parameter) for name, parameter in trainable_parameters(model))


@pytest.mark.parametrize("words", [(), FULL], ids=["adapter", "full"])
@pytest.mark.parametrize("fault", ["missing", "unexpected"])
def test_weights_that_are_missing_or_strange_are_refused(toy_folder, tmp_path, words, fault):
    model, _ = load(toy_folder, tmp_path, *words)
    model.save_pretrained(tmp_path / "saved")
    (path,) = (tmp_path / "saved").glob("*.safetensors")
    weights = load_file(path)
    name = next(name for name in weights if "q_proj" in name)
    if fault == "missing":
        del weights[name]
    else:
        weights[name.replace("layers.0", "layers.9")] = weights[name].clone()
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=f"{fault}: \\['"):
        load_weights(model, tmp_path / "saved")


def test_a_fully_tuned_model_reloads_with_its_head_tied(toy_folder, tmp_path):
    model, base = load(toy_folder, tmp_path, *FULL)
    shake(model)
    (tmp_path / "out").mkdir()
    output.save_model(tmp_path / "out", model, base)
    again, report = WhisperForConditionalGeneration.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert again.proj_out.weight.data_ptr() == again.model.decoder.embed_tokens.weight.data_ptr()
    load_weights(model, tmp_path / "out")
    assert model.proj_out.weight.data_ptr() == model.model.decoder.embed_tokens.weight.data_ptr()
    with torch.no_grad():
        assert torch.equal(run_forward(model.eval()), run_forward(again.eval()))


@pytest.fixture
def prompts(monkeypatch) -> list:
    """The tokens that each call of generate starts from, one list a row."""
    prompts = []
    retrieve = WhisperForConditionalGeneration._retrieve_init_tokens

    def spy(*words, **more):
        prompts.append(retrieve(*words, **more))
        return prompts[-1]

    monkeypatch.setattr(WhisperForConditionalGeneration, "_retrieve_init_tokens", spy)
    return prompts


@pytest.mark.parametrize("words", [("--model.quantization=none",), FULL], ids=["adapter", "full"])
def test_an_output_of_a_bare_base_generates_with_language_and_with_timestamps(bare_folder, tmp_path, prompts, words):
    model, base = load(bare_folder, tmp_path, "--model.language=fr", *words)
    shake(model)
    out = tmp_path / "out"
    out.mkdir()
    output.save_model(out, model, base)
    if words == FULL:
        again = WhisperForConditionalGeneration.from_pretrained(out)
    else:
        stock = WhisperForConditionalGeneration.from_pretrained(bare_folder)
        stock.generation_config = GenerationConfig.from_pretrained(out)
        again = PeftModel.from_pretrained(stock, out)
    processor = WhisperProcessor.from_pretrained(out)
    again.eval()
    inputs = processor([[0.1] * 16_000] * 2, sampling_rate=16_000, return_tensors="pt").input_features
    again.generate(inputs, language=["hi", "en"], task="translate", max_new_tokens=4)
    again.generate(inputs, max_new_tokens=4)
    timed = again.generate(inputs, language="en", return_timestamps=True, max_new_tokens=4)
    assert prompts[0].tolist() == [[50258, 50276, 50358, 50363], [50258, 50259, 50358, 50363]]
    assert prompts[1].tolist() == [[50258, 50265, 50359, 50363]] * 2, "the recipe's language"
    assert prompts[2].tolist() == [[50258, 50259, 50359]] * 2
    assert (timed[:, 0] >= 50364).all(), "a time comes first"


def test_an_output_of_an_english_only_base_generates(english_folder, tmp_path, prompts):
    model, base = load(english_folder, tmp_path, *FULL)
    (tmp_path / "out").mkdir()
    output.save_model(tmp_path / "out", model, base)
    again = WhisperForConditionalGeneration.from_pretrained(tmp_path / "out").eval()
    again.generate(features(), max_new_tokens=4)
    assert prompts[0].tolist() == [[50257, 50362]], "as many as the labels leave out"


def test_the_saved_model_has_its_cache_on_and_augmentation_off(toy_folder, tmp_path):
    model, base = load(toy_folder, tmp_path, *FULL, "--model.apply_spec_augment=true")
    assert model.config.apply_spec_augment and not model.config.use_cache
    (tmp_path / "out").mkdir()
    output.save_model(tmp_path / "out", model, base)
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["use_cache"] is True and saved.get("apply_spec_augment", False) is False


def test_reading_does_not_change_the_recipe(toy_folder):
    model = ModelConfig(name=str(toy_folder), language="fr")
    before = replace(model)
    read_base_model(model, max_new_tokens=225, num_beams=1)
    assert model == before


# --- whatever the method -----------------------------------------------------------------------------------------

SOME = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
TARGETS = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
ADAPTERS = st.fixed_dictionaries(
    {
        # Biases are trained beside unquantised weights alone.
        "model.quantization, lora.bias": st.sampled_from(["8bit none", "4bit none", "none none", "none lora_only", "none all"]),
        "lora.r": st.integers(1, 8),
    },
    optional={
        "lora.target_modules": st.lists(st.sampled_from(TARGETS), min_size=1, max_size=3, unique=True).map(json.dumps),
        "lora.use_rslora": st.sampled_from(["true", "false"]),
        "lora.modules_to_save": st.sampled_from(["[conv1]", "null"]),
        "lora.layers_to_transform": st.sampled_from(["[0]", "[1]", "null"]),
    },
)
METHODS = (ADAPTERS | st.just({"lora": "null", "model.quantization": "none"})).map(
    lambda keys: [
        f"--{key}={value}"
        for joined, values in keys.items()
        for key, value in zip(joined.split(", "), values.split() if ", " in joined else [values], strict=True)
    ]
)
TYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])


@settings(SOME, max_examples=20)
@given(words=METHODS, compute_type=TYPES)
def test_rule_5_whatever_is_trained_is_float32_by_any_method_at_any_compute_type(toy_folder, tmp_path, words, compute_type):
    model, _ = load(toy_folder, tmp_path, *words, compute_type=compute_type)
    types = {name: parameter.dtype for name, parameter in trainable_parameters(model)}
    assert types and set(types.values()) == {torch.float32}


GENERATION = st.fixed_dictionaries({
    "language": st.sampled_from([None, "hi", "en"]),
    "task": st.sampled_from(["transcribe", "translate"]),
    "suppress_tokens": st.none() | st.lists(st.integers(0, 255), max_size=3),
})


@settings(SOME, max_examples=20)
@given(model=GENERATION, max_new_tokens=st.none() | st.integers(1, 600), num_beams=st.integers(1, 5), bare=st.booleans())
def test_rule_11_the_generation_config_written_is_the_one_generated_with(toy_folder, bare_folder, tmp_path, model, max_new_tokens, num_beams, bare):
    base = read(bare_folder if bare else toy_folder, max_new_tokens=max_new_tokens, num_beams=num_beams, **model)
    whisper = SimpleNamespace(config=base.config, save_pretrained=base.config.save_pretrained)
    output.save_model(tmp_path, whisper, base)
    written = GenerationConfig.from_pretrained(tmp_path)
    assert written.to_dict() == base.generation_config.to_dict()
    assert (written.language, written.task, written.num_beams) == (model["language"], model["task"], num_beams)
    assert written.max_length == min(max_new_tokens or 444, 444)
    assert model["suppress_tokens"] is None or written.suppress_tokens == model["suppress_tokens"]
    assert json.loads((tmp_path / "config.json").read_text()).keys().isdisjoint({"max_length", "suppress_tokens", "forced_decoder_ids"})


@settings(SOME, max_examples=6)
@given(words=METHODS)
def test_rule_15_the_output_of_any_method_gives_offline_the_numbers_that_were_trained(toy_folder, tmp_path, words):
    model, base = load(toy_folder, tmp_path, *words)
    shake(model)
    out = tmp_path / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    with torch.no_grad():
        expected = run_forward(model.eval())
        output.save_model(out, model, base)
        again = WhisperForConditionalGeneration.from_pretrained(out if "--lora=null" in words else toy_folder)
        if "--lora=null" not in words:
            again = PeftModel.from_pretrained(again, out)
        # Codes of 8 bit are off by up to half a code of their row.
        slack = 0.05 if "--model.quantization=8bit" in words else 1e-5
        torch.testing.assert_close(run_forward(again.eval()), expected, rtol=slack, atol=slack)
    assert WhisperProcessor.from_pretrained(out).tokenizer.get_vocab() == base.processor.tokenizer.get_vocab()
