"""Sparse attention in one call, forward and backward, next to dense attention.

    python examples/attention.py

It runs on a GPU if there is one, and else on the CPU.
"""

import torch

from titan_sparse import attend, recording
from titan_sparse.attention.masks import Documents
from titan_sparse.attention.patterns import Dense, VerticalSlash


def main() -> tuple[float, float]:
    """Density and recall, means over heads."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    # [B, heads, S, D]. Two query heads share a key head.
    q = 1 + torch.randn(1, 4, 2048, 64, device=device)
    k, v = torch.randn(2, 1, 2, 2048, 64, device=device)
    k[:, :, ::50] += 1  # Every 50th key attracts all queries, as some keys do in real models.
    for tensor in (q, k, v):
        tensor.requires_grad_()
    mask = Documents([1500, 500])  # The last 48 tokens are padding.
    pattern = VerticalSlash(recall=0.9, dense_below=256)

    with recording(recall_rows=64) as seen:
        out = attend(q, k, v, mask, pattern)
    out.sum().backward()
    dense = attend(q, k, v, mask, Dense())
    density, recall = seen.density().mean().item(), seen.recall[0].mean().item()
    error = (out - dense).abs().mean() / dense.abs().mean()
    print(f"density {density:.1%}, recall {recall:.1%}, mean error {error:.1%} of dense attention")
    return density, recall


if __name__ == "__main__":
    main()
