"""[validation] in the loop: what it writes, and that training continues as without it."""

import contextlib
import json
import re
from operator import attrgetter
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scripts.compare_runs import differences
from tests.data.helpers import PLAIN
from tests.distributed import on_ranks
from tests.runs import tiny_config, train
from titan_sparse.config import Config, ConfigError, Data, check
from titan_sparse.config.reading import KINDS, load_config
from titan_sparse.data.documents import TokenizedTexts
from titan_sparse.data.tokenizer import ByteTokenizer
from titan_sparse.evaluation.position import first_windows, position_loss
from titan_sparse.options.values import plain
from titan_sparse.training import validation
from titan_sparse.training.load import load_for_evaluation
from titan_sparse.training.metrics_output import read_lines
from titan_sparse.training.trainer import Trainer

SETTINGS = {
    "training__steps": 2,
    "training__dtype": "float32",
    "optimizer__name": "AdamW",
    "optimizer__lr": 1e-2,
    "parallelism__cp": 2,
    "attention__block_size": 32,
}
VALIDATION = {
    "validation__enable": True,
    "validation__every": 1,
    "validation__windows": 3,
    "validation__position_buckets": 4,
    "validation__needle_lengths": "420",
    "validation__needle_depths": 2,
    "validation__needle_samples": 1,
    "validation__prompt": "a text to continue",
}


@on_ranks(2)
def test_training_is_the_same_with_and_without(texts):
    """Weights, losses, data position and random numbers stay equal to the bit. The last line is
    what the trained weights give, and TensorBoard has it."""
    plain = train(tiny_config(texts, "plain", **SETTINGS))
    before = torch.get_rng_state()
    settings = SETTINGS | VALIDATION | {"metrics__tensorboard": True}
    validated = train(tiny_config(texts, "validated", **settings))
    assert torch.equal(torch.get_rng_state(), before)
    dist.barrier()
    weights = validated.model.state_dict()
    for name, weight in plain.model.state_dict().items():
        assert torch.equal(weight.to_local(), weights[name].to_local()), name
    assert plain.loader.state_dict() == validated.loader.state_dict()
    for field in ("loss", "grad_norm", "tokens_seen"):
        steps = differences(texts / "plain", texts / "validated", field)
        assert all(step.absolute == 0 for step in steps)
    documents = plain.loader.streams[0].documents
    wanted = position_loss(plain.scorer, first_windows(documents, 0, 300, 300, 3), 300, 4)
    start, first, last = read_lines(texts / "validated/validation.jsonl")
    assert (start["step"], first["step"]) == (0, 1)
    # ln(258) = 5.55 for uniform bytes
    assert start["loss"] == pytest.approx(5.55, abs=0.1) and start["loss"] != first["loss"]
    assert last == {"step": 2, **wanted, "needle": last["needle"], "text": last["text"]}
    assert first["loss"] != last["loss"]
    assert len(last["needle"]["cells"]) == 2 and 0 < last["needle"]["loss"] < 10
    events = EventAccumulator(str(texts / "validated/tensorboard")).Reload()
    assert [event.step for event in events.Scalars("validation/loss")] == [0, 1, 2]
    assert events.Scalars("validation/loss")[2].value == pytest.approx(wanted["loss"])
    assert len(events.Images("validation_needle/score_by_depth")) == 3
    # The model writes the same as in a forward of its own, and what it has
    # learned changes the text.
    texts = [line["text"] for line in (start, first, last)]
    assert len(set(texts)) == 3 and all(texts)
    written = validated.validation._text(validated.scorer)
    assert written == texts[-1]
    assert len(events.Tensors("validation/text/text_summary")) == 3


def test_what_is_printed(texts, caplog):
    """The first line comes before the first step. A resumed run has none,
    and one may do without."""
    settings = {"validation__enable": True, "checkpoint__enable": True, "training__steps": 2}
    settings |= {"validation__position_buckets": 3, "validation__windows": 2}
    with caplog.at_level("INFO", "titan_sparse"):
        train(tiny_config(texts, "run", **settings))
        train(tiny_config(texts, "run", **settings | {"training__steps": 3}))
    lines = [line for line in caplog.messages if line.startswith(("validation", "step "))]
    begins = [" ".join(line.split()[:4]).rstrip(":") for line in lines]
    assert begins[0] == "validation before the first" and begins[3] == "validation after step 2"
    assert sum(begin.startswith("validation") for begin in begins) == 3
    wanted = r"loss by position, from token 0 to 300 in 3 parts: \d\.\d{3} \d\.\d{3} \d\.\d{3}$"
    assert re.search(wanted, lines[0])
    train(tiny_config(texts, "none", **settings | {"validation__at_start": False}))
    assert [line["step"] for line in read_lines(texts / "none/validation.jsonl")] == [2]
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "section, source, subset, split",
    [
        ({}, "owner/corpus", "en", "first"),
        ({"split": "held-out"}, "owner/corpus", "en", "held-out"),
        ({"source": "owner/other"}, "owner/other", "", "train"),
        ({"source": "owner/other", "split": "test"}, "owner/other", "", "test"),
    ],
)
def test_what_is_read(monkeypatch, section, source, subset, split):
    """Of data.source, what [data] names, but for the split. Of another
    source, nothing of [data]."""
    config = Config()
    config.training.seq_len = 8
    config.validation.enable = True
    config.data.source, config.data.subset, config.data.split = "owner/corpus", "en", "first"
    for key, value in section.items():
        setattr(config.validation, key, value)
    opened = []

    def open_documents(data: Data, tokenizer: ByteTokenizer, model_folder: str) -> TokenizedTexts:
        opened.append((data.source, data.subset, data.split))
        return TokenizedTexts(["a text of 24 letters ..."], tokenizer)

    monkeypatch.setattr(validation, "open_documents", open_documents)
    read = validation.Validator(config, ByteTokenizer())
    assert opened == [(source, subset, split)]
    assert [len(sequence.tokens) for sequence in read.sequences] == [8, 8, 8]


@pytest.mark.parametrize(
    "key, value, reason",
    [
        ("source", "{}/none", "this file or folder does not exist"),
        ("needle_lengths", "100", "validation.needle_lengths: .* do not fit in 100 tokens"),
        ("source", "{}/short.txt", "no document has 100 tokens"),
    ],
)
def test_sources_and_lengths_are_refused_before_any_process_group(texts, key, value, reason):
    (texts / "short.txt").write_text("A short text.")
    config = tiny_config(texts, "run", validation__enable=True, data__min_document_length=100)
    setattr(config.validation, key, value.format(texts))
    with pytest.raises(ValueError, match=reason):
        Trainer(config)
    assert not dist.is_initialized()


@pytest.mark.parametrize("format_of_text", ["messages", "messages, messages"])
def test_of_chats_only_what_is_learned_is_scored(tmp_path, monkeypatch, format_of_text):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    chat = [{"role": "user", "content": "?" * 20}, {"role": "assistant", "content": "yes"}]
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    (tmp_path / "template.jinja").write_text(PLAIN)
    config = Config()
    config.training.seq_len = 64
    config.data.source = f"{tmp_path}/a.jsonl:0.5, {tmp_path}/b.jsonl:0.5"
    config.data.format = format_of_text
    config.data.chat_template = str(tmp_path / "template.jinja")
    config.validation.enable = True
    config.validation.source = f"{tmp_path}/b.jsonl"
    (sequence,) = validation.Validator(config, ByteTokenizer()).sequences
    assert sequence.labels[sequence.labels != -100].tolist() == [*b"yes\n\n", 256]
    config.data.format = "messages, text"
    config.validation.source = f"{tmp_path}/c.jsonl"
    with pytest.raises(ValueError, match="is not a part of data.source, whose formats differ"):
        validation.Validator(config, ByteTokenizer())


def test_what_only_training_has_is_reset(tmp_path):
    """A file of costs may be gone, and one rank has nothing to balance. Neither is refused."""
    (tmp_path / "c.toml").write_text(
        '[attention]\nlayout = "balanced"\nbalance_costs = "gone.json"\ngradient_dtype = "bfloat16"\n'
        "[parallelism]\ncp = 2\n"
    )
    config = load_for_evaluation(["--config", str(tmp_path / "c.toml")], hf=None, dense=False)
    assert config.attention.balance_costs == ""
    check(config, 1, 1)


@pytest.mark.parametrize("reads_text", [True, False])
def test_what_the_command_line_says_is_read_or_refused(reads_text):
    """What a file says of training alone is reset."""
    choices = ("messages", "2", "1", "0.5", "false", "true")
    ignored = set()
    for key, kind in KINDS.items():
        if key in ("model.initial_hf", "data.tokenizer"):
            # They have to be there.
            continue
        unset = attrgetter(key)(Config())
        for text in (*get_args(plain(kind)), *choices):
            words = ["--parallelism.cp=2", f"--{key}={text}"]
            with contextlib.suppress(ConfigError):
                given = attrgetter(key)(load_config(words))
                if given != unset:
                    break
        try:
            config = load_for_evaluation(words, None, dense=False, reads_text=reads_text)
            assert attrgetter(key)(config) == given
        except ConfigError as error:
            assert f"command line: {key} would be ignored; leave out" in str(error)
            ignored.add(key)
    assert ("data.source" in ignored) != reads_text
    read = "data.add_bos training.dtype attention.pattern attention.route_by parallelism.dp_shard"
    read += " data.split_special_tokens"
    assert ignored.isdisjoint(read.split())
    of_training = "optimizer lr_scheduler activation_checkpoint float8 compile guard checkpoint"
    for section in (of_training + " metrics validation profiling").split():
        assert {key for key in KINDS if key.startswith(f"{section}.")} <= ignored
