"""Float8 linear layers, by torchao's emulation on the CPU: which layers, how near, trained under checkpointing."""

from dataclasses import replace

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn

from tests.models.helpers import causal, dense_attend
from tests.runs import TINY
from titan_sparse.config import Float8
from titan_sparse.models.decoder import Decoder
from titan_sparse.models.initialization import initialize
from titan_sparse.training.build_model import check_float8, checkpointed, convert_to_float8

CONFIG = replace(TINY, tied_embeddings=False)
TOKENS = torch.randint(0, 258, (1, 64), generator=torch.Generator().manual_seed(0))


def _model(section: Float8 | None) -> Decoder:
    with torch.device("meta"):
        model = Decoder(CONFIG, dense_attend).bfloat16()
    if section is not None:
        convert_to_float8(model, section, emulate=True)
    for name, block in model.layers.items():
        model.layers[name] = checkpointed(block, "full")
    model.to_empty(device="cpu")
    initialize(model, 0, CONFIG)
    return model


def _loss(model: nn.Module) -> Tensor:
    labels = TOKENS.roll(-1, 1)
    return model(TOKENS, torch.arange(64)[None], causal(64), labels) / 64


@pytest.mark.parametrize(
    "options, left_out, scales",
    [
        ({"recipe": "tensorwise"}, (), "tensorwise"),
        ({"recipe": "rowwise"}, (), "axiswise"),
        ({"filter": "o_proj, layers.0.mlp"}, ("o_proj", "layers.0.mlp"), None),
    ],
)
def test_the_blocks_linears_and_nothing_else(monkeypatch, options, left_out, scales):
    monkeypatch.setattr(torch._inductor.config, "emulate_precision_casts", False)
    with torch.device("meta"):
        model = Decoder(CONFIG, dense_attend)
    names = list(model.state_dict())
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    wanted = {name for name in linears if name.startswith("layers.")}
    wanted = {name for name in wanted if not any(part in name for part in left_out)}
    count = convert_to_float8(model, Float8(enable=True, **options), emulate=True)
    modules = model.named_modules()
    converted = {name for name, module in modules if type(module).__name__ == "Float8Linear"}
    assert converted == wanted and count == len(wanted) == (9 if left_out else 14)
    assert list(model.state_dict()) == names
    if scales:
        cast = model.layers["0"].mlp.up_proj.config.cast_config_input
        assert cast.scaling_granularity.value == scales
        assert torch._inductor.config.emulate_precision_casts == (scales == "axiswise")


def test_refusals():
    for name in ("attention", "layers"):
        with torch.device("meta"), pytest.raises(ValueError, match="float8.filter"):
            convert_to_float8(Decoder(CONFIG, dense_attend), Float8(filter=name), emulate=True)
    with pytest.raises(ValueError, match="float8.enable = true needs a Hopper GPU"):
        check_float8(torch.device("cpu"))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_gradients_are_near_and_training_goes_down(recipe):
    plain, float8 = _model(None), _model(Float8(enable=True, recipe=recipe))
    for model in (plain, float8):
        _loss(model).backward()
    for (name, a), b in zip(plain.named_parameters(), float8.parameters(), strict=True):
        error = (a.grad - b.grad).float().norm() / a.grad.float().norm()
        assert error < 0.3, (name, error)
        # Three bits of mantissa must be seen in what goes through a converted layer.
        assert error > 0.01 or "layers" not in name or a.grad.norm() == 0, (name, error)
    losses = {}
    for key, model in (("bfloat16", plain), ("float8", float8)):
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1
        )  # larger steps make any rounding grow
        for _ in range(15):
            optimizer.zero_grad()
            loss = _loss(model)
            loss.backward()
            optimizer.step()
        losses[key] = loss.item()
    assert losses["float8"] < 5.0 and losses["float8"] == pytest.approx(
        losses["bfloat16"], rel=0.01
    ), losses
