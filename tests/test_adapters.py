"""What the lora section names is held against the layers of this Whisper, encoder and decoder apart, before weights are read."""

from dataclasses import fields

import config
import pytest
import yaml
from adapters import build_lora_config, check_adapter, describe_sides
from config import LORA_DEFAULTS, UNTESTED_LORA, Recipe, load_recipe
from faults import UserError
from peft import LoraConfig, get_peft_model
from transformers import WhisperConfig, WhisperForConditionalGeneration

SMALL = dict(d_model=16, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32)
SMALL |= dict(vocab_size=300, pad_token_id=0)
COUNTS = "the encoder has 4 layers, the decoder 1"


def shape(*, encoder_layers: int = 4, decoder_layers: int = 1) -> WhisperConfig:
    """A turbo in small: a deep encoder, a shallow decoder."""
    return WhisperConfig(encoder_layers=encoder_layers, decoder_layers=decoder_layers, **SMALL)


@pytest.fixture
def read(tmp_path):
    def read(*words: str) -> Recipe:
        path = tmp_path / "recipe.yaml"
        path.write_text("model: {name: toy}\ndata: {train: a.jsonl, validation: b.jsonl}\ntraining: {output_dir: out}\n")
        return load_recipe(["--config", str(path), *words])

    return read


def adapted(recipe: Recipe, whisper: WhisperConfig) -> list[str]:
    """The full names of the modules that peft gives an adapter."""
    lora = build_lora_config(recipe.lora, freeze_encoder=recipe.model.freeze_encoder)
    return get_peft_model(WhisperForConditionalGeneration(whisper), lora).base_model.targeted_module_names


@pytest.mark.parametrize(
    ("words", "encoder", "decoder"),
    [
        ([], 8, 4),
        (["--lora.target_modules=[q_proj, k_proj, v_proj, out_proj, fc1, fc2]"], 24, 10),
        (["--lora.target_modules=all-linear"], 24, 10),
        (["--lora.target_modules=[encoder_attn.q_proj]"], 0, 1),
        (["--lora.target_modules=.*encoder\\.layers.*fc[12]"], 8, 0),
        (["--lora.layers_to_transform=0"], 2, 4),
        (["--lora.layers_to_transform=[1, 3]", "--lora.exclude_modules=.*decoder.*"], 4, 0),
        (["--lora.exclude_modules=[encoder_attn.q_proj]"], 8, 3),
        (["--model.freeze_encoder=true"], 0, 4),
        (["--model.freeze_encoder=true", "--lora.exclude_modules=[encoder_attn.q_proj, v_proj]"], 0, 1),
        (["--model.freeze_encoder=true", "--lora.exclude_modules=.*self_attn.*"], 0, 2),
        (["--model.freeze_encoder=true", "--lora.target_modules=all-linear"], 0, 10),
        (["--model.freeze_encoder=true", "--lora.layers_to_transform=[0]"], 0, 4),
        (["--lora.rank_pattern={'encoder.*q_proj': 2}", "--lora.alpha_pattern={v_proj: 4}"], 8, 4),
    ],
)
def test_any_modules_layers_and_side_can_be_chosen_and_are_counted_by_side(read, words, encoder, decoder):
    recipe = read(*words)
    assert check_adapter(recipe, shape()) == []
    assert describe_sides(adapted(recipe, shape())) == f"{encoder} modules of the encoder and {decoder} of the decoder"


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        (["--lora.target_modules=[q_proj, vproj]"], "target_modules", "no module is called vproj; there are q_proj"),
        (["--lora.target_modules=.*vproj"], "target_modules", ".*vproj matches no module; full names are such as model.encoder.layers.0"),
        (["--lora.target_modules=q_proj"], "target_modules", "q_proj matches no module"),
        (["--lora.layers_to_transform=[0, 1, 2, 3]"], "layers_to_transform", "the decoder has no layer 1, 2, 3"),
        (["--lora.layers_to_transform=9"], "layers_to_transform", "the decoder has no layer 9"),
        (["--lora.layers_to_transform=[-1]"], "layers_to_transform", "the decoder has no layer -1"),
        (["--lora.layers_to_transform=[4]", "--lora.exclude_modules=.*decoder.*"], "layers_to_transform", "the encoder has no layer 4"),
        (["--lora.exclude_modules=[qproj]"], "exclude_modules", "no module is called qproj"),
        (["--lora.exclude_modules=.*_proj"], "exclude_modules", "leaves none of the 8 modules of the encoder and 4 of the decoder"),
        (["--lora.rank_pattern={k_proj: 4}"], "rank_pattern", "k_proj matches none of the 8 modules of the encoder and 4 of the decoder"),
        (["--lora.alpha_pattern={'layers.1.*decoder.*': 4}"], "alpha_pattern", "matches none of the"),
        (["--lora.modules_to_save=[layernorm]"], "modules_to_save", "no module is called layernorm"),
    ],
)
def test_what_matches_nothing_or_one_side_only_is_refused_with_the_layers_of_each(read, words, key, reason):
    with pytest.raises(UserError) as caught:
        check_adapter(read(*words), shape())
    (problem,) = caught.value.problems
    assert problem.startswith(f"lora.{key}: ") and reason in problem and COUNTS in problem


def test_a_frozen_encoder_with_adapters_on_it_alone_is_refused(read):
    recipe = read("--model.freeze_encoder=true", "--lora.target_modules=.*encoder\\.layers.*q_proj")
    with pytest.raises(UserError, match=rf"^model\.freeze_encoder: leaves none of the 4 modules of the encoder .*{COUNTS}"):
        check_adapter(recipe, shape())


@pytest.mark.parametrize("name", ["conv1", "embed_tokens", "embed_positions", "proj_out", "self_attn_layer_norm", "encoder"])
def test_an_adapter_on_anything_but_a_linear_layer_is_refused_with_what_can_be_done(read, name):
    with pytest.raises(UserError, match=rf"^lora\.target_modules: \S*{name} is .*lora\.modules_to_save trains other modules whole$"):
        check_adapter(read(f"--lora.target_modules=[{name}]"), shape())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--lora.modules_to_save=[fc1]"], r"fc1 is stored in 8bit and cannot be trained whole"),
        (["--lora.modules_to_save=[fc1]", "--model.quantization=4bit"], r"fc1 is stored in 4bit"),
        (["--lora.modules_to_save=[conv1]", "--model.freeze_encoder=true"], r"encoder\.conv1 is in the encoder"),
        (["--lora.trainable_token_indices=[1, 300]"], r"the model has tokens 0 to 299, not 300"),
        (["--lora.trainable_token_indices={conv1: [1]}"], r"there is no other embedding of tokens"),
        (["--lora.lora_bias=true", "--lora.target_modules=[k_proj]"], r"k_proj has no bias"),
        (["--lora.init_lora_weights=pissa", "--lora.r=17", "--model.quantization=none"], r"17 is more than \S+ has columns or rows"),
    ],
)
def test_what_cannot_be_trained_is_refused(read, words, reason):
    with pytest.raises(UserError, match=reason):
        check_adapter(read(*words), shape())


OTHER_VALUES = {
    "task_type": "SEQ_2_SEQ_LM",
    "inference_mode": "true",
    "auto_mapping": "{a: b}",
    "peft_type": "LOHA",
    "peft_version": "'1.0'",
    "base_model_name_or_path": "a",
    "revision": "main",
    "fan_in_fan_out": "true",
    "target_parameters": "[fc1.weight]",
    "layer_replication": "[[0, 1], [0, 2]]",
    "megatron_config": "{a: 1}",
    "megatron_core": "core",
    "runtime_config": "{ephemeral_gpu_offload: true}",
    "loftq_config": "{loftq_bits: 8}",
    "eva_config": "{rho: 3.0}",
    "corda_config": "{verbose: true}",
    "lora_ga_config": "{stable_gamma: 8}",
    "velora_config": "{num_groups: 2}",
    "kasa_config": "{beta: 0.1}",
    "monteclora_config": "{num_samples: 2}",
    "arrow_config": "{top_k: 2}",
    "use_bdlora": "{nblocks: 2}",
    "alora_invocation_tokens": "[1]",
    "use_qalora": "true",
    "qalora_group_size": "8",
}
# Tried in tests/test_methods.py, and which modules get them above.
SUPPORTED = {
    *LORA_DEFAULTS,
    *("lora_dropout", "exclude_modules", "bias", "use_rslora", "modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern"),
    *("rank_pattern", "alpha_pattern", "trainable_token_indices", "use_dora", "lora_bias", "ensure_weight_tying"),
}


def test_every_key_of_pefts_config_is_either_supported_or_refused():
    assert {f.name for f in fields(LoraConfig)} == SUPPORTED | {*UNTESTED_LORA}
    assert not SUPPORTED & {*UNTESTED_LORA} and {*OTHER_VALUES} == {*UNTESTED_LORA}


@pytest.mark.parametrize(("key", "value"), OTHER_VALUES.items())
def test_a_key_outside_the_tested_combinations_is_refused_with_the_reason(read, key, value):
    with pytest.raises(UserError) as caught:
        read(f"--lora.{key}={value}", "--model.quantization=none")
    assert caught.value.problems == [f"command line: lora.{key}: not supported: {UNTESTED_LORA[key]}"]


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        (["--lora.init_lora_weights=eva"], "init_lora_weights", "a pass over the data"),
        (["--lora.init_lora_weights=corda"], "init_lora_weights", "a pass over the data"),
        (["--lora.init_lora_weights=loftq"], "init_lora_weights", "quantises the base model itself"),
        (["--lora.init_lora_weights=false"], "init_lora_weights", "before any training"),
        (["--lora.init_lora_weights='pissa_niter_[number of iters]'"], "init_lora_weights", "write pissa"),
        *(
            ([f"--lora.init_lora_weights={word}", f"--model.quantization={stored}"], "init_lora_weights", f"not from {stored} ones")
            for word in ("olora", "pissa", "mica", "orthogonal")
            for stored in ("8bit", "4bit")
        ),
        (["--lora.init_lora_weights=orthogonal", "--lora.r=3", "--model.quantization=none"], "r", "an even rank"),
        (["--lora.bias=all"], "bias", "model.quantization: none"),
        (["--lora.bias=lora_only", "--model.quantization=4bit"], "bias", "model.quantization: none"),
        (["--lora.rank_pattern={q_proj: 0}"], "rank_pattern.q_proj", "at least 1"),
        (["--lora.alpha_pattern={q_proj: a}"], "alpha_pattern.q_proj", "a number"),
        (["--lora.target_modules=.*(q_proj"], "target_modules", "no regular expression"),
        (["--lora.exclude_modules='['"], "exclude_modules", "no regular expression"),
        (["--lora.rank_pattern={'a{99999999999}': 2}"], "rank_pattern.a{99999999999}", "no regular expression"),
        (["--lora.target_modules=[]"], "target_modules", "at least one name"),
        (["--lora.target_modules=null"], "target_modules", "at least one name"),
    ],
)
def test_settings_that_cannot_train_are_refused_by_the_recipe(read, words, key, reason):
    with pytest.raises(UserError) as caught:
        read(*words)
    (problem,) = caught.value.problems
    assert problem.startswith(f"command line: lora.{key}: ") and reason in problem


def test_pefts_own_defaults_are_no_settings(read):
    given = " ".join(f"{key}: {value}," for key, value in [("inference_mode", "false"), ("megatron_core", "megatron.core"), ("revision", "null")])
    assert read(f"--lora={{{given}}}").lora == read().lora


def test_a_run_from_an_adapter_keeps_in_its_recipe_only_the_keys_that_were_written(read):
    recipe = read("--lora.r=4", "--model.adapter=a")
    assert recipe.lora_given == ("r",)
    assert yaml.safe_load(config.dump_recipe(recipe))["lora"] == {"r": 4}
