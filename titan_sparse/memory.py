"""Expected memory of a training step on one device, from shapes alone: the banner's estimate."""

import torch

from titan_sparse.models.flavours import DecoderConfig, number_of_parameters


def expected_memory(config: DecoderConfig, *, shards: int, optimizer_states: int, batch: int, local_tokens: int,
                    dtype: torch.dtype, checkpoint_mode: str, loss_chunk_tokens: int,
                    attention_recompute: float = 0.0) -> dict[str, float]:
    """GiB per device by part; a first estimate, not a bound.

    shards: ranks that parameters are sharded over. optimizer_states: fp32 tensors per parameter (AdamW 2).
    local_tokens: of one sequence on this rank. attention_recompute: share whose attention results are not kept.
    """
    width, tokens = dtype.itemsize, batch * local_tokens
    master = max(width, 4)
    parameters = number_of_parameters(config)
    embedding = config.vocab_size * config.hidden_size * (1 if config.tied_embeddings else 2)
    block = (parameters - embedding) / config.layers
    attention = tokens * config.head_dim * (2 * config.heads + 2 * config.kv_heads) * width
    inside = tokens * (4 * config.hidden_size + 3 * config.intermediate_size) * width + attention
    kept_heads = (1 - attention_recompute) * config.heads
    kept = {"none": inside, "full": tokens * (config.hidden_size + kept_heads * config.head_dim) * width}
    kept["selective"] = (kept["none"] + kept["full"]) / 2
    sizes = {
        "weights, gradients, optimizer": parameters * master * (2 + optimizer_states) / shards,
        "gathered weights": (embedding + 2 * block) * width + embedding * master,
        "activations": config.layers * kept[checkpoint_mode] + 2 * inside,
        "logits": min(tokens, loss_chunk_tokens) * config.vocab_size * master,
    }
    return {part: size / 2**30 for part, size in sizes.items()}
