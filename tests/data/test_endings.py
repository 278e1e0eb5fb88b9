"""Where a text begins and ends: in training, and in what is exported."""

import json
import shutil
from pathlib import Path

import datasets
import pytest
import torch
import torch.distributed as dist
import transformers
import trl

from tests.data.helpers import (
    CHAT,
    CHATML,
    GLM,
    PLAIN,
    TOOLS,
    encode,
    trl_template,
    write_rows,
    write_tokenizer,
)
from tests.models.transformers_models import tiny_model
from tests.runs import tiny_config, train
from titan_sparse.commands.export_hf import main as export_hf
from titan_sparse.config import Config, Data
from titan_sparse.data.chat_template import exported_files, find_template
from titan_sparse.data.documents import open_documents
from titan_sparse.data.endings import text_ends
from titan_sparse.data.preparing import prepare
from titan_sparse.data.recipe import Recipe
from titan_sparse.data.shards import adds_bos
from titan_sparse.data.tokenizer import load_tokenizer
from titan_sparse.evaluation.needle import needle_samples
from titan_sparse.models.huggingface_files import write_files


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (CHATML, "<|endoftext|> <|im_end|>"),
        (PLAIN, "<|endoftext|>"),
        # Answers end with the beginning of the next message.
        (GLM, "<|endoftext|> <|user|>"),
        ("glm4moe", "<|endoftext|> <|user|> <|observation|>"),
        # <|end|> also stands between the reasoning and the answer, where nothing may stop.
        ("gptoss_training", "<|endoftext|> <|return|> <|call|>"),
        ("qwen3_training", "<|endoftext|> <|im_end|>"),
        ("llama3_training", "<|endoftext|> <|eot_id|>"),
    ],
    ids=["chatml", "plain", "glm", "glm4moe", "gptoss", "qwen3", "llama3"],
)
def test_tokens_that_end_answers(tmp_path, template, wanted):
    text = template if " " in template else trl_template(template)
    folder = write_tokenizer(tmp_path / "t", text)
    tokenizer = load_tokenizer(folder)
    config = Config(data=Data(source="x.jsonl", format="messages", tokenizer=folder))
    found = text_ends(config, tokenizer)
    assert {tokenizer.spell([end]) for end in found} == set(wanted.split())
    # Texts alone end with their own token, and so do prepared texts.
    config.data.format = "text"
    assert text_ends(config, tokenizer) == [tokenizer.end_of_document]


def _base(folder: Path, generation: dict | None) -> str:
    """A tiny Llama whose end is <|endoftext|>, with a tokenizer and ChatML."""
    write_tokenizer(folder, CHATML)
    tokenizer = load_tokenizer(str(folder))
    model = tiny_model(
        "LlamaConfig",
        vocab_size=tokenizer.vocab_size,
        num_hidden_layers=1,
        eos_token_id=tokenizer.end_of_document,
        bos_token_id=tokenizer.begin.item(),
    )
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return str(folder)


@pytest.mark.parametrize(
    ("generation", "lora", "prepares"),
    [
        (None, {}, False),
        ({"eos_token_id": [0, 5], "pad_token_id": 5, "top_k": 7, "do_sample": True}, {}, True),
        ({"eos_token_id": 0}, {"lora__rank": 2, "lora__alpha": 4}, False),
    ],
    ids=["absent", "list", "lora"],
)
def test_an_export_stops_where_the_chats_of_its_run_end(tmp_path, generation, lora, prepares):
    """generate() of transformers stops at <|im_end|>, which the base model does not name."""
    base = _base(tmp_path / "base", generation)
    tokenizer = load_tokenizer(base)
    source = str(tmp_path / "chats.jsonl")
    write_rows(tmp_path / "chats.jsonl", [{"messages": CHAT}] * 4)
    data = {"data__source": source, "data__format": "messages"}
    if prepares:
        recipe = Recipe(source, tokenizer=base, format="messages")
        prepare(recipe, str(tmp_path / "prepared"))
        data = {"data__source": str(tmp_path / "prepared")}
    run = tiny_config(
        tmp_path,
        "run",
        model__flavour="debug",
        model__initial_hf=base,
        data__tokenizer="",
        training__steps=1,
        training__dtype="float32",
        checkpoint__enable=True,
        checkpoint__last_save_in_hf=True,
        **data,
        **lora,
    )
    train(run)
    dist.destroy_process_group()
    folders = [tmp_path / "run/huggingface/step-1"]
    if lora:
        assert export_hf([str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"]) == 0
        folders.append(tmp_path / "merged")
    end = int(tokenizer.encode("<|im_end|>")[0])
    named = [generation["eos_token_id"]] if generation and prepares else [[0]]
    for folder in folders:
        written = json.loads((folder / "generation_config.json").read_text())
        assert written["eos_token_id"] == [*named[0], end]
        assert written.get("top_k") == (generation or {}).get("top_k")
    assert json.loads((folders[-1] / "config.json").read_text())["eos_token_id"] == [*named[0], end]

    model = transformers.AutoModelForCausalLM.from_pretrained(folders[-1])
    # Whatever it reads, this model writes <|im_end|>.
    torch.nn.init.zeros_(model.lm_head.weight)
    model.model.norm.weight.data.fill_(1.0)
    model.lm_head.weight.data[end] = 1.0
    model.model.embed_tokens.weight.data.fill_(1.0)
    for layer in model.model.layers:
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
            torch.nn.init.zeros_(part.weight)
    asked = torch.tensor([tokenizer.encode("hello").tolist()])
    out = model.generate(asked, max_new_tokens=8, do_sample=False)[0, asked.shape[1] :]
    assert out.tolist() == [end]


ROWS = [
    {"prompt": "hello", "completion": " world"},
    {"prompt": "hello", "completion": " world<|endoftext|>"},
    {"prompt": "", "completion": "yes"},
    {"prompt": "the answer", "completion": ""},
]


@pytest.mark.parametrize("begins", [True, False])
def test_rows_begin_and_end_as_those_of_trl(tmp_path, begins):
    """The tokens and the mask of SFTTrainer, for a tokenizer with and without a beginning token."""
    folder = _base(tmp_path / "base", None)
    if not begins:
        path = tmp_path / "base/tokenizer.json"
        values = json.loads(path.read_text())
        values["post_processor"] = None
        path.write_text(json.dumps(values))
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer.begin) == begins
    texts = ["hello world", "the answer<|endoftext|>", "yes\n"]
    for rows, row_format in ((ROWS, "prompt_completion"), ([{"text": t} for t in texts], "text")):
        trainer = trl.SFTTrainer(
            model=transformers.AutoModelForCausalLM.from_pretrained(folder),
            args=trl.SFTConfig(
                str(tmp_path / "trl"), use_cpu=True, report_to="none", bf16=False, max_length=None
            ),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        )
        source = tmp_path / f"{row_format}.jsonl"
        write_rows(source, rows)
        documents = open_documents(Data(source=str(source), format=row_format), tokenizer)
        for index, wanted in enumerate(trainer.train_dataset):
            tokens, learned = documents[index]
            assert tokens.tolist() == wanted["input_ids"], rows[index]
            if learned is not None:
                labels = [label != -100 for label in wanted["labels"]]
                assert learned.tolist() == labels, rows[index]
        data = Data(source=str(source), format=row_format, add_bos=False)
        plain = open_documents(data, tokenizer)
        first = documents[0].tokens
        assert plain[0].tokens.tolist() == first[len(tokenizer.begin) :].tolist()


def test_prepared_texts_say_how_they_begin(tmp_path):
    """What measures them begins in the same way, and a run does not mix both."""
    folder = write_tokenizer(tmp_path / "t", CHATML)
    tokenizer = load_tokenizer(folder)
    write_rows(tmp_path / "a.jsonl", [{"text": "hello world " * 40}, {"text": ""}])
    found = {}
    for add_bos in (True, False):
        out = str(tmp_path / f"{add_bos}")
        prepare(Recipe(str(tmp_path / "a.jsonl"), tokenizer=folder, add_bos=add_bos), out)
        documents = open_documents(Data(source=out, tokenizer=folder), tokenizer)
        assert len(documents) == 1
        (sample,) = needle_samples(documents, [400], [0.5], 1, 0)
        found[add_bos] = (documents[0].tokens.tolist(), sample.prompt.tolist(), adds_bos(Data(out)))
    begin = tokenizer.begin.item()
    for begun, plain in zip(found[True][:2], found[False][:2], strict=True):
        assert begun[0] == begin and begin not in begun[1:] and begin not in plain
    assert found[True][0][1:] == found[False][0] and (found[True][2], found[False][2]) == (1, 0)
    with pytest.raises(ValueError, match="data.add_bos = false: .* were prepared with"):
        open_documents(Data(source=str(tmp_path / "True"), add_bos=False), tokenizer)


@pytest.mark.parametrize("template", [CHATML, "{{ bos_token }}" + CHATML], ids=["none", "bos"])
@pytest.mark.parametrize("add_bos", [True, False])
def test_needles_in_chats_begin_as_texts_do(tmp_path, template, add_bos):
    """Raw and prepared ones alike, as AutoTokenizer begins texts. A mixture may
    say add_bos = false."""
    folder = write_tokenizer(tmp_path / "t", template)
    tokenizer = load_tokenizer(folder)
    source = tmp_path / "chats.jsonl"
    write_rows(source, [{"messages": CHAT}] * 20)
    prepare(Recipe(str(source), tokenizer=folder, format="messages"), str(tmp_path / "out"))
    of_file = dict(tokenizer=folder, add_bos=add_bos)
    sources = [Data(source=str(source), format="messages", **of_file)]
    sources.append(Data(source=str(tmp_path / "out"), **of_file))
    prompts = []
    for data in sources:
        (sample,) = needle_samples(open_documents(data, tokenizer), [400], [0.5], 1, 0)
        prompts.append(sample.prompt.tolist())
        assert adds_bos(data) == add_bos
    assert prompts[0] == prompts[1]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    begin = theirs("hello")["input_ids"][0]
    assert begin == theirs.bos_token_id and (prompts[0][0] == begin) == add_bos
    assert begin not in prompts[0][1:]


def test_templates_are_those_of_autotokenizer(tmp_path):
    """additional_chat_templates/ is read, and is there in the second generation too."""
    folder = write_tokenizer(tmp_path / "one", CHATML)
    (tmp_path / "one/additional_chat_templates").mkdir()
    tools = "tools: {{ tools | length }} " + CHATML
    (tmp_path / "one/additional_chat_templates/tool_use.jinja").write_text(tools)
    for old, new in (("one", "two"), ("two", "three")):
        files = exported_files(Data(), "", load_tokenizer(str(tmp_path / old)))
        (tmp_path / new).mkdir()
        write_files(files, tmp_path / new)
        read = transformers.AutoTokenizer.from_pretrained(tmp_path / new)
        assert find_template(tmp_path / new) == read.chat_template
        assert read.chat_template == {"default": CHATML, "tool_use": tools}
    got = encode(folder, {"messages": CHAT, "tools": TOOLS})
    wanted = read.apply_chat_template(CHAT, tools=TOOLS)["input_ids"]
    assert got.tokens.tolist()[: len(wanted)] == wanted
    # The entries of tokenizer_config.json count where there are no files.
    (tmp_path / "three/chat_template.jinja").unlink()
    assert find_template(tmp_path / "three") == {}
    shutil.rmtree(tmp_path / "three/additional_chat_templates")
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": tools}]
    (tmp_path / "three/tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "three")
    assert find_template(tmp_path / "three") == read.chat_template
