"""Attention without a mask: what the stock kernels give, in training and in generation."""

import pytest
import torch
from toy import build_whisper
from transformers import WhisperForConditionalGeneration, masking_utils

from attention import use_attention_without_mask


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_whisper(tmp_path_factory.mktemp("toy"))


def load(folder, *, changed: bool) -> WhisperForConditionalGeneration:
    model = WhisperForConditionalGeneration.from_pretrained(folder, attn_implementation="eager")
    if changed:
        use_attention_without_mask(model)
    return model


def batch(model) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, 200, (2, 9))
    return {"input_features": torch.randn(2, model.config.num_mel_bins, 3000), "decoder_input_ids": ids}


def test_logits_and_gradients_equal_those_of_the_eager_kernel(folder):
    results = []
    for changed in (False, True):
        model = load(folder, changed=changed)
        logits = model(**batch(model), use_cache=False).logits
        logits.square().mean().backward()
        results.append([logits, model.model.encoder.layers[0].self_attn.q_proj.weight.grad])
    for stock, own in zip(*results, strict=True):
        torch.testing.assert_close(own, stock, rtol=1e-4, atol=1e-6)


def test_a_position_does_not_see_those_behind_it(folder):
    model = load(folder, changed=True).eval()
    inputs = batch(model)
    before = model(**inputs, use_cache=False).logits
    inputs["decoder_input_ids"][:, 5:] = 7
    after = model(**inputs, use_cache=False).logits
    torch.testing.assert_close(after[:, :5], before[:, :5])
    assert not torch.allclose(after[:, 5:], before[:, 5:])


def test_generation_with_a_cache_gives_the_stock_tokens(folder):
    tokens = []
    for changed in (False, True):
        model = load(folder, changed=changed).eval()
        features = batch(model)["input_features"]
        tokens.append(model.generate(features, max_new_tokens=12, num_beams=2))
    assert torch.equal(*tokens)


def test_the_host_never_asks_the_device_for_packed_sequences(folder, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the device was asked")

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", refuse)
    model = load(folder, changed=True)
    assert model(**batch(model), use_cache=False).logits.shape == (2, 9, model.config.vocab_size)


def test_the_saved_config_names_no_attention_of_ours(folder, tmp_path):
    load(folder, changed=True).save_pretrained(tmp_path)
    assert "sdpa_without_mask" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("words", [{"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 3}])
def test_what_needs_a_mask_is_refused_and_not_answered_wrongly(folder, words):
    model = load(folder, changed=True).eval()
    with pytest.raises(ValueError, match="need a mask"):
        prompt = torch.tensor([[5, 6]])
        model.generate(batch(model)["input_features"][:1], decoder_input_ids=prompt, max_new_tokens=12, **words)
