"""Build a decoder from its shape: our own, or one made of transformers' modules."""

from collections.abc import Callable

from torch import nn

from titan_sparse.models.config import DecoderConfig
from titan_sparse.models.decoder import MLP, Attends, Decoder


def build_decoder(
    config: DecoderConfig,
    attends: Attends | None = None,
    mlp: Callable[[DecoderConfig], nn.Module] = MLP,
) -> nn.Module:
    """Build a module with the interface of models.decoder.Decoder. Call it on the "meta" device.

    attends: None for a model that never runs. mlp: for our own decoder only.
    Raises ValueError if transformers builds layers that cannot be trained.
    """
    attends = attends or Attends(None, None)
    if not config.runs_in_transformers:
        model = Decoder(config, attends.full, mlp)
        for layer in attends.dense_layers:
            model.layers[str(layer)].self_attn.attend = attends.window
        return model
    # Imported only when needed, because transformers loads slowly.
    from titan_sparse.models.transformers_decoder import TransformersDecoder

    return TransformersDecoder(config, attends)
