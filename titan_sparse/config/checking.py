"""What can run and what cannot: check() refuses impossible combinations before any process group
exists."""

import json
import math
from operator import attrgetter
from typing import Any, get_args

from titan_sparse.config.combinations import check_attention, check_ignored
from titan_sparse.config.reading import (
    ANNOTATED,
    KINDS,
    ConfigError,
    config_file,
    lengths_of,
    load,
    one_of,
    require,
    show,
    typed,
)
from titan_sparse.config.sections import (
    Attention,
    Config,
    Data,
    Flags,
    LRScheduler,
    Metrics,
    Model,
    Parallelism,
    Validation,
)
from titan_sparse.config.sources import single_source, source_formats
from titan_sparse.config.start import world_of
from titan_sparse.models.flavours import FLAVOURS, TransformersConfig, resolve
from titan_sparse.models.huggingface_config import architecture
from titan_sparse.models.lora_config import resolve_adapters
from titan_sparse.options import check_value


def resolve_cp_intra(parallelism: Parallelism, local_world_size: int) -> int:
    """Context-parallel ranks of the inner ring: cp_intra, or the ranks of a node, at most cp."""
    return parallelism.cp_intra or min(parallelism.cp, local_world_size)


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

    Raises ConfigError, one line that names the keys and what to write instead. Types are checked
    again, for configurations made in Python.
    """
    for key in KINDS:
        typed(key, attrgetter(key)(config), "")
    _check_ranges(config)
    check_ignored(config)
    _check_model(config.model, config.data)
    _check_huggingface(config)
    check_formats(config.data)
    _check_dtype(config)
    _check_world(config.parallelism, world_size, local_world_size)
    check_attention(config)
    _check_memory_levers(config)
    _check_float8(config)
    _check_lora(config)
    _check_lr_scheduler(config.lr_scheduler, config.training.steps)
    _check_run(config)
    _check_pictures(config.metrics)
    _check_validation(config)


def _check_ranges(config: Config) -> None:
    """Refuse numbers out of range, and texts that cannot be file names."""
    default = Config()
    for key, kind in ANNOTATED.items():
        value = attrgetter(key)(config)
        if KINDS[key] is str:
            is_required = "not empty" in get_args(kind)
            _check_text(key, value, attrgetter(key)(default) if is_required else "")
            continue
        try:
            check_value(key, kind, value)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def _check_text(key: str, text: str, default: str) -> None:
    """default: what to write in place of an empty text; empty where that is allowed."""
    require(text != "" or default == "", f"{key} is empty; write {show(default)} or another")
    require("\0" not in text, f"{key} = {show(text)} holds a zero byte; leave it out")
    # Bytes of the command line that are not UTF-8 arrive as lone surrogates.
    is_utf8 = not any("\ud800" <= letter <= "\udfff" for letter in text)
    require(is_utf8, f"{key} = {ascii(text)} is no UTF-8; write other letters")


def load_and_check(argv: list[str], world_size: int, local_world_size: int) -> tuple[Config, Flags]:
    """load() and then check(), whose ConfigError gets the name of the --config file in front, or
    "command line".

    world_of() says which ranks it is checked for.
    """
    config, flags = load(argv)
    ranks = world_of(flags, config.parallelism, world_size, local_world_size)
    try:
        check(config, *ranks)
    except ConfigError as error:
        raise ConfigError(f"{config_file(argv) or 'command line'}: {error}") from error
    return config, flags


def _check_pictures(metrics: Metrics) -> None:
    every = metrics.log_every
    next_multiple = -(-metrics.pictures_every // every) * every
    require(
        metrics.pictures_every % every == 0,
        f"metrics.pictures_every = {metrics.pictures_every} is no multiple of metrics.log_every = "
        f"{every}; write metrics.pictures_every = {next_multiple}",
    )


def _check_model(model: Model, data: Data) -> None:
    one_of("model.flavour", model.flavour, FLAVOURS)
    require(
        data.tokenizer != "bytes" or model.vocab_size == 0 or model.vocab_size >= 258,
        f'model.vocab_size = {model.vocab_size} is too small for data.tokenizer = "bytes"; '
        "write 0 or 258 or more",
    )
    require(
        model.rope_scaling not in ("yarn", "llama3") or model.rope_factor > 1,
        f'model.rope_scaling = "{model.rope_scaling}" needs model.rope_factor above 1; '
        'write the factor, or model.rope_scaling = "none"',
    )


def _check_huggingface(config: Config) -> None:
    require(
        config.model.initial_hf == "" or config.checkpoint.initial_load_path == "",
        "model.initial_hf and checkpoint.initial_load_path both say where the first weights come "
        "from; write one of them",
    )
    try:
        model = resolve(**vars(config.model))
        if isinstance(model, TransformersConfig):
            _check_transformers(config, model)
        elif config.checkpoint.last_save_in_hf:
            architecture(model)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_transformers(config: Config, model: TransformersConfig) -> None:
    name = f"{config.model.initial_hf} runs through transformers' own code"
    require(
        config.training.mlp_chunk_tokens == 0,
        f"training.mlp_chunk_tokens = {config.training.mlp_chunk_tokens}, but {name}, which computes "
        "an MLP at once; write training.mlp_chunk_tokens = 0",
    )
    require(
        not config.float8.enable or not model.experts,
        f"float8.enable = true, but {name}, and its experts are no linear layers; "
        "write float8.enable = false",
    )
    require(
        config.attention.window_sinks == 0 or not model.window,
        f"attention.window_sinks = {config.attention.window_sinks}, but the layers of "
        f"{config.model.initial_hf} have windows of their own; write attention.window_sinks = 0",
    )


def check_formats(data: Data) -> None:
    """Refuses an unknown data.format, and options that none of its formats uses. Raises
    ConfigError."""
    formats = source_formats(data)
    require(
        formats.get("python", "text") == "text",
        f'data.format = {show(data.format)}, but data.source = "python" is text; write '
        'data.format = "text"',
    )
    check_ignored(Config(data=data), "data")
    require(
        not data.split_special_tokens or set(formats.values()) == {"text"},
        "data.split_special_tokens = true would split the tokens of the chat template too; write "
        "data.split_special_tokens = false",
    )
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


def _check_dtype(config: Config) -> None:
    runs_float64 = config.training.device == "cpu" or config.attention.backend == "eager"
    require(
        config.training.dtype != "float64" or runs_float64,
        'training.dtype = "float64" needs training.device = "cpu" '
        'or attention.backend = "eager"; write one of them or training.dtype = "float32"',
    )


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


def _check_memory_levers(config: Config) -> None:
    if config.activation_checkpoint.offload:
        require(
            config.activation_checkpoint.mode != "none",
            "activation_checkpoint.offload = true would move all activations with "
            'activation_checkpoint.mode = "none"; write activation_checkpoint.mode = "full"',
        )
        require(
            config.compile.enable and config.compile.backend != "eager",
            "activation_checkpoint.offload = true needs blocks that are compiled, as else "
            "attention's results stay on the device; write compile.enable = true and "
            'compile.backend = "inductor"',
        )
    local_tokens = (
        config.training.local_batch_size * config.training.seq_len // config.parallelism.cp
    )
    chunk = config.training.mlp_chunk_tokens
    require(
        chunk <= local_tokens,
        f"training.mlp_chunk_tokens = {chunk} is more than the {local_tokens} tokens of a rank "
        "and would do nothing; write 0 or for example 8192",
    )


def _check_float8(config: Config) -> None:
    float8 = config.float8
    training = config.training
    if not float8.enable:
        return
    require(
        training.device != "cpu",
        'float8.enable = true needs a GPU (Hopper or newer), not training.device = "cpu"; '
        "write float8.enable = false",
    )
    require(
        training.dtype == "bfloat16",
        f'float8.enable = true needs training.dtype = "bfloat16", not "{training.dtype}"; '
        "write that or float8.enable = false",
    )
    names = [name.strip() for name in float8.filter.split(",")]
    require(
        float8.filter == "" or all(names),
        f"float8.filter = {show(float8.filter)} holds an empty name, which is part of every "
        'name; write for example "o_proj,mlp"',
    )
    require(
        training.mlp_chunk_tokens == 0 or "mlp" in names,
        "training.mlp_chunk_tokens computes in training.dtype; write "
        'float8.filter = "mlp" or training.mlp_chunk_tokens = 0',
    )
    model = resolve(**vars(config.model))
    for name, size in (
        ("hidden_size", model.hidden_size),
        ("intermediate_size", model.intermediate_size),
        ("heads x head_dim", model.heads * model.head_dim),
        ("kv_heads x head_dim", model.kv_heads * model.head_dim),
    ):
        require(
            size % 16 == 0,
            f"float8.enable = true needs multiples of 16, but the model's {name} is {size}; "
            "write float8.enable = false",
        )


def _check_lora(config: Config) -> None:
    lora = config.lora
    if lora.rank == 0:
        return
    try:
        resolve_adapters(resolve(**vars(config.model)), **vars(lora))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _check_first_weights(config)
    _check_levers_with_lora(config)


def trains_random_base(config: Config) -> bool:
    """Whether the frozen weights are drawn from training.seed, and not read from
    model.initial_hf."""
    return config.model.random_weights or not config.model.initial_hf


def _check_first_weights(config: Config) -> None:
    """Check where frozen weights come from, because checkpoints hold only adapters."""
    checkpoint = config.checkpoint
    require(
        not checkpoint.initial_load_path,
        f"checkpoint.initial_load_path = {show(checkpoint.initial_load_path)} with lora.rank = "
        f"{config.lora.rank}: frozen weights come from a Hugging Face folder; export that checkpoint "
        "(titan-sparse export_hf) and write the export as model.initial_hf",
    )
    require(
        not checkpoint.last_save_in_hf or not trains_random_base(config),
        f"checkpoint.last_save_in_hf = true with lora.rank = {config.lora.rank} writes adapters of "
        "model.initial_hf, but the frozen weights are random; write "
        "checkpoint.last_save_in_hf = false",
    )


def _check_levers_with_lora(config: Config) -> None:
    rank = f"lora.rank = {config.lora.rank}"
    require(
        not config.float8.enable,
        f"float8.enable = true with {rank}: adapters are not on float8's linear layers; write "
        "float8.enable = false",
    )
    require(
        not config.optimizer.offload,
        f"optimizer.offload = true with {rank} would keep the frozen weights on the CPU too, and "
        "adapters' states are small; write optimizer.offload = false",
    )
    require(
        config.activation_checkpoint.mode != "selective",
        f'activation_checkpoint.mode = "selective" with {rank}: every second matmul is an '
        'adapter\'s; write activation_checkpoint.mode = "full" or "none"',
    )
    chunk = config.training.mlp_chunk_tokens
    require(
        not chunk or not config.lora.dropout,
        f"training.mlp_chunk_tokens = {chunk} computes an MLP twice, and lora.dropout = "
        f"{show(config.lora.dropout)} would drop other inputs each time; write lora.dropout = 0.0 "
        "or training.mlp_chunk_tokens = 0",
    )


def _check_lr_scheduler(scheduler: LRScheduler, steps: int) -> None:
    total = scheduler.total_steps or steps
    source = "lr_scheduler.total_steps" if scheduler.total_steps else "training.steps"
    require(
        scheduler.warmup_steps <= total,
        f"lr_scheduler.warmup_steps = {scheduler.warmup_steps} is above {source} "
        f"= {total}; write lr_scheduler.warmup_steps = {total} or less",
    )


def _check_run(config: Config) -> None:
    one_of("compile.backend", config.compile.backend, ("inductor", "aot_eager", "eager"))
    optimizer = config.optimizer
    require(
        optimizer.name != "SGD" or optimizer.implementation != "fused",
        'optimizer.implementation = "fused" does not exist for sharded parameters with '
        'optimizer.name = "SGD"; write optimizer.implementation = "auto"',
    )
    last = config.profiling.first_step + config.profiling.steps - 1
    require(
        not config.profiling.enable or last <= config.training.steps,
        f"profiling.first_step and profiling.steps trace up to step {last}, beyond "
        f"training.steps = {config.training.steps}; write a smaller profiling.first_step",
    )


def needle_lengths(validation: Validation) -> list[int]:
    """validation.needle_lengths as numbers, tokens; ConfigError for other words."""
    if not validation.needle_lengths:
        return []
    return lengths_of(validation.needle_lengths, "validation.needle_lengths")


def _check_validation(config: Config) -> None:
    validation = config.validation
    needle_lengths(validation)
    if not validation.enable:
        return
    seq_len = config.training.seq_len
    require(
        validation.position_buckets <= seq_len,
        f"validation.position_buckets = {validation.position_buckets} is above training.seq_len = "
        f"{seq_len}; write {seq_len} or less",
    )
    single_source(validation.source or config.data.source, "validation.source")
