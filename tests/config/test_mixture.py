"""titan_sparse.config.mixture: data.source as parts and weights."""

import pytest

from titan_sparse.config import Config, ConfigError, Data, check
from titan_sparse.config.mixture import source_weights


@pytest.mark.parametrize(
    ("source", "weights"),
    [
        ("python", {"python": 1.0}),
        ("a:7, b/c.d : 3", {"a": 0.7, "b/c.d": 0.3}),
        ("a:1", {"a": 1.0}),
        ("odd, name", {"odd, name": 1.0}),
        ("c:/x:.25,d:.75", {"c:/x": 0.25, "d": 0.75}),
    ],
)
def test_weights_of_a_mixture(source, weights):
    assert source_weights(source) == pytest.approx(weights)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a:0.7, b", "to some parts only"),
        ("a:1, a:2", "a part twice"),
        ("a:1, b:0", "a weight of 0"),
    ],
)
def test_wrong_mixtures_are_refused_before_anything_is_opened(source, message):
    with pytest.raises(ConfigError, match=message):
        check(Config(data=Data(source=source)), 1, 1)
