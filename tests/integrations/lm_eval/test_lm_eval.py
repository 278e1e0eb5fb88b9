"""The model "titan_sparse" of lm_eval: its answers are those of lm_eval's own HFLM on the same
weights, on one rank and on several, from folders and from a run's checkpoint."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.distributed import run_processes
from tests.models.transformers_models import save_model
from tests.refusals import refused
from tests.runs import debug_run, write_texts

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from tests.reference import DEVICE
from titan_sparse.config import load, save
from titan_sparse.evaluation.generation import generate
from titan_sparse.integrations.lm_eval import TitanSparseLM

SPECIAL = ["<pad>", "<s>", "</s>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
VOCAB = len(SPECIAL) + 256


def write_folder(folder: Path, name: str = "llama", adds_bos: bool = True) -> Path:
    """The model of that name. adds_bos: the tokenizer puts <s> in front of
    each text, as Llama's."""
    save_model(folder, name, vocab_size=VOCAB)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={text: at for at, text in enumerate(SPECIAL + letters)}, merges=[])
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>" if adds_bos else None,
        eos_token="</s>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    return folder


QUESTIONS = [
    {"question": "What is white?", "choices": [" snow", " coal", " a long sea"], "answer": 0},
    {"question": "Who barks, and does not bite,\nmore often than not?", "choices": [" cat", " dog"], "answer": 1},
    {"question": "?", "choices": [" x", " yes", " z"], "answer": 2},
]  # fmt: skip

_TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "write": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "roll": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
}


def write_tasks(folder: Path) -> Path:
    """local_choice, local_write and local_roll, for lm_eval's include_path."""
    folder.mkdir()
    file = folder / "questions.json"
    file.write_text("\n".join(json.dumps(question) for question in QUESTIONS))
    for name, task in _TASKS.items():
        source = {
            "task": f"local_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(file)}},
            "test_split": "test",
        }
        # YAML contains JSON.
        (folder / f"{name}.yaml").write_text(json.dumps(source | task))
    return folder


# The smallest block of the kernels on a GPU.
BLOCK = 64 if DEVICE == "cuda" else 16
LONGEST = 64
PAIR = tuple[TitanSparseLM, HFLM]


def _pair(folder: Path, **arguments) -> PAIR:
    ours = TitanSparseLM(
        pretrained=str(folder),
        device=DEVICE,
        batch_size=3,
        **{"training.dtype": "float32", "attention.block_size": BLOCK, **arguments},
    )
    theirs = HFLM(str(folder), device=DEVICE, dtype="float32", batch_size=1, **arguments)
    return ours, theirs


@pytest.fixture(scope="module", params=["begins", "plain"])
def pair(request, tmp_path_factory) -> PAIR:
    """A tokenizer that puts <s> in front, on a model of ours; and one that does not, on one of
    transformers with windows."""
    folder = tmp_path_factory.mktemp("model")
    name = "llama" if request.param == "begins" else "mistral"
    write_folder(folder, name, adds_bos=request.param == "begins")
    return _pair(folder, max_length=LONGEST)


def ask(model: TitanSparseLM | HFLM, kind: str, arguments: list[tuple]) -> list:
    requests = []
    for number, each in enumerate(arguments):
        requests.append(Instance(kind, doc={}, arguments=each, idx=number))
    return getattr(model, kind)(requests)


def test_loglikelihoods(pair):
    """Empty contexts, spaces at the end, special tokens in the text, one letter,
    and what is too long."""
    ours, theirs = pair
    requests = [
        ("", " a letter"),
        ("A dog ", "barks"),
        ("<s>A dog", " barks"),
        ("</s>", "x"),
        ("One" * 40, " two"),
        ("One" * 40, "t" * LONGEST),
        ("é", "ü"),
    ]
    # A letter that greedy decoding writes, and what it does not.
    contexts = list("abcdefghijklmnopqrstuvwxyz")
    asked = [(context, {"until": [], "max_gen_toks": 1}) for context in contexts]
    for context, letter in zip(contexts, ask(theirs, "generate_until", asked)):
        if letter.isascii() and letter.strip():
            requests += [(context, letter), (context, letter + "x" + letter)]
            break
    found = ask(ours, "loglikelihood", requests)
    expected = ask(theirs, "loglikelihood", requests)
    for request, mine, other in zip(requests, found, expected, strict=True):
        assert mine[0] == pytest.approx(other[0], abs=1e-4), request
        assert mine[1] == other[1], request
    # Where the tokenizer adds <s>, the one that is spelled out takes its place.
    assert (found[1] == found[2]) == (ours.tokenizer.bos_token_id is not None)
    assert [greedy for _, greedy in found[-2:]] == [True, False]
    # Blanks alone are part of what follows. HFLM refuses them without <s>.
    if ours.tokenizer.bos_token_id is None:
        blanks, empty = ask(ours, "loglikelihood", [(" \n", "x"), ("", " \nx")])
        assert blanks == empty


def test_no_code_of_a_tokenizer_is_run(tmp_path, monkeypatch):
    """transformers would ask on stdin, and run it after a "y"."""
    folder = write_folder(tmp_path / "model")
    path = folder / "tokenizer_config.json"
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'was run')!r}, 'w')\nclass Own: pass\n")
    asked = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "y")
    with refused("code of a folder is not run"):
        TitanSparseLM(pretrained=str(folder), device="cpu")
    assert not asked and not (tmp_path / "was run").exists()


def test_rolling_windows(pair):
    ours, theirs = pair
    strings = [("a b c " * 40,), ("One.",), ("d" * LONGEST,), ("e" * (LONGEST + 1),)]
    found = ask(ours, "loglikelihood_rolling", strings)
    if ours.tokenizer.bos_token_id is None:
        expected = ask(theirs, "loglikelihood_rolling", strings)
        assert found == pytest.approx(expected, abs=1e-4)
        return
    # HFLM reads <s> twice here, and counts the second one. With it once, in one window:
    whole = [("", string) for (string,) in strings[1:3]]
    expected = ask(theirs, "loglikelihood", whole)
    assert found[1:3] == pytest.approx([score for score, _ in expected], abs=1e-4)


def test_generation(pair):
    """Until a string, at most so many tokens, after the end of a context that is too long."""
    ours, theirs = pair
    contexts = ["A dog", "<s>A cat ", "x", "One" * 40]
    requests = [(context, {"until": [], "max_gen_toks": 20}) for context in contexts]
    whole = ask(theirs, "generate_until", requests)
    assert len(set(whole)) == len(whole) and all(whole)
    # Three letters in the middle of what comes, and the last one.
    requests += [("A dog", {"until": [whole[0][5:8]], "max_gen_toks": 20})]
    requests += [("A dog", {"until": ["never", whole[0][-1]], "max_gen_toks": 20})]
    requests += [("A dog", {"until": whole[0][2], "max_gen_toks": 7, "do_sample": False})]
    expected = ask(theirs, "generate_until", requests)
    found = ask(ours, "generate_until", requests)
    assert found == expected
    assert found[4] == whole[0].split(whole[0][5:8])[0] != whole[0]


def test_texts_begin_once(pair):
    """A chat template that writes <s> itself, and a tokenizer that adds one."""
    ours, theirs = pair
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
    for arguments in ([chat[:1]], [chat, False]):
        text = ours.apply_chat_template(*arguments)
        assert text == theirs.apply_chat_template(*arguments)
        assert ours.tok_encode(text) == theirs.tok_encode(text)
    assert ours.tokenizer_name == theirs.tokenizer_name
    assert ours.chat_template(True) == theirs.chat_template(True)
    # The template writes <s> itself.
    begin = ours.tokenizer.bos_token_id
    assert begin is None or ours.tok_encode(text).count(begin) == 1


@pytest.mark.parametrize("splits", [False, True])
def test_special_tokens_are_letters_where_they_were_in_training(tmp_path, splits):
    folder = write_folder(tmp_path / "model")
    ours = TitanSparseLM(
        pretrained=str(folder), device="cpu", **{"data.split_special_tokens": splits}
    )
    text = "a</s>b"
    wanted = AutoTokenizer.from_pretrained(folder)(text, split_special_tokens=splits)["input_ids"]
    assert len(wanted) == (7 if splits else 4)
    assert ours.tok_encode(text) == wanted


def test_other_ends_of_chat_models(tmp_path):
    """generation_config.json may name several tokens that end a text."""
    folder = write_folder(tmp_path / "model")
    ours, _ = _pair(folder)
    prompt = np.array(ours.tok_encode("A dog"))
    (tokens,) = generate(ours.scorer, [prompt], 6)
    second = int(tokens[1])
    assert second != tokens[0]
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [2, second]}))
    ours, theirs = _pair(folder)
    assert ours.ends == {2, second}
    asked = [("A dog", {"until": [], "max_gen_toks": 6})]
    assert ask(ours, "generate_until", asked) == [ours.tokenizer.decode(tokens[:1])]
    # HFLM keeps the end's text where it is no special token.
    assert ask(theirs, "generate_until", asked) == [ours.tokenizer.decode(tokens[:2])]


def test_whole_tasks(pair, tmp_path):
    ours, theirs = pair
    manager = TaskManager(include_path=str(write_tasks(tmp_path / "tasks")), include_defaults=False)
    results = []
    for model in (ours, theirs):
        results.append(
            simple_evaluate(
                model,
                tasks=["local_choice", "local_write"],
                task_manager=manager,
                log_samples=True,
                bootstrap_iters=0,
                apply_chat_template=True,
            )
        )
    mine, other = results
    assert mine["config"]["context_parallel"] == 1
    for task in ("local_choice", "local_write"):
        assert mine["results"][task] == other["results"][task]
        for sample, expected in zip(mine["samples"][task], other["samples"][task], strict=True):
            assert sample["arguments"] == expected["arguments"]
            if task == "local_write":
                assert sample["resps"] == expected["resps"]
    assert len(mine["samples"]["local_choice"]) == len(QUESTIONS)


def test_no_group_of_processes_is_needed_to_refuse(tmp_path):
    if dist.is_initialized():
        dist.destroy_process_group()
    folder = str(write_folder(tmp_path / "model"))
    for arguments, reason in (
        ({}, r"write checkpoint=RUN .* or pretrained=FOLDER"),
        ({"pretrained": folder, "checkpoint": folder}, "one of the two"),
        ({"checkpoint": folder}, "holds no complete checkpoint"),
        ({"pretrained": folder, "attention": "sparse"}, 'write "dense", or leave it out'),
        ({"pretrained": folder, "batch_size": "auto"}, "batch_size = auto is not a positive"),
        (
            {"pretrained": folder, "max_length": 0},
            "max_length = 0 is not a number of tokens; write",
        ),
        ({"pretrained": folder, "max_length": -1}, "max_length = -1 is not a number of tokens"),
        ({"pretrained": folder, "max_length": "long"}, "write for example 4096 or 128k"),
        ({"pretrained": folder, "add_bos_token": "no"}, "add_bos_token = no is neither true nor"),
        ({"pretrained": folder, "attention.patern": "moba"}, "attention.pattern"),
        (
            {"pretrained": folder, "attention.moba.top_k": 3},
            'top_k would be ignored with attention.pattern = "dense"',
        ),
        ({"pretrained": folder, "device": "gpu"}, "training.device"),
        ({"pretrained": folder, "device": 0}, "training.device"),
    ):
        with refused(reason):
            TitanSparseLM(**arguments)
    assert not dist.is_initialized()


def test_what_a_task_asks_and_is_not_there_is_refused(pair):
    ours, _ = pair
    for options, reason in (
        ({"max_gen_toks": 3, "top_k": 3}, r"gen_kwargs: top_k is not there; write \['do_sample'"),
        ({"max_gen_toks": 3, "do_sample": True}, "write do_sample=false"),
        ({"max_gen_toks": LONGEST}, "leaves no room for a context in max_length = 64"),
    ):
        with refused(reason):
            ask(ours, "generate_until", [("x", {"until": [], **options})])
    with refused("a continuation of 65 tokens is above max_length = 64"):
        ask(ours, "loglikelihood", [("x", "y" * 65)])
    with refused("a choice or target of the task has no tokens"):
        ask(ours, "loglikelihood", [("x", "")])


def test_max_length_is_written_as_elsewhere(tmp_path):
    folder = write_folder(tmp_path / "model")
    ours = TitanSparseLM(pretrained=folder, device="cpu", max_length="1k")
    assert ours.max_length == 1024
    assert len(ask(ours, "loglikelihood", [("x" * 1500, "y")])) == 1


def test_device_of_lm_eval(tmp_path, monkeypatch):
    """cuda:0 is what lm_eval writes where --device is not given: HFLM's device then."""
    folder = str(write_folder(tmp_path / "model"))
    last = max(torch.cuda.device_count() - 1, 0)
    for device in ("cuda:0", torch.device("cuda", last)):
        ours = TitanSparseLM(pretrained=folder, device=device)
        assert ours._device == HFLM(folder, device=str(device)).device

    def choose(name: str) -> torch.device:
        chosen.append(name)
        return torch.device("cpu")

    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr("titan_sparse.training.load.choose_device", choose)
    TitanSparseLM(pretrained=folder, device="cuda:2")
    assert chosen == [2, "cuda"]
    for name in ("cuda:3", "cuda:x"):
        with refused(f"--device {name} is not one of the 3 GPUs"):
            TitanSparseLM(pretrained=folder, device=name)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with refused("each rank of torchrun has its own GPU; leave --device out"):
        TitanSparseLM(pretrained=folder, device="cuda:2")


# Several ranks, and runs

TASKS = ["local_choice", "local_roll", "local_write"]


def _evaluate(folder: Path, ranks: str) -> dict | None:
    return simple_evaluate(
        "titan_sparse",
        f"pretrained={folder}/model,training.dtype=float32,attention.block_size=16,{ranks}",
        tasks=TASKS,
        device="cpu",
        batch_size=2,
        task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )


def _answers(results: dict) -> list:
    """What each task's requests got, one after the other: log-likelihoods, greedy flags, texts."""
    answers = []
    for task in TASKS:
        for sample in results["samples"][task]:
            for (answer,) in sample["resps"]:
                answers += answer if isinstance(answer, list | tuple) else [answer]
    return answers


def _on_two_ranks(folder: Path) -> None:
    """They share a sequence, or each has requests of its own: three questions for two ranks. Ranks
    that are asked otherwise run what rank 0 asks."""
    rank = dist.get_rank()
    expected = json.loads((folder / "one.json").read_text())
    for ranks in (
        "parallelism.cp=2,attention.layout=balanced,attention.schedule=group_cast",
        "parallelism.dp_shard=2",
    ):
        os.environ["LOCAL_RANK"] = "0"  # as on two nodes of one rank each
        results = _evaluate(folder, ranks)
        assert (results is None) == (rank != 0), ranks
        # It names the GPU of this rank, also for what comes later in this process.
        assert os.environ["LOCAL_RANK"] == "0"
        if results is not None:
            assert _answers(results) == pytest.approx(expected, abs=1e-4), ranks

    model = TitanSparseLM(
        pretrained=f"{folder}/model",
        device="cpu",
        **{"training.dtype": "float32", "attention.block_size": 16, "parallelism.cp": 2},
    )
    for method, others in (
        (model.loglikelihood, [("One", " two"), ("Two", " three and more")]),
        (model.loglikelihood_rolling, [("One",), ("Two windows or more. " * 30,)]),
        (model.generate_until, [("One", {"max_gen_toks": 2}), ("Two", {"max_gen_toks": 5})]),
    ):
        first, own = (
            Instance(method.__name__, doc={}, arguments=others[number], idx=0)
            for number in (0, rank)
        )
        found: list = [None] * 2
        dist.all_gather_object(found, method([own]))
        # Rank 0's request is the one that is answered.
        assert found == [method([first])] * 2
    with refused("--use_cache needs one process"):
        model.set_cache_hook(None)


def test_several_ranks_answer_as_one(tmp_path):
    write_folder(tmp_path / "model")
    write_tasks(tmp_path / "tasks")
    one = _evaluate(tmp_path, "parallelism.cp=1")
    (tmp_path / "one.json").write_text(json.dumps(_answers(one)))
    run_processes(2, _on_two_ranks, tmp_path)


def test_chats_are_written_as_in_training(tmp_path):
    """The template and variables of the configuration, and not those beside the tokenizer."""
    folder = write_folder(tmp_path / "model")
    template = tmp_path / "own.jinja"
    template.write_text("{{ bos_token }}{{ kind }}" + TEMPLATE.replace("[{{", "<{{"))
    written = f'[data]\nchat_template = "{template}"\n'
    kind = 'chat_template_kwargs = \'{"kind": "new"}\'\n'
    chat = [{"role": "user", "content": "a"}]
    for more, variables in (("", {}), (kind, {"kind": "new"})):
        (tmp_path / "run.toml").write_text(written + more)
        ours = TitanSparseLM(
            pretrained=str(folder), config=str(tmp_path / "run.toml"), device="cpu"
        )
        theirs = ours.tokenizer.apply_chat_template(
            chat,
            chat_template=template.read_text(),
            tokenize=False,
            add_generation_prompt=True,
            **variables,
        )
        assert ours.apply_chat_template(chat) == theirs
        assert ours.chat_template(True) == template.read_text()


def test_a_run_sparse_and_dense(tmp_path):
    """Its newest checkpoint or a step, with its config.toml, tokenizer and pattern."""
    write_texts(tmp_path / "texts")
    debug_run(tmp_path, training__seq_len=900, attention__vertical_slash__recall=0.2)
    requests = [
        Instance("loglikelihood", doc={}, arguments=("a b c d " * 30, " e f"), idx=0),
        Instance("loglikelihood", doc={}, arguments=("", " e f"), idx=1),
    ]
    run = tmp_path / "run"
    tokenizer = str(write_folder(tmp_path / "model"))
    newest = TitanSparseLM(checkpoint=str(run), tokenizer=tokenizer, device="cpu")
    of_step = str(run / "checkpoint/step-2")
    step = TitanSparseLM(checkpoint=of_step, tokenizer=tokenizer)
    # No text is read, so that a run on a mixture is no obstacle.
    mixture = load(["--config", f"{run}/config.toml"])[0]
    mixture.data.source, mixture.data.format = "a:1,b:1", "text,text"
    save(mixture, tmp_path / "mixture")
    options = {"tokenizer": tokenizer, "config": str(tmp_path / "mixture/config.toml")}
    dense = TitanSparseLM(checkpoint=str(run), attention="dense", **options)
    assert newest.get_model_info()["attention_pattern"] == "vertical_slash"
    assert dense.get_model_info()["attention_pattern"] == "dense"
    assert newest.max_length == max(900, newest.scorer.model_config.max_positions)
    sparse = newest.loglikelihood(requests)
    assert sparse == step.loglikelihood(requests)
    others = dense.loglikelihood(requests)
    # The long one differs. The short one is below vertical_slash.dense_below.
    assert abs(sparse[0][0] - others[0][0]) > 1e-6
    assert sparse[1][0] == pytest.approx(others[1][0], abs=1e-5)
    with refused("write tokenizer=FOLDER"):
        TitanSparseLM(checkpoint=str(run))
