"""What can run and what cannot: check() refuses impossible combinations before any process group
exists."""

import json
import math
from operator import attrgetter
from typing import Any

from titan_sparse.config.checking_attention import check_attention, check_recompute
from titan_sparse.config.checking_lora import check_lora
from titan_sparse.config.environment import world_of
from titan_sparse.config.keys import KINDS
from titan_sparse.config.mixture import single_source, source_formats, source_weights
from titan_sparse.config.ranges import check_ranges
from titan_sparse.config.reading import (
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
    Float8,
    LRScheduler,
    Metrics,
    Model,
    Optimizer,
    Parallelism,
    Validation,
)
from titan_sparse.models.flavours import FLAVOURS, TransformersConfig, resolve
from titan_sparse.models.huggingface_config import architecture


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
    """Tokens that a padded sequence is a multiple of: a whole block for each rank, two of them for
    zigzag's mirrored chunks.

    The same as layouts.block_multiple(), which imports torch; a test holds the two together.
    """
    blocks_per_rank = 2 if config.attention.layout == "zigzag" else 1
    return config.attention.block_size * config.parallelism.cp * blocks_per_rank


def check(config: Config, world_size: int, local_world_size: int) -> None:
    """Refuses what cannot run on `world_size` ranks with `local_world_size` on a node.

    Raises ConfigError, one line that names the keys and what to write instead. Types are checked
    once more, for a configuration made in Python.
    """
    for key in KINDS:
        typed(key, attrgetter(key)(config), "")
    check_ranges(config)
    _check_model(config.model, config.data)
    _check_huggingface(config)
    _check_data(config.data)
    _check_dtype(config)
    _check_world(config.parallelism, world_size, local_world_size)
    check_attention(config)
    check_recompute(config)
    _check_optimizer(config.optimizer)
    _check_memory_levers(config)
    _check_float8(config)
    check_lora(config)
    _check_lr_scheduler(config.lr_scheduler, config.training.steps)
    _check_run(config)
    _check_pictures(config.metrics)
    _check_validation(config)


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
    key = f"metrics.pictures_every = {metrics.pictures_every}"
    every = metrics.log_every
    next_multiple = -(-metrics.pictures_every // every) * every
    require(
        not metrics.pictures_every or metrics.tensorboard,
        f"{key} would be ignored with metrics.tensorboard = false; write "
        "metrics.pictures_every = 0 or metrics.tensorboard = true",
    )
    require(
        metrics.pictures_every % every == 0,
        f"{key} is no multiple of metrics.log_every = {every}; write metrics.pictures_every "
        f"= {next_multiple}",
    )


def _check_model(model: Model, data: Data) -> None:
    one_of("model.flavour", model.flavour, FLAVOURS)
    require(
        data.tokenizer != "bytes" or model.vocab_size == 0 or model.vocab_size >= 258,
        f'model.vocab_size = {model.vocab_size} is too small for data.tokenizer = "bytes"; '
        "write 0 or 258 or more",
    )
    if model.rope_scaling in ("yarn", "llama3"):
        require(
            model.rope_factor > 1,
            f'model.rope_scaling = "{model.rope_scaling}" needs model.rope_factor above 1; '
            'write the factor, or model.rope_scaling = "none"',
        )
        return
    for key, unset in (("rope_factor", 1.0), ("rope_original_length", 0)):
        value = getattr(model, key)
        require(
            value == unset,
            f"model.{key} = {value} would be ignored with model.rope_scaling = "
            f'"{model.rope_scaling}"; write model.rope_scaling = "yarn" or "llama3", '
            f"or model.{key} = {unset}",
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
    """What transformers' own code cannot do."""
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


def _check_data(data: Data) -> None:
    sources = source_weights(data.source)
    check_formats(data)
    if "python" not in sources:
        require(
            not data.join_packages,
            f"data.join_packages would be ignored with data.source = {show(data.source)}; "
            'write data.join_packages = false or data.source = "python"',
        )
    if set(sources) != {"python"}:
        return
    for name in ("text_field", "bad_rows", "subset", "split"):
        value = getattr(data, name)
        default = getattr(Data(), name)
        require(
            value == default,
            f'data.{name} = {show(value)} would be ignored with data.source = "python"; '
            f"write data.{name} = {show(default)} or another data.source",
        )


def check_formats(data: Data) -> None:
    """Refuses an unknown data.format, and keys that none of its formats uses. Raises ConfigError."""
    formats = source_formats(data)
    used = set(formats.values())
    require(
        formats.get("python", "text") == "text",
        f'data.format = {show(data.format)}, but data.source = "python" is text; write '
        'data.format = "text"',
    )
    users = {
        "text_field": {"text"},
        "messages_field": {"messages"},
        "loss_on": {"messages", "prompt_completion"},
        "chat_template": {"messages", "prompt_completion"},
        "chat_template_kwargs": {"messages", "prompt_completion"},
    }
    for name, formats_of_key in users.items():
        value = getattr(data, name)
        default = getattr(Data(), name)
        require(
            value == default or bool(used & formats_of_key),
            f"data.{name} = {show(value)} would be ignored with data.format = {show(data.format)}; "
            f"write data.{name} = {show(default)}, or a data.format that uses it",
        )
    require(
        not data.split_special_tokens or used == {"text"},
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
    require(
        shard == -1 or shard >= 1,
        f"parallelism.dp_shard = {shard} is no degree; write -1 (what is left) or 1 or more",
    )
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


def _check_optimizer(optimizer: Optimizer) -> None:
    require(
        optimizer.lr > 0,
        f"optimizer.lr = {optimizer.lr} is not positive; write for example 3e-4",
    )
    require(
        optimizer.eps > 0,
        f"optimizer.eps = {optimizer.eps} is not positive; write for example 1e-8",
    )
    require(
        optimizer.name != "SGD" or optimizer.implementation != "fused",
        'optimizer.implementation = "fused" does not exist for sharded parameters with '
        'optimizer.name = "SGD"; write optimizer.implementation = "auto"',
    )
    for name in ("beta1", "beta2"):
        value = getattr(optimizer, name)
        require(
            0 <= value < 1,
            f"optimizer.{name} = {value} is not in [0, 1); write for example 0.9",
        )
    for name in ("beta1", "beta2", "eps"):
        value = getattr(optimizer, name)
        default = getattr(Optimizer(), name)
        require(
            optimizer.name != "SGD" or value == default,
            f'optimizer.{name} = {value} would be ignored with optimizer.name = "SGD"; '
            f"write optimizer.{name} = {default} or another optimizer.name",
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
        for name in ("recipe", "filter"):
            value = getattr(float8, name)
            default = getattr(Float8(), name)
            require(
                value == default,
                f"float8.{name} = {show(value)} would be ignored with float8.enable = false; write "
                f"float8.enable = true or float8.{name} = {show(default)}",
            )
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


def _check_lr_scheduler(scheduler: LRScheduler, steps: int) -> None:
    ratio = scheduler.decay_ratio
    factor = scheduler.min_lr_factor
    require(
        0 <= factor <= 1,
        f"lr_scheduler.min_lr_factor = {factor} is not in [0, 1]; write for example 0.1",
    )
    require(
        ratio == -1 or 0 <= ratio <= 1,
        f"lr_scheduler.decay_ratio = {ratio} is neither -1 nor in [0, 1]; "
        "write -1 or for example 0.2",
    )
    total = scheduler.total_steps or steps
    source = "lr_scheduler.total_steps" if scheduler.total_steps else "training.steps"
    require(
        scheduler.warmup_steps <= total,
        f"lr_scheduler.warmup_steps = {scheduler.warmup_steps} is above {source} "
        f"= {total}; write lr_scheduler.warmup_steps = {total} or less",
    )


def _check_run(config: Config) -> None:
    """The sections about the run itself: compile, checkpoint, profiling."""
    one_of("compile.backend", config.compile.backend, ("inductor", "aot_eager", "eager"))
    require(
        config.checkpoint.keep_latest_k != 1,
        "checkpoint.keep_latest_k = 1 is unsafe: a damaged checkpoint needs another before it; "
        "write 0 (all) or 2 or more",
    )
    factor = config.guard.spike_factor
    require(
        factor == 0 or factor > 1,
        f"guard.spike_factor = {show(factor)} would call usual steps spikes; write a number above 1, or 0 "
        "for no limit",
    )
    for name, unset in (("load_step", -1), ("initial_load_path", ""), ("last_save_in_hf", False)):
        value = getattr(config.checkpoint, name)
        require(
            config.checkpoint.enable or value == unset,
            f"checkpoint.{name} = {show(value)} would be ignored with checkpoint.enable = false; "
            f"write checkpoint.enable = true or checkpoint.{name} = {show(unset)}",
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
    seq_len = config.training.seq_len
    lengths = needle_lengths(validation)
    for name, default in vars(Validation()).items():
        value = getattr(validation, name)
        require(
            validation.enable or value == default,
            f"validation.{name} = {show(value)} would be ignored with validation.enable = false; "
            f"write validation.enable = true or validation.{name} = {show(default)}",
        )
        require(
            lengths or value == default or name not in ("needle_depths", "needle_samples"),
            f'validation.{name} = {value} would be ignored with validation.needle_lengths = ""; '
            'write lengths, such as "4096"',
        )
    if not validation.enable:
        return
    require(
        validation.position_buckets <= seq_len,
        f"validation.position_buckets = {validation.position_buckets} is above training.seq_len = "
        f"{seq_len}; write {seq_len} or less",
    )
    source = single_source(validation.source or config.data.source, "validation.source")
    require(
        not validation.split or source != "python",
        f"validation.split = {show(validation.split)} would be ignored with the source "
        '"python"; write validation.split = "" or another validation.source',
    )
