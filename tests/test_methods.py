"""Every training method on every kind of weights, and every Whisper layout: learns, is saved, and loads with the stock libraries."""

import json
import shutil
from pathlib import Path

import output
import pytest
import torch
from adapters import check_adapter
from config import Recipe, load_recipe
from device import Place
from eight_bit import use_dequantized_products
from faults import UserError
from launching import train_here, write_recipe
from learning import LearningCheck, check_saved_weights
from model import build_quantization_config, describe_model, load_model, load_weights, read_base_model, trainable_parameters
from peft import PeftModel
from safetensors.torch import load_file
from toy import build_whisper, write_speech
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration, WhisperProcessor

FULL = ("--lora=null", "--model.quantization=none")
IDS = torch.tensor([[257, 300, 4, 5], [257, 301, 7, 8]])


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Layers of width 16 are slower by two threads, most of all beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A toy that hears one second: 100 frames."""
    return build_whisper(tmp_path_factory.mktemp("methods") / "small", max_source_positions=50)


@pytest.fixture(scope="module")
def speech(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("methods")
    build_whisper(folder / "model")
    write_speech(folder, ["one", "two", "three", "four"])
    write_speech(folder, ["a", "b"], name="dev")
    return folder


def recipe_for(folder: Path, tmp_path: Path, *words: str) -> Recipe:
    lora = "{r: 4, lora_alpha: 8}"
    text = f"model: {{name: {folder}}}\nlora: {lora}\ndata: {{train: a.jsonl, validation: b.jsonl}}\ntraining: {{output_dir: {tmp_path}}}\n"
    (tmp_path / "recipe.yaml").write_text(text)
    return load_recipe(["--config", str(tmp_path / "recipe.yaml"), *words])


def load(folder: Path, tmp_path: Path, *words: str, compute_type=torch.float32):
    """Model and base, checked and loaded as a run does."""
    recipe = recipe_for(folder, tmp_path, *words)
    base = read_base_model(recipe.model, max_new_tokens=225, num_beams=1)
    check_adapter(recipe, base.config)
    torch.manual_seed(0)
    return load_model(recipe, base, Place("cpu"), compute_type=compute_type), base


def features(model: torch.nn.Module) -> torch.Tensor:
    config = model.config
    return torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions, generator=torch.Generator().manual_seed(0))


def loss_of(model: torch.nn.Module, compute_type=torch.float32) -> torch.Tensor:
    with torch.autocast("cpu", compute_type, enabled=compute_type != torch.float32):
        logits = model(input_features=features(model), decoder_input_ids=IDS).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), IDS.flatten())


def teach(model: torch.nn.Module, compute_type=torch.float32) -> None:
    """Two steps under the check of runs that teach nothing."""
    check = LearningCheck(model, lambda: False)
    optimizer = torch.optim.AdamW([parameter for _, parameter in trainable_parameters(model)], lr=1e-2)
    model.train()
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, compute_type).backward()
        check.on_pre_optimizer_step(None, None, None, optimizer=optimizer)
        optimizer.step()
        check.on_optimizer_step(None, None, None, optimizer=optimizer)
    assert check.steps == 2
    model.eval()


def load_stock(base: Path, out: Path, quantization: str = "none") -> torch.nn.Module:
    """The output folder, an adapter on its base or a whole model, by the stock libraries alone."""
    is_adapter = (out / "adapter_config.json").is_file()
    stored = build_quantization_config(quantization, torch.float32)
    source = base if is_adapter else out
    model, report = WhisperForConditionalGeneration.from_pretrained(
        source, quantization_config=stored, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    use_dequantized_products(model)  # the stock 8-bit products depend on the batch
    if is_adapter:
        if (out / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(out)
        model = PeftModel.from_pretrained(model, out)
    return model.eval()


# --- methods -----------------------------------------------------------------------------------------------------

ON_ANY_WEIGHTS = {
    "lora": [],
    "dora": ["--lora.use_dora=true", "--lora.lora_dropout=0"],
    "dora with dropout": ["--lora.use_dora=true", "--lora.lora_dropout=0.2"],
    "rslora": ["--lora.use_rslora=true", "--lora.rank_pattern={q_proj: 2}", "--lora.alpha_pattern={'decoder.*v_proj': 4}"],
    "every linear layer": ["--lora.target_modules=all-linear", "--lora.init_lora_weights=gaussian"],
    "biases of b": ["--lora.lora_bias=true"],
    "modules trained whole": ["--lora.modules_to_save=[conv1, final_layer_norm, decoder.embed_positions]"],
    "tokens": ["--lora.trainable_token_indices=[260, 301]", "--lora.modules_to_save=[conv2]"],
    "embedding": ["--lora.modules_to_save=[embed_tokens]", "--lora.ensure_weight_tying=true"],
    "output layer": ["--lora.modules_to_save=[proj_out]"],
    "decoder": ["--model.freeze_encoder=true"],
}
ON_WEIGHTS_AS_THEY_ARE = {
    **{word: [f"--lora.init_lora_weights={word}"] for word in ("pissa", "olora", "mica", "orthogonal")},
    "all biases": ["--lora.bias=all"],
    "all biases of the decoder": ["--lora.bias=all", "--model.freeze_encoder=true"],
    "biases of adapted layers": ["--lora.bias=lora_only"],
    "a linear layer whole": ["--lora.modules_to_save=[fc1]"],
}
METHODS = ON_ANY_WEIGHTS | ON_WEIGHTS_AS_THEY_ARE
TABLE = [(name, stored) for name in ON_ANY_WEIGHTS for stored in ("8bit", "4bit")]
TABLE += [(name, "none") for name in ("lora", "dora", "tokens", *ON_WEIGHTS_AS_THEY_ARE)]


@pytest.mark.parametrize(("method", "quantization"), TABLE)
def test_an_adapter_changes_nothing_at_first_is_learnt_and_loads_with_the_stock_libraries(small, tmp_path, method, quantization):
    model, _ = load(small, tmp_path, f"--model.quantization={quantization}", *METHODS[method])
    with torch.no_grad():
        before = loss_of(model.eval()).item()
        if method not in ("pissa", "olora"):  # which move a part of the weights into the adapter
            with model.disable_adapter():
                assert loss_of(model).item() == pytest.approx(before, abs=1e-5)
    teach(model)
    with torch.no_grad():
        after = loss_of(model).item()
        assert after < before - 0.004
        model.save_pretrained(tmp_path / "out")
        check_saved_weights(model, tmp_path / "out", lambda: loss_of(model).item())
        assert loss_of(load_stock(small, tmp_path / "out", quantization)).item() == pytest.approx(after, abs=1e-5)
        if quantization != "none":
            assert loss_of(load_stock(small, tmp_path / "out")).item() == pytest.approx(after, abs=0.02), "on weights as they are too"


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("quantization", ["8bit", "4bit"])
def test_an_adapter_is_learnt_in_half_precision_with_nothing_frozen_in_float32(small, tmp_path, method, quantization):
    words = [f"--model.quantization={quantization}", *METHODS[method]]
    model, _ = load(small, tmp_path, *words, compute_type=torch.bfloat16)
    teach(model, torch.bfloat16)
    frozen = {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad}
    assert torch.float32 not in frozen and torch.bfloat16 in frozen
    assert {parameter.dtype for _, parameter in trainable_parameters(model)} == {torch.float32}


@pytest.mark.parametrize(("quantization", "bound"), [("8bit", 0.02), ("4bit", 0.25)])
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_gradients_on_quantised_weights_are_close_to_those_on_weights_as_they_are(small, tmp_path, method, quantization, bound):
    gradients = []
    for stored in (quantization, "none"):
        model, _ = load(small, tmp_path, f"--model.quantization={stored}", "--lora.lora_dropout=0", *METHODS[method])
        generator = torch.Generator().manual_seed(1)
        for _, parameter in trainable_parameters(model):
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
        loss_of(model.train()).backward()
        gradients.append(torch.cat([parameter.grad.flatten() for _, parameter in trainable_parameters(model)]))
    own, reference = gradients
    assert (own - reference).norm() < bound * reference.norm()


@pytest.mark.parametrize(("saved_on", "read_on"), [("8bit", "4bit"), ("4bit", "none"), ("none", "8bit")])
def test_an_adapter_goes_on_whatever_weights_it_was_begun_on(small, tmp_path, saved_on, read_on):
    model, _ = load(small, tmp_path, f"--model.quantization={saved_on}")
    teach(model)
    model.save_pretrained(tmp_path / "adapter")
    again, _ = load(small, tmp_path, f"--model.quantization={read_on}", f"--model.adapter={tmp_path / 'adapter'}")
    before, after = dict(trainable_parameters(model)), dict(trainable_parameters(again))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    teach(again)
    load_weights(again, tmp_path / "adapter")
    assert all(torch.equal(before[name], after[name]) for name in before)


# --- going on from an adapter ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(small, tmp_path_factory) -> Path:
    """An adapter of rank 4 with DoRA on q_proj and v_proj."""
    folder = tmp_path_factory.mktemp("adapter")
    load(small, folder, "--lora.use_dora=true")[0].save_pretrained(folder)
    return folder


def settings_of(folder: Path, adapter: Path, tmp_path: Path, *words: str) -> list[str]:
    recipe = recipe_for(folder, tmp_path, f"--model.adapter={adapter}", *words)
    return check_adapter(recipe, WhisperConfig.from_pretrained(folder))


@pytest.mark.parametrize("words", [[], ["--lora.use_dora=true"], ["--lora.target_modules=[v_proj, q_proj]"], ["--lora={}"]])
def test_settings_that_an_adapter_has_too_may_be_written(small, adapter, tmp_path, words):
    assert settings_of(small, adapter, tmp_path, *words) == []


@pytest.mark.parametrize(
    ("word", "here", "there"),
    [
        ("r=8", "8", "4"),
        ("lora_alpha=4", "4", "8"),
        ("use_dora=false", "False", "True"),
        ("target_modules=[q_proj]", "['q_proj']", "['q_proj', 'v_proj']"),
        ("target_modules=.*q_proj", ".*q_proj", "['q_proj', 'v_proj']"),
        ("exclude_modules=[fc1]", "['fc1']", "None"),
    ],
)
def test_settings_that_an_adapter_has_not_are_refused_with_both_values(small, adapter, tmp_path, word, here, there):
    with pytest.raises(UserError) as caught:
        settings_of(small, adapter, tmp_path, f"--lora.{word}")
    key = word.partition("=")[0]
    expected = f"lora.{key}: {here} here, {there} in the adapter {adapter}, whose settings stay; leave the key out"
    assert caught.value.problems == [expected]
    told = settings_of(small, adapter, tmp_path, f"--lora.{word}", "--training.do_train=false")
    assert told == [expected.removesuffix("; leave the key out")], "nothing is trained"


def test_an_adapter_made_for_another_model_is_told(small, adapter, tmp_path):
    other = shutil.copytree(small, tmp_path / "other")
    expected = f"model.adapter: {adapter} was made for {small}; the model here is {other}"
    assert settings_of(other, adapter, tmp_path) == [expected]


def test_an_adapter_begun_from_the_weights_is_refused_on_quantised_ones(small, tmp_path):
    words = ["--lora.init_lora_weights=pissa", "--model.quantization=none"]
    load(small, tmp_path, *words)[0].save_pretrained(tmp_path / "adapter")
    with pytest.raises(UserError, match="was begun with init_lora_weights: pissa: .*model.quantization: none"):
        settings_of(small, tmp_path / "adapter", tmp_path)
    settings_of(small, tmp_path / "adapter", tmp_path, "--model.quantization=none")


def test_an_adapter_on_the_encoder_goes_on_with_its_decoder_part_alone(small, adapter, tmp_path):
    model, _ = load(small, tmp_path, f"--model.adapter={adapter}", "--model.freeze_encoder=true")
    names = [name for name, _ in trainable_parameters(model)]
    assert names and not [name for name in names if "model.encoder." in name]
    teach(model)


def test_an_adapter_that_is_not_there_is_refused_before_weights_are_read(small, tmp_path):
    with pytest.raises(UserError, match=rf"^model\.adapter: {tmp_path} holds no adapter_model\.safetensors$"):
        settings_of(small, tmp_path, tmp_path)


# --- the encoder frozen, everything trained ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "checkpointing"),
    [(["--model.quantization=8bit"], True), (["--model.quantization=4bit"], False), (["--lora.bias=all", FULL[1]], False), (FULL, True)],
)
def test_a_frozen_encoder_has_no_backward_pass(small, tmp_path, words, checkpointing):
    model, _ = load(small, tmp_path, "--model.freeze_encoder=true", *words)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    heard = []
    encoder = model.get_encoder()
    encoder.register_forward_hook(lambda module, inputs, outputs: heard.append(outputs.last_hidden_state))
    teach(model)
    assert heard and all(hidden.grad_fn is None and not hidden.requires_grad for hidden in heard)
    names = [name for name, _ in trainable_parameters(model)]
    assert names and all("decoder" in name for name in names)
    line = describe_model(model, recipe_for(small, tmp_path, "--model.freeze_encoder=true", *words), torch.float32)
    assert line.endswith("the encoder frozen")


@pytest.mark.parametrize("words", [[], ["--model.freeze_encoder=true"]])
def test_a_fully_tuned_model_is_learnt_and_loads_with_its_head_tied(small, tmp_path, words):
    model, base = load(small, tmp_path, *FULL, *words)
    encoder = {name: tensor.clone() for name, tensor in model.model.encoder.state_dict().items()}
    teach(model)
    changed = [name for name, tensor in model.model.encoder.state_dict().items() if not torch.equal(tensor, encoder[name])]
    assert (changed == []) == bool(words)
    out = tmp_path / "out"
    out.mkdir()
    output.save_model(out, model, base)
    again = load_stock(small, out)
    assert again.proj_out.weight.data_ptr() == again.model.decoder.embed_tokens.weight.data_ptr()
    with torch.no_grad():
        assert loss_of(again).item() == loss_of(model).item()


def test_full_fine_tuning_with_accumulation_and_checkpointing_resumes_to_the_straight_run(speech, tmp_path):
    settings = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True, "save_steps": 1, "eval_steps": 1, "save_total_limit": None}
    settings |= {"output_dir": str(tmp_path / "out"), "load_best_model_at_end": False}
    recipe = write_recipe(
        speech, model={"freeze_encoder": True}, lora=None, run={"baseline": False, "max_eval_samples": 1}, training=settings
    )
    straight = train_here(recipe)["final"]
    weights = load_file(tmp_path / "out" / "model.safetensors")
    shutil.rmtree(tmp_path / "out" / "checkpoint-2")
    (tmp_path / "out" / "results.json").unlink()
    assert train_here(recipe, "--run.resume", "auto")["final"] == straight
    torch.testing.assert_close(load_file(tmp_path / "out" / "model.safetensors"), weights, rtol=0, atol=0)


# --- layouts -----------------------------------------------------------------------------------------------------

DEEP = {"encoder_layers": 4, "max_source_positions": 50}
LAYOUTS = {
    "english": dict(text_tokens=50256, max_source_positions=50),
    "multilingual": dict(text_tokens=50257, max_source_positions=50),
    "large-v3": dict(text_tokens=50257, languages=100, num_mel_bins=128, max_source_positions=50),
    "turbo": dict(text_tokens=50257, languages=100, num_mel_bins=128, decoder_layers=1, **DEEP),
    "distilled": dict(text_tokens=50257, languages=100, num_mel_bins=128, decoder_layers=2, **DEEP),
    "distilled english": dict(text_tokens=50256, decoder_layers=2, **DEEP),
}
TOKENS = {"english": 51864, "distilled english": 51864, "multilingual": 51865}


@pytest.fixture
def prompts(monkeypatch) -> list:
    """The tokens that each call of generate starts from, one list a row."""
    found = []
    retrieve = WhisperForConditionalGeneration._retrieve_init_tokens

    def spy(*words, **more):
        found.append(retrieve(*words, **more))
        return found[-1]

    monkeypatch.setattr(WhisperForConditionalGeneration, "_retrieve_init_tokens", spy)
    return found


@pytest.mark.parametrize(
    ("layout", "words"),
    [(name, []) for name in ("english", "multilingual", "turbo")] + [(name, FULL) for name in ("large-v3", "distilled", "distilled english")],
)
def test_every_layout_learns_loads_and_generates_with_and_without_language_and_timestamps(tmp_path, prompts, layout, words):
    folder = build_whisper(tmp_path / "base", bare_generation_config=True, **LAYOUTS[layout])
    multilingual = "english" not in layout
    model, base = load(folder, tmp_path, *words, *(["--model.language=fr"] if multilingual else []))
    assert base.config.vocab_size == TOKENS.get(layout, 51866) and base.is_multilingual == multilingual
    teach(model)
    out = tmp_path / "out"
    out.mkdir()
    output.save_model(out, model, base)
    again = load_stock(folder, out)
    processor = WhisperProcessor.from_pretrained(out)
    assert processor.feature_extractor.feature_size == base.config.num_mel_bins
    first = len(processor.tokenizer) - 1501  # <|0.00|>
    heard = features(again)
    again.generate(heard, max_new_tokens=3)
    timed = again.generate(heard, return_timestamps=True, max_new_tokens=3)
    assert (timed[:, 0] >= first).all(), "a time comes first"
    end = 50257 if multilingual else 50256
    late = base.config.vocab_size == 51866  # everything after the languages is one higher
    own = [end + 1, 50265, 50359 + late] if multilingual else [end + 1]
    assert prompts[0].tolist() == [[*own, first - 1]] * 2 and prompts[1].tolist() == [own] * 2
    if multilingual:
        again.generate(heard, language=["hi", "en"], task="translate", max_new_tokens=3)
        assert prompts[2].tolist() == [[end + 1, language, 50358 + late, first - 1] for language in (50276, 50259)]


def test_translation_by_a_turbo_is_warned_of_once(speech, tmp_path, capsys):
    folder = build_whisper(tmp_path / "turbo", languages=100, encoder_layers=4, decoder_layers=1)
    recipe = write_recipe(speech, model={"name": str(folder), "task": "translate"}, training={"output_dir": str(tmp_path / "out")})
    train_here(recipe, "--check")
    assert capsys.readouterr().out.count("were not trained to translate") == 1


# --- any folder is scored ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(speech, tmp_path_factory) -> dict[str, dict]:
    """The model section that scores: a stock folder in shards, a fully tuned output, an adapter."""
    made = tmp_path_factory.mktemp("folders")
    sharded = build_whisper(made / "sharded", text_tokens=50257, bare_generation_config=True)
    WhisperForConditionalGeneration.from_pretrained(sharded).save_pretrained(sharded, max_shard_size="100KB")
    (sharded / "model.safetensors").unlink(missing_ok=True)
    assert len([*sharded.glob("*.safetensors")]) > 1 and (sharded / "model.safetensors.index.json").is_file()
    quick = {"max_steps": 1, "eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False, "learning_rate": 1e-2}
    for name, lora in [("full", None), ("adapter", {})]:
        recipe = write_recipe(speech, lora=lora, run={"baseline": False}, training=quick | {"output_dir": str(made / name)})
        train_here(recipe)
    return {
        "sharded": {"name": str(sharded)},
        "full": {"name": str(made / "full")},
        "adapter": {"name": str(speech / "model"), "adapter": str(made / "adapter")},
    }


@pytest.mark.parametrize(("kind", "quantization"), [("sharded", "8bit"), ("full", "4bit"), ("adapter", "4bit"), ("adapter", "none")])
def test_stock_folders_tuned_models_and_adapters_are_scored_on_any_weights(speech, folders, tmp_path, kind, quantization):
    training = {"do_train": False, "output_dir": str(tmp_path / "scored")}
    results = train_here(write_recipe(speech, model=folders[kind] | {"quantization": quantization}, training=training))
    assert results["quantization"] == quantization and 5 < results["final"]["dev"]["loss"] < 12
    rows = [json.loads(line) for line in (tmp_path / "scored" / "predictions" / "final-dev.jsonl").read_text().splitlines()]
    assert [row["reference"] for row in rows] == ["a", "b"]
    assert results["final"]["dev"]["wer"] == 50 * sum(row["errors"] for row in rows)
    assert all(row["errors"] == row["insertions"] + row["deletions"] + row["substitutions"] for row in rows)
