"""Decisions before the first step: the data, the weights to begin with, what must be the same
on all ranks, how much of attention is recomputed, and what a resumed run changes."""

import dataclasses
import hashlib
import logging
import os
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titan_sparse.config import (
    Config,
    changes,
    padding_multiple,
    resolve_cp_intra,
    trains_random_base,
    world_from_environment,
)
from titan_sparse.config.reading import KINDS, show
from titan_sparse.config.sources import tokenizer_name
from titan_sparse.data import Batch, PackedLoader, build_loader, open_tokenizer
from titan_sparse.data.tokenizer import Tokenizer
from titan_sparse.estimate.memory import peak_gib
from titan_sparse.estimate.step import StepShape
from titan_sparse.models.config import Adapters, DecoderConfig, resolve_adapters
from titan_sparse.models.huggingface import check_weights, load_weights, untrained_tokens
from titan_sparse.models.huggingface_config import read_json
from titan_sparse.models.huggingface_files import weights_digest
from titan_sparse.models.lora import peft_config
from titan_sparse.training.attention import why_dense
from titan_sparse.training.checkpoint.folders import FOLDER, newest_checkpoint, step_folder
from titan_sparse.training.run_folder import versions
from titan_sparse.training.step_shape import step_of
from titan_sparse.training.validation import Validator

logger = logging.getLogger("titan_sparse")

PACKAGE = Path(__file__).parents[1]

_AUTO_SHARE = 0.9
"""Of the free memory, what attention_recompute = -1 counts on."""

_STEPS = 16
"""So many shares are tried, so that a little more or less free memory does not change a run."""


def checkpoint_to_resume(config: Config) -> str | None:
    if not config.checkpoint.enable:
        return None
    if config.checkpoint.load_step >= 0:
        return step_path(config, config.checkpoint.load_step)
    return newest_checkpoint(config.training.output_dir)


def step_path(config: Config, step: int) -> str:
    return str(step_folder(Path(config.training.output_dir, FOLDER), step))


def check_initial_weights(config: Config, model: DecoderConfig) -> None:
    """Raise ValueError for a model.initial_hf that does not fit, unless the run resumes."""
    if not trains_random_base(config) and checkpoint_to_resume(config) is None:
        check_weights(config.model.initial_hf, model)


def read_initial_hf(config: Config, model: nn.Module, model_config: DecoderConfig) -> None:
    if not trains_random_base(config):
        load_weights(model, config.model.initial_hf, model_config)
        logger.info("read the weights of %s", config.model.initial_hf)


def alike(config: Config) -> dict[str, str]:
    """Values that must be equal on all ranks, by readable names: the configuration, a digest of
    this package's code, and the versions of the packages that it computes with."""
    values = {key: show(attrgetter(key)(config)) for key in KINDS}
    # By ranks of this node: nodes may have different numbers of GPUs.
    values["the resolved parallelism.cp_intra"] = str(resolve_cp_intra(config.parallelism))
    # rglob does not follow links, and in a checkout kernels/ is one.
    for path in sorted([*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").rglob("*.py")]):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        values[path.relative_to(PACKAGE.parent).as_posix()] = digest[:12]
    for name, version in versions().items():
        values[f"the version of {name}"] = str(version)
    return values


def alike_in_training(
    config: Config,
    origin: changes.Origin,
    backend: str,
    loader: PackedLoader,
    validation: Validator,
) -> dict[str, str]:
    """The other facts that must be the same on all ranks of a training run."""
    values = {
        "the chosen attention.backend": backend,
        "the device": origin.device,
        "the digest of data.tokenizer": origin.tokenizer[:12],
        "the digest of the frozen weights": origin.base[:30],
    }
    for name, value in changes.model_functions(dataclasses.asdict(origin.model)).items():
        values[f"the model's {name}"] = show(value)
    for number, part in enumerate(origin.data, 1):
        for name, value in part.items():
            values[f"{changes.DATA_KEYS[name]} (part {number})"] = show(value)
    if not trains_random_base(config) and checkpoint_to_resume(config) is None:
        digest = weights_digest(config.model.initial_hf)
        values["the digest of the weights of model.initial_hf"] = digest[:12]
    if config.attention.balance_costs:
        costs = Path(config.attention.balance_costs).read_bytes()
        values["the digest of attention.balance_costs"] = hashlib.sha256(costs).hexdigest()[:12]
    values["the digest of documents of data.source"] = loader.content_digest()
    values["the digest of validation.source"] = validation.content_digest()
    return values


def open_data(config: Config, model: DecoderConfig) -> PackedLoader:
    """The loader of this rank's data. Raises ValueError, naming the key, for
    what cannot be read."""
    tokenizer = open_tokenizer(config)
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"model.vocab_size = {model.vocab_size} is too small for data.tokenizer {tokenizer_name(config)}; "
            f"write {tokenizer.vocab_size} or more"
        )
    cp = config.parallelism.cp
    return build_loader(
        config.data,
        config.training.seq_len,
        config.training.local_batch_size,
        config.training.seed,
        dp_rank=int(os.environ.get("RANK", 0)) // cp,
        dp_size=world_from_environment()[0] // cp,
        padding_multiple=padding_multiple(config),
        tokenizer=tokenizer,
        # Under other masks documents run into each other, if there are several in a sequence.
        restart_positions=config.attention.mask == "documents",
        model_folder=config.model.initial_hf,
    )


def step_size(config: Config, model: DecoderConfig, backend: str, recomputed: float) -> StepShape:
    ranks = (dist.get_world_size(), world_from_environment()[1])
    step = step_of(config, model, backend, *ranks)
    return dataclasses.replace(step, attention_recompute=recomputed)


def recomputed_share(
    config: Config, model: DecoderConfig, backend: str, device: torch.device
) -> float:
    """activation_checkpoint.attention_recompute. For auto it is the smallest multiple of a
    sixteenth whose estimated peak fits on the rank with the least free memory. Collective."""
    share = config.activation_checkpoint.attention_recompute
    if share != -1:
        return share
    free = free_gib(device)
    share = 0.0
    while free is not None and share < 1.0:
        if peak_gib(step_size(config, model, backend, share)) <= _AUTO_SHARE * free:
            break
        share += 1 / _STEPS
    needed = torch.tensor(share)
    dist.all_reduce(needed, dist.ReduceOp.MAX)
    return needed.item()


def free_gib(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes / 2**30


def build_adapters(config: Config, model: DecoderConfig, tokenizer: Tokenizer) -> Adapters | None:
    """The adapters of the [lora] section; None without. Raises ValueError for a name of
    lora.trainable_tokens that is not one token, or not listed once."""
    adapters = resolve_adapters(model, **vars(config.lora))
    if adapters is None:
        return None
    by_name = {tokenizer.spell([token]): token for token in tokenizer.added_ids}
    found: dict[int, str] = {}
    for name in adapters.tokens:
        ids = tokenizer.encode(name).tolist()
        token = ids[0] if len(ids) == 1 else by_name.get(name)
        if token is None:
            raise ValueError(
                f'lora.trainable_tokens: "{name}" is not a token of data.tokenizer = '
                f"{show(tokenizer_name(config))}, but {len(ids)}; add it to the tokenizer, or leave "
                "it out"
            )
        if token in found:
            raise ValueError(f'lora.trainable_tokens names "{name}" twice; leave one out')
        found[token] = name
    return dataclasses.replace(adapters, token_ids=tuple(found))


def adapters_to_train(
    config: Config, model: DecoderConfig, tokenizer: Tokenizer
) -> Adapters | None:
    """build_adapters(), and a ValueError also for adapters that PEFT could not load, and for tokens
    that model.initial_hf does not have and lora.trainable_tokens leaves out."""
    adapters = build_adapters(config, model, tokenizer)
    if adapters is None:
        return None
    rows = tokenizer.vocab_size
    if not trains_random_base(config):
        rows = read_json(config.model.initial_hf)["vocab_size"]
    new = sorted({*range(rows, tokenizer.vocab_size)} - {*adapters.token_ids})
    if new:
        raise ValueError(
            f"{len(new)} tokens of data.tokenizer have new rows (model.vocab_size), which adapters "
            f"do not train; write {_with_tokens(adapters, new, tokenizer)}"
        )
    peft_config(adapters, model.tied_embeddings)
    return adapters


def warn_of_untrained_tokens(
    config: Config, adapters: Adapters, tokenizer: Tokenizer, batches: list[Batch]
) -> None:
    """Log the tokens of the first step whose rows were never trained, and stay so. Collective."""
    if trains_random_base(config):
        return
    ids = {token for batch in batches for token in batch.tokens.unique().tolist()}
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, ids & tokenizer.added_ids)
    if dist.get_rank() > 0:
        return
    seen = set().union(*of_ranks).difference(adapters.token_ids)
    folder = config.model.initial_hf
    tokens = untrained_tokens(folder, seen, tokenizer.added_ids, tokenizer.vocab_size)
    if tokens:
        names = ", ".join(tokenizer.spell([token]) for token in tokens)
        logger.warning(
            "the rows of %s in %s are zero or all alike, so they were never trained, and adapters "
            "do not train them; write %s",
            names,
            folder,
            _with_tokens(adapters, tokens, tokenizer),
        )


def warn_of_dense(
    config: Config, model: DecoderConfig, loader: PackedLoader, batches: list[Batch], step: int
) -> None:
    """Say why the first logged step was dense, if the banner has not. Collective."""
    documents = [n for batch in batches for lengths in batch.lengths for n in lengths]
    longest = torch.tensor(max(documents))
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    in_banner = why_dense(config, model, loader.longest_document())
    if dist.get_rank() == 0 and not in_banner:
        logger.warning(why_dense(config, model, longest.item(), f"step {step}"))


def _with_tokens(adapters: Adapters, tokens: list[int], tokenizer: Tokenizer) -> str:
    """lora.trainable_tokens with further tokens, as a line of TOML."""
    names = [*adapters.tokens, *(tokenizer.spell([token]) for token in tokens)]
    return f"lora.trainable_tokens = {show(','.join(names))}"


def base_digest(config: Config) -> str:
    """A digest of the frozen weights, which a checkpoint does not hold; "" where there are none."""
    if not config.lora.rank:
        return ""
    if trains_random_base(config):
        return f"training.seed = {config.training.seed}"
    return weights_digest(config.model.initial_hf)


def check_base(config: Config, checkpoint: str) -> None:
    """Raises ValueError unless the frozen weights of `config` are those that the adapters of a
    checkpoint were trained on."""
    saved = changes.read_saved(checkpoint)
    if saved is not None and saved.origin["base"] != base_digest(config):
        raise ValueError(
            f"model.initial_hf = {show(config.model.initial_hf)} has other weights than those that "
            f"the adapters of {checkpoint} were trained on; put them back"
        )
