"""One sequence spread over several processes, without a trainer.

    torchrun --nproc-per-node 2 examples/context_parallel.py

It runs with gloo on CPUs, and with NCCL where every process has a GPU. Each process holds its
blocks of the sequence, and the gradients of the weights are summed over all processes.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from titan_sparse import ContextParallel, attend
from titan_sparse.attention.masks import Causal
from titan_sparse.attention.patterns import VerticalSlash

TOKENS, HEADS, HEAD_DIM, BLOCK_SIZE = 1024, 4, 32, 64


def main(steps: int = 5) -> list[float]:
    """The loss of each step."""
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
    cp = ContextParallel(mesh, layout="striped", schedule="auto", block_size=BLOCK_SIZE)

    torch.manual_seed(0)  # The same weights and the same sequence on every process.
    width = HEADS * HEAD_DIM
    embed = torch.nn.Embedding(256, width, device=device)
    torch.nn.init.normal_(embed.weight, std=0.05)
    project = torch.nn.Linear(width, 3 * width, device=device)
    weights = [*embed.parameters(), *project.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=1e-3)
    pattern = VerticalSlash(recall=0.9, dense_below=256)
    sequence = torch.randint(0, 256, (1, TOKENS + 1), device=device)
    # This process's blocks of the inputs and of the labels.
    tokens = cp.shard(sequence[:, :-1], dim=1)
    labels = cp.shard(sequence[:, 1:], dim=1)

    losses = []
    for _ in range(steps):
        hidden = embed(tokens)
        # [1, S_local, 3, heads, D] -> three of [1, heads, S_local, D]
        q, k, v = project(hidden).unflatten(2, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        out = attend(q, k, v, Causal(), pattern, cp=cp)
        logits = (hidden + out.transpose(1, 2).flatten(2)) @ embed.weight.T
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / TOKENS
        loss.backward()
        for weight in weights:
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item())
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes, loss {losses[0]:.4f} to {losses[-1]:.4f}")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
