"""Build a decoder from its shape: our own, or one made of transformers' modules."""

from collections.abc import Callable

from torch import nn

from titan_sparse.models.config import DecoderConfig
from titan_sparse.models.decoder import MLP, Attends, Decoder
from titan_sparse.models.transformers_config import TransformersConfig


def build_decoder(
    config: DecoderConfig,
    attends: Attends | None = None,
    mlp: Callable[[DecoderConfig], nn.Module] = MLP,
) -> nn.Module:
    """Build a module with the interface of models.decoder.Decoder. Call it on the "meta" device.

    attends: None for a model that never runs. mlp: for our own decoder only.
    Raises ValueError if transformers is missing, or if it builds a model that differs from
    `config`.
    """
    attends = attends or Attends(None, None)
    if not isinstance(config, TransformersConfig):
        return Decoder(config, attends.full, mlp)
    try:
        # Imported only when needed: it is optional, and loads slowly.
        from titan_sparse.models.transformers_decoder import TransformersDecoder
    except ImportError as error:
        raise ValueError(
            f"model.initial_hf = {config.folder} is a {config.model_type}, which runs through "
            f'transformers, and that cannot be imported ({error}); pip install "transformers>=5.17"'
        ) from error
    return TransformersDecoder(config, attends)
