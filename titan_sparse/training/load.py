"""The configuration to evaluate with, and a decoder with weights of a run's checkpoint or a
Hugging Face folder."""

import dataclasses
import math
import os
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from titan_sparse.attention import ContextParallel
from titan_sparse.config import (
    ActivationCheckpoint,
    Compile,
    Config,
    Data,
    Lora,
    world_from_environment,
)
from titan_sparse.config.changes import read_saved
from titan_sparse.config.ignored import ignored_options
from titan_sparse.config.reading import KINDS, given_keys, load_config, require
from titan_sparse.config.sources import (
    has_chats,
    single_source,
    source_weights,
    tokenizer_name,
)
from titan_sparse.data.chat_template import as_prepared
from titan_sparse.data.documents import ROW_OPTIONS
from titan_sparse.data.shards import is_prepared
from titan_sparse.data.tokenizer import SampleFormat, Tokenizer
from titan_sparse.evaluation.scorer import Scorer
from titan_sparse.models.build import build_decoder
from titan_sparse.models.config import Adapters, DecoderConfig
from titan_sparse.models.decoder import Decoder
from titan_sparse.models.flavours import resolve
from titan_sparse.models.huggingface import check_weights, load_weights, tensor_shapes
from titan_sparse.models.huggingface_files import local_folder
from titan_sparse.models.initialization import initialize
from titan_sparse.models.lora import adapter_shapes, add_adapters
from titan_sparse.options.values import show
from titan_sparse.training.attention import (
    block_table,
    build_attends,
    build_context_parallel,
    build_layer_masks,
    build_shard,
)
from titan_sparse.training.checkpoint.folders import METADATA, newest_checkpoint
from titan_sparse.training.checkpoint.reader import read_into, read_metadata, verify
from titan_sparse.training.faults.process_groups import (
    Meshes,
    build_meshes,
    choose_device,
    init_distributed,
)
from titan_sparse.training.model import parallelize
from titan_sparse.training.preflight import alike, build_adapters, check_base, read_initial_hf

_NAMES = ("embed_tokens.", "layers.", "norm.", "lm_head.")
"""What the names of a decoder's tensors begin with; a checkpoint holds the optimizer's too."""

_PROMPTS = "prompts"
"""data.source where none is read."""

_OF_TRAINING = (
    *("activation_checkpoint.", "checkpoint.", "compile.", "float8.", "guard.", "lr_scheduler."),
    *("metrics.", "optimizer.", "profiling.", "validation.", "attention.backward_circulates"),
    *("attention.balance_costs", "attention.gradient_dtype", "attention.overlap_stages_backward"),
    *("data.sequences", "data.shuffle", "lora.dropout", "lora.init", "model.router_loss"),
    *("parallelism.reshard_after_forward", "parallelism.timeout_seconds", "training.deterministic"),
    *("training.gc_interval", "training.gradient_accumulation_steps", "training.local_batch_size"),
    *("training.max_norm", "training.mlp_chunk_tokens", "training.output_dir", "training.seed"),
    *("training.steps", "training.stop_grace_seconds", "training.z_loss"),
)
"""The keys that only training reads, or the sections of them. They stand in a run's file."""

_OF_TEXTS = (
    *("data.bad_rows", "data.format", "data.join_packages", "data.loss_on", "data.messages_field"),
    *("data.min_document_length", "data.source", "data.split", "data.subset", "data.text_field"),
)
"""The keys that say which texts are read."""


def load_for_evaluation(
    words: list[str],
    hf: str | None,
    dense: bool,
    checkpoint: str | None = None,
    reads_text: bool = True,
) -> Config:
    """The configuration of `words`, as train.py takes them, not checked yet. Raises ConfigError.

    hf: a Hugging Face folder, or a name on its hub, in place of the run's model. dense: attend
    densely, whatever the pattern in training. checkpoint: a run's folder or checkpoint, whose texts
    are begun as in training. reads_text: of data.source, which is then one source. What only
    training uses is reset, so that it cannot conflict with another mesh, and refused among `words`
    beside a file.
    """
    config = load_config(words)
    given = given_keys(words)
    asked = {key: attrgetter(key)(config) for key in KINDS if key in given}
    ignored = {"what only training reads": _OF_TRAINING}
    if not reads_text:
        ignored["what says which texts are read, as none are"] = _OF_TEXTS
    for kind, names in ignored.items():
        keys = [key for key in asked if key in names or f"{key.partition('.')[0]}." in names]
        require(not keys, f"command line: {', '.join(keys)} would be ignored; leave out {kind}")
    if hf:
        config.model.initial_hf = local_folder(hf, "model", weights=True)
        config.model.random_weights = False
        config.lora = Lora()
    if checkpoint and "data.add_bos" not in given:
        config.data.add_bos &= _was_begun(checkpoint)
    if dense:
        config.attention.pattern = "dense"
    # Share each sequence as in training, if the ranks of this launch allow it. The remaining
    # ranks are data-parallel.
    cp = math.gcd(config.parallelism.cp, world_from_environment()[0])
    mesh = {"cp": cp, "cp_intra": 0, "dp_replicate": 1, "dp_shard": -1}
    if given.isdisjoint(f"parallelism.{name}" for name in mesh):
        config.parallelism = dataclasses.replace(config.parallelism, **mesh)
    if config.parallelism.cp == 1:  # then ranks do not share a sequence
        config.attention.schedule = "auto"
        config.parallelism.cp_intra = 0
    defaults = Config()
    of_attention = "backward_circulates route_by gradient_dtype balance_costs"
    if config.attention.schedule != "group_cast":
        of_attention += " overlap_stages overlap_stages_backward"
    for key in of_attention.split():
        if config.parallelism.cp == 1 or f"attention.{key}" not in given:
            setattr(config.attention, key, getattr(defaults.attention, key))
    for name in _OF_TRAINING:
        # Whole sections.
        if name.endswith("."):
            setattr(config, name[:-1], getattr(defaults, name[:-1]))
    data = config.data
    if reads_text:
        data.source = single_source(data.source, "data.source", data.format)
        _leave_out_others(config, words)
    elif (data.chat_template or data.chat_template_kwargs) and not has_chats(data):
        # Of prompts, also where the texts of the run were no chats.
        kept = ("tokenizer", "other_tokenizer", "add_bos", "chat_template", "chat_template_kwargs")
        values = {name: getattr(data, name) for name in kept}
        config.data = Data(source=_PROMPTS, format="messages", **values)
    # Each window and each prompt is of one document.
    config.data.sequences = "fixed"
    config.training.mlp_chunk_tokens = 0
    weights = ["model.initial_hf", "model.random_weights"]
    weights += [key for key in KINDS if key.startswith("lora.")]
    reasons = dict.fromkeys(weights, f"the weights are those of {show(hf)}")
    reasons["attention.pattern"] = "attention is dense"
    for key, reason in reasons.items():
        require(
            attrgetter(key)(config) == asked.get(key, attrgetter(key)(config)),
            f"command line: {key} = {show(asked.get(key))} would be ignored, as {reason}; leave it out",
        )
    return config


def _leave_out_others(config: Config, words: list[str]) -> None:
    """Resets what the run's file says of other sources than data.source. What `words` say stays,
    and is refused where it does nothing."""
    data = config.data
    given = given_keys(words)
    file = words[:2] if words[:1] == ["--config"] else []
    trained = load_config(file).data
    others = [key.removeprefix("data.") for key, _ in ignored_options(config, "data")]
    if is_other := data.source not in source_weights(trained.source):
        others += ["subset", "split"]
        if is_prepared(data.source):
            others += ["format", *ROW_OPTIONS, "split_special_tokens"]
    for name in others:
        if f"data.{name}" not in given:
            setattr(data, name, getattr(Data(), name))
    if is_other and data.format != "text" and not is_prepared(data.source):
        # Chats are written and learned as in training, also where those were prepared.
        made = as_prepared(trained)
        if "data.loss_on" not in given:
            data.loss_on = made.loss_on
        if not data.chat_template:
            data.chat_template = made.chat_template
            data.chat_template_kwargs = data.chat_template_kwargs or made.chat_template_kwargs


def _was_begun(checkpoint: str) -> bool:
    """True if texts could begin with a token of the tokenizer in the run of a checkpoint: prepared
    tokens may lack it. True if only chats were learned."""
    saved = read_saved(_step_of(checkpoint))
    parts = saved.origin["data"] if saved else []
    parts = [part for part in parts if SampleFormat(part["format"]).takes_bos]
    return not parts or any(part["add_bos"] for part in parts)


def find_checkpoint(path: str) -> str:
    """The folder step-N that `path` names: that folder, or the newest one of an output_dir."""
    folder = _step_of(path)
    if folder is None:
        raise ValueError(
            f"{path} holds no complete checkpoint; write a run's output_dir or its checkpoint/step-N"
        )
    return folder


def _step_of(path: str) -> str | None:
    """find_checkpoint(); None if there is no complete checkpoint."""
    return path if os.path.isfile(os.path.join(path, METADATA)) else newest_checkpoint(path)


def find_config(source: str) -> str:
    """The config.toml of what find_checkpoint() takes: that of a run, or of a checkpoint, which a
    resumed run may have changed since."""
    path = os.path.join(source, "config.toml")
    if not os.path.isfile(path):
        raise ValueError(f"{source} has no config.toml; copy that of the run there")
    return path


def _check_checkpoint(folder: str, config: DecoderConfig, adapters: Adapters | None) -> None:
    """Raises ValueError that names a tensor if the tensors of `folder` are
    not those of the model."""
    metadata = read_metadata(folder).state_dict_metadata
    saved = {name: list(item.size) for name, item in metadata.items() if name.startswith(_NAMES)}
    shapes = adapter_shapes(config, adapters) if adapters else tensor_shapes(config)
    wanted = {name: list(shape) for name, shape in shapes.items()}
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            raise ValueError(
                f"--checkpoint {folder} has {saved.get(name, 'no')} {name}, the model of --config has "
                f"{wanted.get(name, 'none')}; write the config.toml of that run"
            )


def build_scorer(config: Config, checkpoint: str | None, tokenizer: Tokenizer) -> Scorer:
    """Build config.model with the weights of `checkpoint` (a folder step-N), or if that is None, of
    config.model.initial_hf, in training.dtype, sharded over all ranks.

    Joins the process group if this process has not. Raises ValueError, before any process group,
    for a tokenizer or weights that do not fit the model.
    """
    device = choose_device(config.training.device)
    dtype = getattr(torch, config.training.dtype)
    model_config = resolve(**vars(config.model))
    if tokenizer.vocab_size > model_config.vocab_size:
        raise ValueError(
            f"the model has {model_config.vocab_size} tokens, data.tokenizer = {tokenizer_name(config)} "
            f"{tokenizer.vocab_size}; write the tokenizer that the model was trained with"
        )
    adapters = None
    if checkpoint is None:
        check_weights(config.model.initial_hf, model_config)
    else:
        # Nothing is dropped outside of training.
        undropped = dataclasses.replace(config, lora=dataclasses.replace(config.lora, dropout=0.0))
        adapters = build_adapters(undropped, model_config, tokenizer)
        _check_checkpoint(checkpoint, model_config, adapters)
    if adapters:
        check_base(config, checkpoint)
    init_distributed(device, config.parallelism.first_step_timeout_seconds, alike(config))
    meshes = build_meshes(config.parallelism, device.type)
    cp = build_context_parallel(config.attention, meshes.cp)
    with torch.device("meta"):
        model = build_decoder(model_config, build_attends(config.attention, cp)).to(dtype)
        if adapters:
            add_adapters(model, adapters)
    if meshes.fsdp.size() > 1:  # FSDP on one rank would copy all weights in every forward
        parallelize(model, meshes.fsdp, dtype, True, ActivationCheckpoint(mode="none"), Compile())
    model.to_empty(device=device)
    if adapters:
        # The frozen weights, as at the start of training.
        initialize(model, config.training.seed, model_config, device)
        read_initial_hf(config, model, model_config)
    if checkpoint is None:
        load_weights(model, config.model.initial_hf, model_config)
    else:
        verify(checkpoint)
        # Casts while it copies.
        trained = StateDictOptions(ignore_frozen_params=True)
        read_into(get_model_state_dict(model, options=trained), checkpoint)
    return build_run_scorer(config, model, model_config, tokenizer, meshes, cp, device)


def build_run_scorer(
    config: Config,
    model: Decoder,
    model_config: DecoderConfig,
    tokenizer: Tokenizer,
    meshes: Meshes,
    cp: ContextParallel,
    device: torch.device,
) -> Scorer:
    """A Scorer of a model that has been built, with the attention of `config`."""
    attention = config.attention
    shard = build_shard(model_config, cp)

    def masks(lengths: list[list[int]], seq_len: int) -> tuple[Any, Tensor | None]:
        # Probes have no seed and use fixed rows: results do not depend on a step.
        table = block_table(attention, cp, lengths, seq_len)
        built = build_layer_masks(attention, model_config, lengths, seq_len, cp, device, table)
        return built, table

    ranks = meshes.dp_rank, meshes.dp_size
    return Scorer(model, model_config, config, cp, device, tokenizer, masks, shard, *ranks)
