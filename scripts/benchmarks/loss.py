"""The LM head with its cross-entropy against well-kept peers: time, peak memory and errors, JSON out.

    python -m scripts.benchmarks.loss --tokens 131072 --hidden 896 --vocab 151936 --chunk-tokens 8192 --out loss_h200.json

Rows: ours; plain torch over full logits, where they fit; torch's own chunked loss (2.13 on); Liger Kernel with its
defaults and with d_weight summed in fp32, at its own chunk size and at ours; cut-cross-entropy with and without its
filter of small gradients. A peer that is not installed, or does not run, is a row that says so.

Each row is forward and backward of the mean over labels in bf16: median milliseconds, and peak bytes above inputs
(gradients included: they are `gradient_bytes`). TFLOP/s count three matmuls, whatever is recomputed. Errors are
relative (Frobenius), against float64 on the same bf16 inputs, on fewer tokens and rows of the vocabulary.
"""

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.benchmarks.attention import longest_kernels, times, versions
from titan_sparse.loss import IGNORE_INDEX, count_valid, linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""loss(hidden [1, T, D], weight [V, D], labels [1, T]) -> scalar, summed over the labels that count."""
PACKAGES = {"liger": "liger_kernel", "cut-cross-entropy": "cut_cross_entropy"}
CHECKED_TOKENS, CHECKED_VOCAB = 2048, 20003
LOGIT_DEVIATION = 3.0
"""Standard deviation of the drawn logits: a softmax as peaked as a trained model's."""


# What is compared ---------------------------------------------------------------------------------------------------


def full_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Plain torch, logits upcast to fp32 as Hugging Face's models do."""
    logits = F.linear(hidden, weight).flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def torch_chunked(chunk_tokens: int, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """torch.nn.functional.linear_cross_entropy, in chunks of our size."""
    options = torch.nn.LinearCrossEntropyOptions(
        batch_chunk_size=chunk_tokens, acc_policy="balanced", acc_dtype=torch.float32
    )
    return F.linear_cross_entropy(
        hidden.flatten(0, 1),
        weight,
        labels.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
        options=options,
    )


def liger(
    accum_dtype: torch.dtype | None,
    chunk_tokens: int | None,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
) -> Tensor:
    """Liger Kernel's fused linear cross-entropy; chunk_tokens None: as it chooses."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    sizes = {}
    if chunk_tokens is not None:  # its chunks: tokens * hidden * chunk_mem_const / vocabulary
        sizes["chunk_mem_const"] = max(
            1, -(-len(weight) * chunk_tokens // hidden[..., 0].numel() // hidden.shape[-1])
        )
    return liger_fused_linear_cross_entropy(
        hidden.flatten(0, 1),
        weight,
        labels.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
        accum_dtype=accum_dtype,
        **sizes,
    )


def cut(filter_eps: str | None, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Apple's cut-cross-entropy; filter_eps None: exact, "auto": small gradients are skipped, its default."""
    from cut_cross_entropy import linear_cross_entropy as cut_cross_entropy

    return cut_cross_entropy(
        hidden, weight, labels, ignore_index=IGNORE_INDEX, reduction="sum", filter_eps=filter_eps
    )


def peers() -> dict[str, str | None]:
    """Versions of the peers' packages; null for what is not installed."""
    there = {name: importlib.util.find_spec(name) is not None for name in PACKAGES.values()}
    return {
        name: importlib.metadata.version(name.replace("_", "-")) if is_there else None
        for name, is_there in there.items()
    }


def losses(chunk_tokens: int) -> dict[str, Loss | str]:
    """Name -> the loss, or why it is not compared here."""
    cases: dict[str, Loss | str] = {
        "ours": functools.partial(linear_cross_entropy, chunk_tokens=chunk_tokens),
        "torch, full logits": full_logits,
        "torch, chunked": functools.partial(torch_chunked, chunk_tokens),
        "liger": functools.partial(liger, None, None),
        "liger, fp32 d_weight": functools.partial(liger, torch.float32, None),
        "liger, fp32 d_weight, our chunks": functools.partial(liger, torch.float32, chunk_tokens),
        "cut-cross-entropy, exact": functools.partial(cut, None),
        "cut-cross-entropy": functools.partial(cut, "auto"),
    }
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        cases["torch, chunked"] = f"not in torch {torch.__version__}"
    for name in cases:
        package = PACKAGES.get(name.split(",")[0])
        if package and importlib.util.find_spec(package) is None:
            cases[name] = "not installed"
        elif package and not torch.cuda.is_available():
            cases[name] = "needs a GPU"
    return cases


# Measuring ----------------------------------------------------------------------------------------------------------


def draw(tokens: int, hidden: int, vocab: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [1, T, D] and weight [V, D] in bf16, labels [1, T] of which an eighth is ignored."""
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(1, tokens, hidden, generator=g, device=device).bfloat16()
    weight = (
        torch.randn(vocab, hidden, generator=g, device=device) * LOGIT_DEVIATION * hidden**-0.5
    ).bfloat16()
    labels = torch.randint(vocab, (1, tokens), generator=g, device=device)
    labels[torch.rand(1, tokens, generator=g, device=device) < 0.125] = IGNORE_INDEX
    return x.requires_grad_(), weight.requires_grad_(), labels


def steps_of(loss: Loss, inputs: tuple[Tensor, Tensor, Tensor]) -> list[Callable[[], None]]:
    """The two steps of one call, as they are timed: forward, and backward of the mean over labels."""
    kept, valid = {}, count_valid(inputs[2])

    def forward() -> None:
        kept["loss"] = loss(*inputs) / valid

    def backward() -> None:
        torch.autograd.grad(kept.pop("loss"), inputs[:2])

    return [forward, backward]


def milliseconds(steps: list[Callable[[], None]], repeats: int, device: str) -> float:
    """Median time of all steps together."""
    if device == "cuda":
        return sum(times(steps, repeats, lead=True))
    spent = []
    for _ in range(repeats):
        began = time.perf_counter()
        for step in steps:
            step()
        spent.append((time.perf_counter() - began) * 1e3)
    return statistics.median(spent)


def peak_bytes(steps: list[Callable[[], None]]) -> int | None:
    """Most memory allocated above what is held now; None on a CPU, where torch does not count it."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for step in steps:
        step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(loss: Loss, inputs: tuple[Tensor, Tensor, Tensor], args: argparse.Namespace) -> dict:
    """Time and memory, after two calls to warm up; "status" alone if the memory of the GPU is not enough."""
    steps = steps_of(loss, inputs)
    try:
        for step in steps * 2:
            step()
        found = {
            "peak_bytes": peak_bytes(steps),
            "ms": round(milliseconds(steps, args.repeats, args.device), 3),
        }
    except torch.cuda.OutOfMemoryError:
        return {"status": "out of memory"}
    flops = 6 * args.tokens * args.hidden * args.vocab
    found["tflops"] = round(flops / found["ms"] / 1e9, 1)
    found["gradient_bytes"] = sum(x.nbytes for x in inputs[:2])
    if args.profile and args.device == "cuda":
        found["kernels"] = longest_kernels(steps)
    return found


def errors(loss: Loss, inputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, float]:
    """Relative errors of loss, d_hidden and d_weight against float64 with full logits."""
    results = []
    for compute, (*leaves, labels) in ((loss, inputs), (full_logits, _doubled(inputs))):
        value = compute(*leaves, labels)
        results.append((value.detach(), *torch.autograd.grad(value, leaves)))
    names = ("loss", "d_hidden", "d_weight")
    return {
        name: ((a.double() - b).norm() / b.norm()).item() for name, a, b in zip(names, *results)
    }


def _doubled(inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, labels = inputs
    return (
        hidden.detach().double().requires_grad_(),
        weight.detach().double().requires_grad_(),
        labels,
    )


def row(name: str, loss: Loss | str, small: tuple, inputs: tuple, args: argparse.Namespace) -> dict:
    """What is written of one loss. A peer that does not run on this machine is told, not fatal; ours is."""
    if isinstance(loss, str):
        return {"name": name, "status": loss}
    try:
        return {"name": name, "status": "ran", "errors": errors(loss, small)} | measure(
            loss, inputs, args
        )
    except Exception as error:
        if name == "ours":
            raise
        return {
            "name": name,
            "status": f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
        }
    finally:
        if args.device == "cuda":
            torch.cuda.empty_cache()


def errors_by_chunks(small: tuple[Tensor, Tensor, Tensor]) -> dict[int, dict[str, float]]:
    """Our errors for 1, 8 and 64 chunks: they must not grow."""
    tokens = small[0].shape[1]
    return {
        number: errors(
            functools.partial(linear_cross_entropy, chunk_tokens=-(-tokens // number)), small
        )
        for number in (1, 8, 64)
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; ends the program with status 2 for sizes below 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"tokens": 131072, "hidden": 896, "vocab": 151936, "chunk-tokens": 8192, "repeats": 5}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--profile", action="store_true", help="also list the longest CUDA kernels of each row"
    )
    parser.add_argument("--out", default="", help="JSON file, written anew after each row")
    args = parser.parse_args(arguments)
    for name in sizes:
        if getattr(args, name.replace("-", "_")) < 1:
            parser.error(f"--{name} is 1 or more")
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


def main(arguments: list[str]) -> None:
    args = parse(arguments)
    small = draw(
        min(args.tokens, CHECKED_TOKENS), args.hidden, min(args.vocab, CHECKED_VOCAB), args.device
    )
    inputs = draw(args.tokens, args.hidden, args.vocab, args.device)
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    result = {
        "command": " ".join(sys.argv),
        "device": device,
        "versions": versions() | peers(),
        "options": vars(args),
        "errors_by_chunks": errors_by_chunks(small),
        "rows": [],
    }
    print(json.dumps({"errors_by_chunks": result["errors_by_chunks"]}), flush=True)
    for name, loss in losses(args.chunk_tokens).items():
        result["rows"].append(row(name, loss, small, inputs, args))
        print(json.dumps(result["rows"][-1]), flush=True)
        if args.out:
            with open(args.out, "w") as file:
                json.dump(result, file, indent=1)


if __name__ == "__main__":
    main(sys.argv[1:])
