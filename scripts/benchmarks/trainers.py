"""The whole training step beside torchtitan's and transformers' trainers, each
row in a new process.

    python -m scripts.benchmarks.trainers --shapes 0.6b 1.7b 8b-lora --out trainers.json
    python -m scripts.benchmarks.trainers --gpus 1 2 --tokens 4096 8192 --arms "ours, dense" torchtitan
    python -m scripts.benchmarks.trainers --shapes toy toy-lora --tokens 512 --device cpu

All read the same random weights and documents, one a step. They compute in bf16, keep weights and
AdamW's states in fp32, and recompute blocks. --tokens are those of each GPU: several GPUs share one
longer document by context parallelism. With -lora, weights are frozen in bf16 and have adapters of
rank 16. 0.8b-hybrid is Qwen3.5, which needs titan-sparse[hybrid] on GPUs. Ours and torchtitan's
compile, and replay each step as a CUDA graph unless the arm says otherwise. transformers' has
Liger's kernels where these are installed. Random weights attend to nearly everything, so that caps
hold vertical_slash, at a density of 16 to 23 %.
"""

import argparse
import itertools
import os
import socket
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

from scripts.benchmarks import harness
from scripts.benchmarks.huggingface import SHAPES, StepTimes, peak_bytes
from titan_sparse.commands import parser_of, positive
from titan_sparse.commands.train import set_allocator
from titan_sparse.config import load_and_check
from titan_sparse.models.flavours import FLAVOURS
from titan_sparse.models.huggingface_config import config_json
from titan_sparse.training.faults.process_groups import choose_device, init_distributed
from titan_sparse.training.metrics_output import read_metrics
from titan_sparse.training.run_folder import version_of
from titan_sparse.training.trainer import Trainer

HYBRID = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "vocab_size": 248320,
    "tie_word_embeddings": True,
}
TOY_SIZES = {"hidden_size": 256, "num_hidden_layers": 8, "vocab_size": 2048}
TOY = SHAPES["0.6b"] | TOY_SIZES
CONFIGS = {
    "0.6b": transformers.Qwen3Config(**SHAPES["0.6b"]),
    "1.7b": transformers.Qwen3Config(**SHAPES["1.7b"]),
    "qwen2.5-0.5b": transformers.Qwen2Config(**config_json(FLAVOURS["qwen2.5-0.5b"], "float32")),
    "qwen2.5-1.5b": transformers.Qwen2Config(**config_json(FLAVOURS["qwen2.5-1.5b"], "float32")),
    "8b-lora": transformers.LlamaConfig(**config_json(FLAVOURS["llama3.1-8b"], "bfloat16")),
    "0.8b-hybrid": transformers.Qwen3_5TextConfig(**HYBRID),
    "toy": transformers.Qwen3Config(**TOY),
    "toy-lora": transformers.LlamaConfig(**TOY),
    "toy-hybrid": transformers.Qwen3_5TextConfig(**HYBRID | TOY_SIZES),
}
OURS = """--data.tokenizer bytes --data.sequences fixed --data.shuffle false --attention.mask causal
--compile.enable true --attention.vertical_slash.recall 0.95 --optimizer.lr 1e-5
--lr_scheduler.warmup_steps 0 --lr_scheduler.min_lr_factor 1 --metrics.tensorboard false"""
FLAVORS = {"0.6b": "0.6B", "1.7b": "1.7B", "toy": "debugmodel"}
TRANSFORMERS = """--per_device_train_batch_size 1 --train_sampling_strategy sequential
--gradient_checkpointing true --optim adamw_torch_fused --learning_rate 1e-5 --adam_beta2 0.95
--weight_decay 0.1 --lr_scheduler_type constant --logging_steps 1 --save_strategy no
--report_to none --disable_tqdm true"""


def main(words: list[str]) -> int:
    set_allocator()
    return harness.measure([parse(words)], {"trainers": rows})


def parse(words: list[str]) -> argparse.Namespace:
    parser = parser_of(__doc__, "scripts.benchmarks.trainers")
    add = parser.add_argument
    add("--shapes", nargs="+", choices=list(CONFIGS), default=["0.6b", "1.7b"])
    add("--gpus", nargs="+", type=positive, default=[1], help="that share a document")
    add("--tokens", nargs="+", type=positive, default=[8192, 32768, 131072], help="of each GPU")
    add("--arms", nargs="+", choices=list(ARMS), default=list(ARMS)[:4])
    add("--steps", type=positive, default=10, help="the later half is timed")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--seconds", type=positive, default=180, help="until a row is given up")
    add("--out", default="", help="JSON file, written anew after each row")
    parser.set_defaults(cases=["trainers"], timeout=180)
    return parser.parse_args(words)


def rows(bench: harness.Bench) -> Iterator[dict]:
    args = bench.args
    with tempfile.TemporaryDirectory() as folder:
        for shape in args.shapes:
            model = Path(folder, shape)
            apart(bench, args, 1, write_model, shape, model, args)
            for gpus, tokens, arm in itertools.product(args.gpus, args.tokens, args.arms):
                row = {"shape": shape, "gpus": gpus, "tokens": tokens, "arm": arm}
                run = Path(tempfile.mkdtemp(dir=folder))
                write_texts(run, gpus * tokens, args.steps)
                words = (arm, shape, model, run, gpus * tokens, args)
                yield bench.attempt(row, apart, args, gpus, one_trainer, *words)


def apart(_: harness.Bench, args: argparse.Namespace, gpus: int, function: Callable, *words):
    """The result of function(*words) on rank 0 of new processes, which begin with empty GPUs."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks = [(rank, gpus, port, function, words) for rank in range(gpus)]
    # Leaving the pool ends processes that hang.
    with get_context("spawn").Pool(gpus) as pool:
        return pool.starmap_async(as_rank, ranks, chunksize=1).get(args.seconds)[0]


def as_rank(rank: int, gpus: int, port: int, function: Callable, words: tuple):
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(gpus), "LOCAL_WORLD_SIZE": str(gpus)}
    sys.stdout = sys.stderr
    try:
        return function(*words)
    finally:
        # A rank that leaves first would break a collective of the others.
        if sys.exc_info()[0] is None and dist.is_initialized():
            dist.barrier()


def write_model(shape: str, model: Path, args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    CONFIGS[shape].max_position_embeddings = max(args.gpus) * max(args.tokens)
    build = transformers.AutoModelForCausalLM.from_config
    with torch.device(args.device):
        build(CONFIGS[shape], dtype=torch.bfloat16).save_pretrained(model)


def one_trainer(
    arm: str, shape: str, model: Path, run: Path, tokens: int, args: argparse.Namespace
) -> dict[str, float | None]:
    """Trains for some steps. Times are medians over the later half, which has
    compiled and captured."""
    times = StepTimes(args.device)
    losses, found = ARMS[arm](shape, model, run, read_texts(run), args.device, times)
    # Ours logs the last step, and records what attention does in it.
    seconds = statistics.median(times.seconds[args.steps // 2 : -1] or times.seconds)
    found |= {"first_loss": losses[0], "last_loss": losses[-1], "step_ms": 1e3 * seconds}
    return found | {"tokens_per_second": tokens / seconds, "peak_bytes": peak_bytes(args.device)}


def write_texts(folder: Path, tokens: int, steps: int) -> None:
    """A document for each step, of Python's own files, which are read again after the last."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources).decode("ascii", "ignore")
    text *= 1 + tokens * steps // len(text)
    for step in range(steps):
        # Our loader adds a token at the end of a text.
        (folder / f"{step:03}.txt").write_text(text[step * tokens : (step + 1) * tokens - 1])


def read_texts(folder: Path) -> list[torch.Tensor]:
    """The tokens that our loader makes of the documents: bytes, and 256 for the end of a text."""
    return [torch.tensor([*path.read_bytes(), 256]) for path in sorted(folder.glob("*.txt"))]


def clocked(step, times: StepTimes):
    def call(*arguments):
        times.on_step_begin(None, None, None)
        step_result = step(*arguments)
        times.on_step_end(None, None, None)
        return step_result

    return call


def ours(shape, model, run, texts, device, times, pattern="dense", cuda_graphs="auto"):
    tokens, gpus = len(texts[0]), int(os.environ["WORLD_SIZE"])
    slashes, verticals = max(2, round(0.11 * tokens / 128)), max(32, tokens // 200)
    words = f"""{OURS} --model.initial_hf {model} --data.source {run} --training.device {device}
    --training.dtype {"bfloat16" if device == "cuda" else "float32"} --attention.pattern {pattern}
    --training.steps {len(texts)} --training.seq_len {tokens} --metrics.log_every {len(texts)}
    --attention.vertical_slash.max_slashes {slashes}
    --attention.vertical_slash.max_verticals {verticals}
    --parallelism.cp {gpus} --compile.cuda_graphs {cuda_graphs}
    --training.output_dir {run / "run"} --lora.rank {16 * shape.endswith("lora")}"""
    trainer = Trainer(load_and_check(words.split(), gpus, gpus)[0])
    trainer.step = clocked(trainer.step, times)
    trainer.train()
    # Recording takes time, so that only the first step and the last are logged.
    first, last = read_metrics(run / "run").values()
    return [first["loss"], last["loss"]], {key: first[key] for key in ("density", "recall")}


def use_cpu() -> None:
    """torchtitan takes CUDA for granted."""
    for module in [*sys.modules.values()]:
        if module.__name__.startswith("torchtitan") and hasattr(module, "device_type"):
            module.device_type, module.device_module = "cpu", torch.cpu
    torch.cpu.current_device = lambda: 0


def log_of_losses() -> MagicMock:
    """In place of torchtitan's metrics: its log() has been called with each loss."""
    metrics = MagicMock()
    monitor = metrics.device_memory_monitor
    monitor.device_name = "H100"
    memory = monitor.get_peak_stats()
    memory.max_reserved_gib = memory.max_reserved_pct = 0.0
    return metrics


def torchtitan(shape, model, run, texts, device, times, cuda_graphs=True):
    trainer, metrics = torchtitan_trainer(shape, model, run, texts, device, cuda_graphs)
    trainer.train_step = clocked(trainer.train_step, times)
    trainer.train()
    return [call.args[1] for call in metrics.log.call_args_list], {}


def torchtitan_trainer(shape, model, run, texts, device, cuda_graphs):
    """The trainer of torchtitan 0.3, which reads our texts and weights."""
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models.qwen3 import config_registry, model_registry
    from torchtitan.trainer import Trainer as TorchtitanTrainer

    if shape not in FLAVORS:
        raise ValueError("torchtitan is compared on Qwen3's shapes without LoRA")
    config = config_registry.qwen3_0_6b()
    config.model_spec = model_registry(FLAVORS[shape])
    for layer in config.model_spec.model.layers:
        # Longer texts than the table of rotary angles are refused.
        layer.attention.rope.max_seq_len = len(texts[0])
    config.dump_folder = str(run / "run")
    config.training.local_batch_size, config.training.steps = 1, len(texts)
    config.training.seq_len = len(texts[0])
    config.training.disable_cuda_graphs = not cuda_graphs or device == "cpu"
    config.parallelism.context_parallel_degree = int(os.environ["WORLD_SIZE"])
    config.activation_checkpoint = FullAC.Config()
    config.compile.enable = device == "cuda"
    config.checkpoint.enable = config.checkpoint.load_only = True
    config.checkpoint.initial_load_in_hf = True
    config.checkpoint.initial_load_path = str(model)
    config.optimizer = default_adamw(lr=1e-5)
    config.lr_scheduler.warmup_steps, config.lr_scheduler.min_lr_factor = 0, 1.0
    if device == "cpu":
        config.training.mixed_precision_param = "float32"
        config.optimizer.implementation = "foreach"
        use_cpu()
    metrics = log_of_losses()
    init_distributed(choose_device(device), 600)
    batches = []
    for text in texts:
        inputs = {"input": text, "positions": torch.arange(len(text))}
        batches.append((inputs, torch.tensor([*text[1:], -100])))
    loader = ParallelAwareDataloader(batches, 0, 1, batch_size=1)
    with (
        patch.object(type(config.dataloader), "build", lambda *_, **__: loader),
        patch.object(type(config.metrics), "build", lambda *_, **__: metrics),
        patch.object(type(config.tokenizer), "build", lambda *_, **__: None),
    ):
        return TorchtitanTrainer(config), metrics


def huggingface(shape, model, run, texts, device, times):
    on_gpu = device == "cuda"
    if os.environ["WORLD_SIZE"] != "1":
        raise ValueError("transformers' trainer is compared on one GPU")
    has_lora = shape.endswith("lora")
    dtype = torch.bfloat16 if has_lora and on_gpu else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    if has_lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"))
    words = f"""{TRANSFORMERS} --output_dir {run} --max_steps {len(texts)} --bf16 {on_gpu}
    --use_cpu {not on_gpu} --use_liger_kernel {on_gpu and version_of("liger-kernel") is not None}"""
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    [settings] = parser.parse_args_into_dataclasses(words.split())
    dataset = [{"input_ids": text, "labels": text} for text in texts]
    trainer = transformers.Trainer(model, settings, train_dataset=dataset, callbacks=[times])
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(kernels, set_priority=True):
        trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line], {}


ARMS = {
    "ours, dense": ours,
    "ours, vertical_slash": partial(ours, pattern="vertical_slash"),
    "torchtitan": torchtitan,
    "transformers": huggingface,
    "ours, dense, no graphs": partial(ours, cuda_graphs="off"),
    "ours, vertical_slash, no graphs": partial(ours, pattern="vertical_slash", cuda_graphs="off"),
    "torchtitan, no graphs": partial(torchtitan, cuda_graphs=False),
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
