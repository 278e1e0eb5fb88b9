"""titan-sparse options."""

from titan_sparse.commands import options
from titan_sparse.config import Config


def test_options_and_refused_combinations_are_printed(capsys):
    assert options.main([]) == 0
    printed = capsys.readouterr().out
    assert "--attention.pattern dense|vertical_slash|xattention|moba" in printed
    assert '* attention.backend = "cudnn" does not go with attention.pattern' in printed


def test_other_options_decide_what_is_refused(capsys):
    config = Config()
    config.training.device = "cuda"
    on_one_rank = "\n".join(options.refused_combinations(config))
    assert 'attention.schedule = "double_ring" does not go with parallelism.cp = 1' in on_one_rank
    assert options.main(["--attention.blocks", "100"]) == 2
    assert "attention.blocks" in capsys.readouterr().err
