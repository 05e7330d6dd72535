"""Toy Whisper models and speech for tests: two layers, random weights, the real special tokens, no network."""

import json
from pathlib import Path

import numpy as np
import soundfile
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration, WhisperTokenizerFast
from transformers.models.whisper.tokenization_whisper import LANGUAGES

FIRST_SPECIAL = 50257  # of the 51865-token vocabulary: the end of text
LANGUAGE_COUNT = 99  # Cantonese came with the 51866-token vocabulary


def build_tokenizer(*, text_tokens: int = 256, languages: int = LANGUAGE_COUNT) -> WhisperTokenizerFast:
    """A byte-level tokenizer with Whisper's special tokens behind `text_tokens` ordinary ones, in Whisper's order.

    With text_tokens=50257 every special token has the id of the real multilingual vocabulary (51865 tokens; with
    languages=100 that of large-v3 and turbo, 51866), with text_tokens=50256 that of the English-only models (51864).
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    vocabulary |= {f"<filler {i}>": i for i in range(len(letters), text_tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    known = [f"<|{code}|>" for code in list(LANGUAGES)[:languages]]
    names = ["<|endoftext|>", "<|startoftranscript|>", *known, "<|translate|>", "<|transcribe|>"]
    names += ["<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    times = [f"<|{i * 0.02:.2f}|>" for i in range(1501)]
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in times])
    end = "<|endoftext|>"
    return WhisperTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, unk_token=end, pad_token=end)


def build_whisper(
    folder: Path, *, text_tokens: int = 256, languages: int = LANGUAGE_COUNT, bare_generation_config: bool = False, **changes
) -> Path:
    """Writes a random two-layer Whisper with tokenizer into `folder` and gives the folder back.

    `changes` go into its WhisperConfig.
    """
    tokenizer = build_tokenizer(text_tokens=text_tokens, languages=languages)
    ids = tokenizer.get_vocab()
    settings = dict(
        vocab_size=len(tokenizer),
        num_mel_bins=80,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        decoder_start_token_id=ids["<|startoftranscript|>"],
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|endoftext|>"],
        pad_token_id=ids["<|endoftext|>"],
    )
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(WhisperConfig(**settings | changes))
    if not bare_generation_config:
        model.generation_config = GenerationConfig(
            is_multilingual=True, decoder_start_token_id=ids["<|startoftranscript|>"], max_length=448
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_clip(path: Path, *, seconds: float = 0.5, rate: int = 16_000, pitch: float = 440.0) -> Path:
    """A sine tone as a 16-bit mono file of the path's kind."""
    time = np.arange(round(seconds * rate)) / rate
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, (0.5 * np.sin(2 * np.pi * pitch * time)).astype(np.float32), rate)
    return path


def write_manifest(path: Path, rows: list[dict]) -> Path:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_speech(folder: Path, texts: list[str], *, name: str = "train", **columns) -> Path:
    """A manifest of tones, one a text, each of its own pitch and length."""
    rows = []
    for i, text in enumerate(texts):
        clip = write_clip(folder / name / f"{i}.wav", seconds=0.3 + 0.1 * (i % 5), pitch=200 + 50 * i)
        rows.append({"audio": str(clip.relative_to(folder)), "text": text, **columns})
    return write_manifest(folder / f"{name}.jsonl", rows)


def write_hub_set(folder: Path, columns: dict[str, list], *, split: str = "train", files: int = 1) -> Path:
    """Parquet files in the Hub's layout with a tone for each text, its bytes embedded; `columns` need a `text`."""
    import datasets

    texts = columns["text"]
    names = [f"{split}-{i}.wav" for i in range(len(texts))]
    clips = [write_clip(folder / "clips" / name, seconds=0.3 + 0.1 * (i % 5), pitch=200 + 50 * i) for i, name in enumerate(names)]
    sound = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    rows = datasets.Dataset.from_dict(
        {"audio": [{"bytes": clip.read_bytes(), "path": clip.name} for clip in clips], **columns},
    )
    rows = rows.cast_column("audio", sound).cast_column("audio", datasets.Audio(sampling_rate=16_000))
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for number in range(files):
        part = rows.shard(files, number, contiguous=True)
        part.to_parquet(folder / "data" / f"{split}-{number:05d}-of-{files:05d}.parquet")
    return folder
