"""The configuration to evaluate with."""

from titan_sparse.config import check
from titan_sparse.evaluation.settings import load_for_evaluation


def test_what_only_training_has_is_reset(tmp_path):
    """A file of costs may be gone, and one rank has nothing to balance: it must not be refused."""
    (tmp_path / "c.toml").write_text(
        '[attention]\nlayout = "balanced"\nbalance_costs = "gone.json"\ngradient_dtype = "bfloat16"\n'
        "[parallelism]\ncp = 2\n"
    )
    config = load_for_evaluation(["--config", str(tmp_path / "c.toml")], hf=None, dense=False)
    assert config.attention.balance_costs == ""
    check(config, 1, 1)
