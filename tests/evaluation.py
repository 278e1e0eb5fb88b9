"""What the tests of evaluation share: a scorer of a tiny model, and the same model plain."""

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from tests.runs import TINY
from titan_sparse.config import Config
from titan_sparse.data.documents import Documents
from titan_sparse.evaluation.scorer import Scorer
from titan_sparse.models.decoder import Decoder
from titan_sparse.trainer import Trainer


def scorer_of(config: Config) -> tuple[Scorer, Documents]:
    """Of a run's model as it starts, and its documents."""
    trainer = Trainer(config)
    return trainer.scorer, trainer.loader.mixture.streams[0].documents


def plain_logits(model: Decoder, tokens: np.ndarray) -> torch.Tensor:
    """[S, V] of the tiny model's weights in a decoder that is not sharded, with causal attention by torch."""
    ids = torch.from_numpy(tokens)[None]
    rows = torch.arange(ids.shape[1])
    mask = rows[:, None] >= rows
    weights = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in model.state_dict().items()}
    plain = Decoder(TINY, lambda q, k, v, _: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)).double()
    plain.load_state_dict(weights)
    with torch.no_grad():
        return plain(ids, rows[None], None)[0]
