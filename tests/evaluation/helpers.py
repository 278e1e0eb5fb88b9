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
    return trainer.scorer, trainer.loader.streams[0].documents


def plain_decoder(model: Decoder) -> Decoder:
    """The tiny model's weights in a decoder that is not sharded, with causal attention by torch.

    Collective.
    """

    def attend(q, k, v, _):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    plain = Decoder(TINY, attend).double()
    plain.load_state_dict(
        {
            name: x.full_tensor() if isinstance(x, DTensor) else x
            for name, x in model.state_dict().items()
        }
    )
    return plain


@torch.no_grad()
def plain_logits(plain: Decoder, tokens: np.ndarray) -> torch.Tensor:
    """[S, V] of a plain_decoder(), float64."""
    positions = torch.arange(len(tokens))
    [logits] = plain(torch.from_numpy(tokens)[None], positions[None], None)
    return logits
