"""Checks of what can run: check() refuses impossible combinations before any process group
exists."""

import json
import math
from operator import attrgetter
from typing import Any

from titan_sparse.config.ignored import check_ignored
from titan_sparse.config.reading import (
    KINDS,
    ConfigError,
    clash,
    config_errors,
    layers_of,
    lengths_of,
    load,
    require,
    show,
)
from titan_sparse.config.sections import Attention, Config, Data, Flags, Parallelism, Validation
from titan_sparse.config.sources import has_chats, single_source, source_formats
from titan_sparse.config.start import world_from_environment, world_of
from titan_sparse.models.config import DecoderConfig, resolve_adapters
from titan_sparse.models.flavours import resolve
from titan_sparse.models.huggingface_config import family_of
from titan_sparse.options.values import check_value


def resolve_cp_intra(parallelism: Parallelism, local_world_size: int | None = None) -> int:
    """Context-parallel ranks of the inner ring: cp_intra, or the ranks of a node, at most cp.

    local_world_size: ranks of a node; None: those of this launch.
    """
    ranks = local_world_size or world_from_environment()[1]
    return parallelism.cp_intra or min(parallelism.cp, ranks)


def resolve_overlap_stages(attention: Attention, nodes: int) -> tuple[int, int]:
    """Stages of group_cast in the forward, and in the backward.

    Another stage is another pass over queries. It pays where blocks take longer to arrive, between
    nodes (docs/benchmarks.md).
    """
    forward = attention.overlap_stages or min(nodes, 2)
    backward = attention.overlap_stages_backward or forward
    return forward, backward


def padding_multiple(config: Config) -> int:
    """A padded sequence is a multiple of this many tokens: one whole block for each rank, or two
    for zigzag's mirrored chunks.

    This equals layouts.block_multiple(), which imports torch. A test checks that they agree.
    """
    blocks_per_rank = 2 if config.attention.layout == "zigzag" else 1
    return config.attention.block_size * config.parallelism.cp * blocks_per_rank


def check(config: Config, world_size: int, local_world_size: int) -> None:
    """Refuse what cannot run on `world_size` ranks with `local_world_size` per node.

    Raises ConfigError, one line that names the keys and what to write instead. Values are checked
    again, for configurations made in Python.
    """
    with config_errors():
        for key, kind in KINDS.items():
            check_value(key, kind, attrgetter(key)(config))
        check_ignored(config)
        model = resolve(**vars(config.model))
        _check_model(config, model)
        check_formats(config.data)
        _check_world(config.parallelism, world_size, local_world_size)
        _check_attention(config)
        if config.attention.schedule == "ulysses":
            _check_ulysses(config, model, local_world_size)
        _check_memory(config, local_world_size)
        _check_float8(config)
        if resolve_adapters(model, **vars(config.lora)):
            _check_lora(config)
        _check_run(config)


def load_and_check(argv: list[str], world_size: int, local_world_size: int) -> tuple[Config, Flags]:
    """load() and then check(), whose ConfigError gets the name of the --config file in front, or
    "command line".

    world_of() says which ranks it is checked for.
    """
    config, flags = load(argv)
    ranks = world_of(flags, config.parallelism, world_size, local_world_size)
    with config_errors(f"{flags.config or 'command line'}: "):
        check(config, *ranks)
    return config, flags


def _check_model(config: Config, model: DecoderConfig) -> None:
    vocab_size = config.model.vocab_size
    is_bytes = (config.data.tokenizer or config.model.initial_hf or "bytes") == "bytes"
    require(
        not is_bytes or vocab_size == 0 or vocab_size >= 258,
        f'model.vocab_size = {vocab_size} is too small for data.tokenizer = "bytes"; write 0, or 258 '
        "or more",
    )
    layers_of(config.attention.dense_layers, "attention.dense_layers", model.layers)
    first = config.checkpoint.initial_load_path
    if first and config.model.initial_hf and not config.model.random_weights:
        instead = (
            'checkpoint.initial_load_path = "", or model.random_weights = true for the shape alone'
        )
        clash(config, "checkpoint.initial_load_path", "model.initial_hf", instead)
    if not model.runs_in_transformers:
        if config.checkpoint.last_save_in_hf:
            family_of(model)
        return
    of_model = {
        "training.mlp_chunk_tokens": True,
        # Experts are not linear layers.
        "float8.enable": model.experts > 0,
        # Layers have windows of their own.
        "attention.window_sinks": model.window > 0,
    }
    for key, is_refused in of_model.items():
        if is_refused and attrgetter(key)(config):
            why = "does not go with what transformers' own code computes of"
            clash(config, key, "model.initial_hf", why=why)


def check_formats(data: Data) -> None:
    """Refuses an unknown data.format, and options that none of its formats uses. Raises
    ConfigError."""
    config = Config(data=data)
    if source_formats(data).get("python", "text") != "text":
        clash(config, "data.format", "data.source")
    check_ignored(config, "data")
    if data.split_special_tokens and has_chats(data):
        why = "would split the tokens of the chat template of"
        clash(config, "data.split_special_tokens", "data.format", why=why)
    chat_template_kwargs(data)


def chat_template_kwargs(data: Data) -> dict[str, Any]:
    """The variables of data.chat_template_kwargs. Raises ConfigError."""
    try:
        kwargs = json.loads(data.chat_template_kwargs or "{}")
    except (ValueError, RecursionError):
        kwargs = None
    require(
        isinstance(kwargs, dict),
        f"data.chat_template_kwargs = {show(data.chat_template_kwargs)} is not a JSON object; write "
        """one, such as '{"enable_thinking": false}'""",
    )
    taken = sorted({"messages", "tools", "documents", "add_generation_prompt"} & kwargs.keys())
    require(
        not taken,
        f'data.chat_template_kwargs names "{", ".join(taken)}", which a chat itself gives; leave it '
        "out",
    )
    return kwargs


def _check_world(parallelism: Parallelism, world_size: int, local_world_size: int) -> None:
    replicate = parallelism.dp_replicate
    shard = parallelism.dp_shard
    cp = parallelism.cp
    # With dp_shard = -1 any multiple of the other degrees fits.
    degrees = replicate * cp * max(shard, 1)
    takes_the_rest = shard == -1
    fits = world_size % degrees == 0 if takes_the_rest else world_size == degrees
    if not fits:
        nodes = max(1, world_size // local_world_size)
        ranks = degrees
        if takes_the_rest:
            # The largest world that fits and that all nodes have an equal part of.
            step = math.lcm(degrees, nodes)
            ranks = step * max(1, world_size // step)
        start = f"{ranks} ranks in all"
        if ranks % nodes == 0:
            start = f"--nproc-per-node={ranks // nodes}"
        raise ConfigError(
            f"parallelism.dp_replicate = {replicate} x parallelism.dp_shard = {shard} x "
            f"parallelism.cp = {cp} does not fit {world_size} ranks; start torchrun with {start} "
            f"(a --dry-run with --ranks {ranks}) or change the degrees"
        )
    intra = resolve_cp_intra(parallelism, local_world_size)
    divisors = ", ".join(str(number) for number in range(1, cp + 1) if cp % number == 0)
    require(
        cp % intra == 0,
        f"parallelism.cp_intra = {intra} does not divide parallelism.cp = {cp}; "
        f"write parallelism.cp_intra as one of {divisors}",
    )


def _check_attention(config: Config) -> None:
    attention = config.attention
    size = attention.block_size
    cp = config.parallelism.cp
    require(
        size >= 16 and size & (size - 1) == 0,
        f"attention.block_size = {size} is not a power of two of at least 16; write 64 or 128",
    )
    if attention.mask == "causal" and config.data.sequences == "packed":
        instead = (
            'attention.mask = "documents" or data.sequences = "fixed", or '
            'attention.mask = "causal_across_documents" if a query should see other documents'
        )
        clash(config, "attention.mask", "data.sequences", instead)
    if attention.schedule == "local" and cp > 1 or attention.schedule == "double_ring" and cp == 1:
        clash(config, "attention.schedule", "parallelism.cp")
    if attention.gradient_dtype == "bfloat16" and config.training.dtype == "float64":
        why = "would round what is exact in"
        clash(config, "attention.gradient_dtype", "training.dtype", why=why)
    # A window with sinks gives a query two ranges of keys, which not everything takes.
    if attention.window_sinks and attention.pattern != "dense":
        clash(config, "attention.pattern", "attention.window_sinks", 'attention.pattern = "dense"')
    if attention.window_sinks and attention.backend in ("cudnn", "flex"):
        clash(config, "attention.backend", "attention.window_sinks")
    # cuDNN computes dense attention, and its backward adds up in any order.
    if attention.backend == "cudnn" and attention.pattern != "dense":
        clash(config, "attention.backend", "attention.pattern")
    if attention.backend == "cudnn" and config.training.deterministic:
        clash(config, "attention.backend", "training.deterministic")
    options = getattr(attention, attention.pattern)
    with config_errors("attention."):
        options.check()
        options.check_block_size(size)
    # Without a probe it is one block, which fits: the loader pads sequences to whole blocks.
    if attention.pattern == "vertical_slash" and options.probe > config.training.seq_len:
        clash(config, "attention.vertical_slash.probe", "training.seq_len", why="is above")


def _check_ulysses(config: Config, model: DecoderConfig, local_world_size: int) -> None:
    """Refuses heads that the ranks of a node cannot share, and what only a
    ring between nodes has."""
    cp = config.parallelism.cp
    intra = resolve_cp_intra(config.parallelism, local_world_size)
    # Numbers of ranks that share the heads equally.
    possible = [number for number in range(1, cp + 1) if model.heads % number == 0]
    require(
        intra in possible,
        f'attention.schedule = "ulysses" cannot deal {model.heads} heads out to {intra} ranks of a '
        f"node (parallelism.cp = {cp}); write parallelism.cp_intra as one of "
        f"{', '.join(str(number) for number in possible if cp % number == 0)} (a ring joins the "
        'rest), or attention.schedule = "auto"',
    )
    if intra < cp:
        share = config.activation_checkpoint.attention_recompute
        require(
            share in (0, 1),
            f"activation_checkpoint.attention_recompute = {show(share)} does not go with "
            'attention.schedule = "ulysses" between nodes; write 0.0 or 1.0, or attention.schedule = '
            '"double_ring"',
        )
        return
    for name in ("backward_circulates", "route_by", "gradient_dtype"):
        if cp > 1 and getattr(config.attention, name) != getattr(Attention(), name):
            why = "is for a ring between nodes, and there is only one node with"
            clash(config, f"attention.{name}", "attention.schedule", why=why)


def _check_memory(config: Config, local_world_size: int) -> None:
    training = config.training
    lever = config.activation_checkpoint
    is_on_gpu = training.device != "cpu" and config.attention.backend != "eager"
    if training.dtype == "float64" and is_on_gpu:
        instead = 'training.device = "cpu" or attention.backend = "eager"'
        clash(config, "training.dtype", "training.device", instead)
    if lever.offload and lever.mode == "none":
        clash(config, "activation_checkpoint.mode", "activation_checkpoint.offload")
    if lever.offload:
        # Otherwise attention's results stay on the device.
        require(
            config.compile.enable and config.compile.backend != "eager",
            "activation_checkpoint.offload = true needs blocks that are compiled; write "
            'compile.enable = true and compile.backend = "inductor"',
        )
    cp = config.parallelism.cp
    # With ulysses inside a node, a rank has whole sequences of its heads.
    has_whole_heads = (
        config.attention.schedule == "ulysses"
        and resolve_cp_intra(config.parallelism, local_world_size) == cp
    )
    needs_striped = lever.attention_recompute not in (0, 1) and cp > 1 and not has_whole_heads
    if needs_striped and config.attention.layout != "striped":
        clash(config, "attention.layout", "activation_checkpoint.attention_recompute")
    tokens = training.local_batch_size * training.seq_len // cp
    require(
        training.mlp_chunk_tokens <= tokens,
        f"training.mlp_chunk_tokens = {training.mlp_chunk_tokens} is more than the {tokens} tokens "
        f"of a rank and would do nothing; write 0 or for example {max(1, tokens // 4)}",
    )


def _check_float8(config: Config) -> None:
    names = [name.strip() for name in config.float8.filter.split(",")]
    require(
        config.float8.filter == "" or all(names),
        f"float8.filter = {show(config.float8.filter)} holds an empty name, which is part of every "
        'name; write for example "o_proj,mlp"',
    )
    if config.float8.enable and config.training.device == "cpu":
        why = "needs a GPU (Hopper or newer), not"
        clash(config, "float8.enable", "training.device", why=why)
    if config.float8.enable and config.training.dtype != "bfloat16":
        clash(config, "training.dtype", "float8.enable")
    if config.float8.enable and config.training.mlp_chunk_tokens and "mlp" not in names:
        clash(config, "float8.filter", "training.mlp_chunk_tokens", 'float8.filter = "mlp"')
    if config.float8.enable and config.validation.prompt:
        # Float8 multiplies 16 rows or more, and a new token is one.
        clash(config, "validation.prompt", "float8.enable")


def trains_random_base(config: Config) -> bool:
    """True if the frozen weights are drawn from training.seed, and not read from
    model.initial_hf."""
    return config.model.random_weights or not config.model.initial_hf


def _check_lora(config: Config) -> None:
    # Checkpoints hold only adapters. Frozen weights come from model.initial_hf.
    if config.checkpoint.initial_load_path:
        instead = "model.initial_hf = an export of that checkpoint (titan-sparse export_hf)"
        clash(config, "checkpoint.initial_load_path", "lora.rank", instead)
    if config.checkpoint.last_save_in_hf and trains_random_base(config):
        why = "would write adapters of random weights with"
        clash(config, "checkpoint.last_save_in_hf", "lora.rank", why=why)
    # Adapters are not on float8's linear layers.
    if config.float8.enable:
        clash(config, "float8.enable", "lora.rank")
    # The frozen weights would be on the CPU too.
    if config.optimizer.offload:
        clash(config, "optimizer.offload", "lora.rank")
    # Every second matmul is an adapter's.
    if config.activation_checkpoint.mode == "selective":
        clash(config, "activation_checkpoint.mode", "lora.rank")
    # An MLP is computed twice.
    if config.training.mlp_chunk_tokens and config.lora.dropout:
        why = "would drop other inputs each time with"
        clash(config, "lora.dropout", "training.mlp_chunk_tokens", why=why)


def _check_run(config: Config) -> None:
    scheduler = config.lr_scheduler
    source = "lr_scheduler.total_steps" if scheduler.total_steps else "training.steps"
    if scheduler.warmup_steps > attrgetter(source)(config):
        clash(config, "lr_scheduler.warmup_steps", source, "a smaller one", "is above")
    profiling, steps = config.profiling, config.training.steps
    last = profiling.first_step + profiling.steps - 1
    if profiling.enable and last > steps:
        instead = f"profiling.first_step = {steps - profiling.steps + 1} or less"
        if profiling.steps >= steps:
            instead = f"profiling.first_step = 1 and profiling.steps = {steps} or less"
        why = f"traces up to step {last}, above"
        clash(config, "profiling.first_step", "training.steps", instead, why)
    pictures, every = config.metrics.pictures_every, config.metrics.log_every
    if pictures % every:
        instead = f"metrics.pictures_every = {-(-pictures // every) * every}"
        why = "is not a multiple of"
        clash(config, "metrics.pictures_every", "metrics.log_every", instead, why)
    validation = config.validation
    needle_lengths(validation)
    if not validation.enable:
        return
    if validation.position_buckets > config.training.seq_len:
        key = "validation.position_buckets"
        clash(config, key, "training.seq_len", "a smaller one", "is above")
    single_source(validation.source or config.data.source, "validation.source")


def needle_lengths(validation: Validation) -> list[int]:
    """validation.needle_lengths as numbers, tokens; ConfigError for other words."""
    if not validation.needle_lengths:
        return []
    return lengths_of(validation.needle_lengths, "validation.needle_lengths")
