"""The LM head with its cross-entropy against well-kept peers: time, peak memory, errors, JSON out.

    python -m scripts.benchmarks.loss --tokens 131072 --hidden 896 --vocab 151936 \\
        --chunk-tokens 8192 --out loss_h200.json

Rows: ours; plain torch over full logits, where they fit; torch's own chunked loss (2.13 on); Liger
Kernel with its defaults and with d_weight summed in fp32;
cut-cross-entropy with and without its filter of small gradients. A peer that is not installed, or
does not run, is a row with `error`.

Each row is forward and backward of the mean over labels in bf16: median milliseconds, and peak
bytes above inputs (gradients included: they are `gradient_bytes`). TFLOP/s count three matmuls,
whatever is recomputed. Errors are relative (Frobenius), against float64 on the same bf16 inputs, on
fewer tokens and rows of the vocabulary.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.benchmarks.harness import Bench, Step, measure, timed, training_call
from titan_sparse.commands import parser_of, positive
from titan_sparse.loss import IGNORE_INDEX, count_valid, linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""loss(hidden [1, T, D], weight [V, D], labels [1, T]) -> scalar, summed over
the labels that count."""
Inputs = tuple[Tensor, Tensor, Tensor]
"""hidden [1, T, D], weight [V, D], labels [1, T]."""
CHECKED_TOKENS = 2048
CHECKED_VOCAB = 20003
LOGIT_DEVIATION = 3.0
"""Standard deviation of the drawn logits: a softmax as peaked as a trained model's."""


def main(words: list[str]) -> int:
    return measure([parse(words)], {"loss": rows})


def parse(words: list[str]) -> argparse.Namespace:
    parser = parser_of(__doc__, "scripts.benchmarks.loss")
    sizes = {"tokens": 131072, "hidden": 896, "vocab": 151936, "chunk-tokens": 8192, "repeats": 5}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--out", default="", help="JSON file, written anew after each row")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.set_defaults(device=device, cases=["loss"], warm_ups=2, timeout=180)
    return parser.parse_args(words)


def rows(bench: Bench) -> Iterator[dict]:
    args = bench.args
    sizes = (min(args.tokens, CHECKED_TOKENS), args.hidden, min(args.vocab, CHECKED_VOCAB))
    small = draw(*sizes, args.device)
    inputs = draw(args.tokens, args.hidden, args.vocab, args.device)
    for name, loss in losses(args.chunk_tokens).items():
        yield bench.attempt({"name": name}, one_loss, loss, small, inputs)
        if bench.on_gpu:
            torch.cuda.empty_cache()


def one_loss(bench: Bench, loss: Loss, small: Inputs, inputs: Inputs) -> dict:
    """Time, memory and errors. small: the inputs that errors are taken on."""
    found: dict = {"errors": errors(loss, small)}
    hidden, weight, labels = inputs
    valid = count_valid(labels)

    def mean_loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return loss(hidden, weight, labels) / valid

    steps = training_call(mean_loss, [hidden, weight, None])
    spent = timed(bench, steps)
    ms = spent["forward_ms"] + spent["backward_ms"]
    found["ms"] = round(ms, 3)
    found["peak_bytes"] = peak_bytes(steps) if bench.on_gpu else None
    flops = 6 * hidden.numel() * len(weight)
    found["tflops"] = round(flops / ms / 1e9, 1)
    found["gradient_bytes"] = hidden.nbytes + weight.nbytes
    return found


def peak_bytes(steps: list[Step]) -> int:
    """Most bytes that the GPU holds above what it holds now."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for step in steps:
        step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def full_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Plain torch, logits upcast to fp32 as Hugging Face's models do."""
    logits = F.linear(hidden, weight).flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def torch_chunked(chunk_tokens: int, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """torch.nn.functional.linear_cross_entropy, in chunks of our size."""
    options = torch.nn.LinearCrossEntropyOptions(
        batch_chunk_size=chunk_tokens, acc_dtype=torch.float32
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
    accum_dtype: torch.dtype | None, hidden: Tensor, weight: Tensor, labels: Tensor
) -> Tensor:
    """Liger Kernel's fused linear cross-entropy."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(
        hidden.flatten(0, 1),
        weight,
        labels.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
        accum_dtype=accum_dtype,
    )


def cut(filter_eps: str | None, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Apple's cut-cross-entropy.

    filter_eps: None is exact; "auto", its default, skips small gradients.
    """
    from cut_cross_entropy import linear_cross_entropy as cut_cross_entropy

    return cut_cross_entropy(
        hidden, weight, labels, ignore_index=IGNORE_INDEX, reduction="sum", filter_eps=filter_eps
    )


def losses(chunk_tokens: int) -> dict[str, Loss]:
    return {
        "ours": functools.partial(linear_cross_entropy, chunk_tokens=chunk_tokens),
        "torch, full logits": full_logits,
        "torch, chunked": functools.partial(torch_chunked, chunk_tokens),
        "liger": functools.partial(liger, None),
        "liger, fp32 d_weight": functools.partial(liger, torch.float32),
        "cut-cross-entropy, exact": functools.partial(cut, None),
        "cut-cross-entropy": functools.partial(cut, "auto"),
    }


def draw(tokens: int, hidden: int, vocab: int, device: str) -> Inputs:
    """hidden [1, T, D] and weight [V, D] in bf16, labels [1, T] of which an eighth is ignored."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(1, tokens, hidden, generator=generator, device=device).bfloat16()
    weight = torch.randn(vocab, hidden, generator=generator, device=device)
    weight = (weight * LOGIT_DEVIATION * hidden**-0.5).bfloat16()
    labels = torch.randint(vocab, (1, tokens), generator=generator, device=device)
    ignored = torch.rand(1, tokens, generator=generator, device=device) < 0.125
    labels[ignored] = IGNORE_INDEX
    return x.requires_grad_(), weight.requires_grad_(), labels


def errors(loss: Loss, inputs: Inputs) -> dict[str, float]:
    """Relative errors of loss, d_hidden and d_weight against float64 with full logits."""
    hidden, weight, labels = inputs
    in_double = (
        hidden.detach().double().requires_grad_(),
        weight.detach().double().requires_grad_(),
        labels,
    )
    computed = loss_and_gradients(loss, inputs)
    exact = loss_and_gradients(full_logits, in_double)
    found = {}
    for name, value, reference in zip(("loss", "d_hidden", "d_weight"), computed, exact):
        found[name] = ((value.double() - reference).norm() / reference.norm()).item()
    return found


def loss_and_gradients(loss: Loss, inputs: Inputs) -> list[Tensor]:
    hidden, weight, labels = inputs
    value = loss(hidden, weight, labels)
    return [value.detach(), *torch.autograd.grad(value, (hidden, weight))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
