"""titan-sparse options."""

from titan_sparse.commands import options


def test_options_and_refused_combinations_are_printed(capsys):
    """Of the configuration that the other words say."""
    assert options.main(["--parallelism.cp", "1", "--parallelism.cp_intra", "0"]) == 0
    printed = capsys.readouterr().out
    assert "--attention.pattern dense|vertical_slash|xattention|moba" in printed
    assert '* attention.backend = "cudnn" does not go with attention.pattern' in printed
    assert 'attention.schedule = "double_ring" does not go with parallelism.cp = 1' in printed
    assert options.main(["--attention.blocks", "100"]) == 2
    assert "attention.blocks" in capsys.readouterr().err
