"""The banner says what a run is about to do."""

from types import SimpleNamespace

import torch

from titan_sparse.attention import ContextParallel
from titan_sparse.banner import banner
from titan_sparse.config import Config
from titan_sparse.config.reading import load
from titan_sparse.models.flavours import FLAVOURS
from titan_sparse.models.lora_config import resolve_adapters
from titan_sparse.training.distributed import Meshes


def _lines(config: Config, recomputed: float = 0.0) -> dict[str, str]:
    model = FLAVOURS["debug"]
    parts = SimpleNamespace(
        config=config,
        model_config=model,
        adapters=resolve_adapters(model, **vars(config.lora)),
        meshes=Meshes(fsdp=None, cp=None, dp_size=4, dp_rank=0),
        cp=ContextParallel(None, layout="striped", schedule="local", block_size=64),
        kernel="eager: plain PyTorch; asked for",
        device=torch.device("cpu"),
        recomputed=recomputed,
    )
    lines = {}
    for line in banner(parts, 4096, {"weights": 1.25, "loss": 0.001}).splitlines():
        name, _, text = line.strip().partition("  ")
        lines[name] = text
    return lines


def test_what_is_trained():
    config = Config()
    config.model.flavour = "debug"
    config.lora.rank = 8
    config.lora.targets = "q_proj,v_proj"
    # Four layers of 128 columns: q of 128, v of 64.
    trained = 4 * 8 * (128 + 128 + 128 + 64) / 1e6
    assert _lines(config)["model"] == (
        f"debug, 0.8 M parameters, bfloat16, frozen, and {trained:.1f} M that are trained: adapters "
        "of rank 8 of q_proj, v_proj"
    )


def test_every_line():
    words = """
        --model.flavour=debug --data.source=python --data.tokenizer=bytes --training.seq_len=4000
        --training.local_batch_size=2 --training.gradient_accumulation_steps=3
        --training.output_dir=outputs/run --parallelism.dp_replicate=2 --attention.mask=causal
        --attention.pattern=dense --attention.sliding_window=512 --attention.window_sinks=4
    """
    config, _ = load(words.split())
    lines = _lines(config, recomputed=0.25)
    model = lines.pop("model")
    assert model.startswith("debug, 0.8 M parameters")
    assert model.endswith("bfloat16, float32 weights and optimizer")
    assert lines == {
        "mesh": "2 dp_replicate x 2 dp_shard x 1 cp_inter x 1 cp_intra on cpu",
        "data": "python, tokenizer bytes, 24 sequences a step of 4,000 tokens "
        "(padded to 4,096, 4,096 a rank)",
        "attention": "causal, window 512 and 4 sinks mask, dense, blocks of 64",
        "layout": "striped, schedule local",
        "kernel": "eager: plain PyTorch; asked for",
        "blocks": "activation checkpointing full (attention of the first 25 % too), not compiled",
        "memory": "expect a peak of 1.25 GiB a device: weights 1.25",
        "timeouts": "collectives fail after 1,800 s in the first step and in saves, else after 300 s",
        "output": "outputs/run",
    }
