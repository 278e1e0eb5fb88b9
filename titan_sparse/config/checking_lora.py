"""What adapters (the [lora] section) cannot be combined with."""

from titan_sparse.config.reading import ConfigError, require, show
from titan_sparse.config.sections import Config, Lora
from titan_sparse.models.flavours import resolve
from titan_sparse.models.lora_config import resolve_adapters


def check_lora(config: Config) -> None:
    """Raises ConfigError, one line, for an [lora] section that is not possible or would do nothing."""
    lora = config.lora
    if lora.rank == 0:
        _check_unused(lora)
        return
    require(
        lora.dropout < 1,
        f"lora.dropout = {show(lora.dropout)} is not in [0, 1); write for example 0.05",
    )
    try:
        resolve_adapters(resolve(**vars(config.model)), **vars(lora))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _check_first_weights(config)
    _check_levers(config)


def trains_random_base(config: Config) -> bool:
    """Whether the frozen weights are drawn from training.seed, and not read from model.initial_hf."""
    return config.model.random_weights or not config.model.initial_hf


def _check_unused(lora: Lora) -> None:
    for name, default in vars(Lora()).items():
        value = getattr(lora, name)
        require(
            value == default,
            f"lora.{name} = {show(value)} would be ignored with lora.rank = 0; write a rank, such "
            f"as lora.rank = 16, or lora.{name} = {show(default)}",
        )


def _check_first_weights(config: Config) -> None:
    """Where frozen weights come from: checkpoints hold adapters alone."""
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


def _check_levers(config: Config) -> None:
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
