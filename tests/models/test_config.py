"""titan_sparse.models.config: the shape of a decoder and its number of parameters."""

from dataclasses import replace

import pytest
import torch

from tests.models.helpers import TINY, dense_attend, variants
from titan_sparse.models.config import DecoderConfig, number_of_parameters
from titan_sparse.models.decoder import Decoder
from titan_sparse.models.flavours import FLAVOURS

TOTALS = {  # published, but for debug
    "debug": 829_568,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "llama3.1-8b": 8_030_261_248,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
}


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_parameter_counts(flavour: str) -> None:
    config = FLAVOURS[flavour]
    with torch.device("meta"):
        model = Decoder(config, dense_attend)
    assert sum(p.numel() for p in model.parameters()) == number_of_parameters(config)
    assert number_of_parameters(config) == TOTALS[flavour]


@variants
def test_parameter_counts_of_other_shapes(config: DecoderConfig) -> None:
    assert sum(
        p.numel() for p in Decoder(config, dense_attend).parameters()
    ) == number_of_parameters(config)


@pytest.mark.parametrize(
    "change, message", [({"kv_heads": 2}, "multiple of kv_heads"), ({"head_dim": 7}, "even")]
)
def test_impossible_shapes_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)
