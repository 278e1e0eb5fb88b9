"""A Hugging Face folder with a small random model and a tokenizer of bytes, and tasks on it."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from tests.models.transformers_models import save_model

pytest.importorskip("lm_eval")

SPECIAL = ["<pad>", "<s>", "</s>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
VOCAB = len(SPECIAL) + 256


def write_folder(folder: Path, name: str = "llama", adds_bos: bool = True) -> Path:
    """The model of that name. adds_bos: the tokenizer puts <s> in front of each text, as Llama's."""
    from transformers import PreTrainedTokenizerFast

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
