"""Which test files may notice a fault in a source file."""

_SAVES = [
    "tests/training/checkpoint/test_checkpointer.py",
    "tests/training/checkpoint/test_saver.py",
    "tests/training/checkpoint/test_lock.py",
    "tests/training/checkpoint/test_reader.py",
    "tests/training/checkpoint/test_resuming.py",
    "tests/training/checkpoint/test_background.py",
    "tests/training/checkpoint/test_disk.py",
    "tests/training/checkpoint/test_folders.py",
    "tests/training/checkpoint/test_planning.py",
    "tests/training/checkpoint/test_process.py",
    "tests/training/checkpoint/test_progress.py",
    "tests/training/checkpoint/test_ranks.py",
    "tests/training/checkpoint/test_staging.py",
    "tests/training/checkpoint/test_writer.py",
]
_RUNS = [
    "tests/training/test_trainer_parts.py",
    "tests/training/test_trainer_step.py",
    "tests/training/test_trainer_run.py",
    "tests/training/test_trainer_starts.py",
    "tests/training/test_wiring_counts.py",
    "tests/training/test_wiring.py",
    "tests/training/test_wiring_precision.py",
    "tests/training/test_start.py",
    "tests/training/test_resumption.py",
    "tests/training/test_timeouts.py",
    "tests/training/test_metrics.py",
    "tests/training/test_poison.py",
    "tests/training/test_stopping.py",
    "tests/training/checkpoint/test_resuming.py",
    "tests/evaluation/test_validation.py",
    "tests/test_trainer.py",
]
_GUARD = [
    "tests/training/test_guard.py",
    "tests/training/test_guard_numbers.py",
    "tests/training/test_recovery.py",
    "tests/training/test_poison.py",
]
_DATA = [
    "tests/data/test_loader.py",
    "tests/data/test_stream.py",
    "tests/data/test_text_samples.py",
    "tests/data/test_packing.py",
    "tests/data/test_rows.py",
    "tests/data/test_sources.py",
    "tests/data/test_shards.py",
    "tests/training/checkpoint/test_resuming.py",
    "tests/evaluation/test_position.py",
]
_ROPE = [
    "tests/models/test_rope.py",
    "tests/models/test_huggingface.py",
    "tests/models/test_huggingface_refusals.py",
    "tests/models/test_huggingface_oddities.py",
]
_CHECKPOINT = "titan_sparse/training/checkpoint"

TESTS: dict[str, list[str]] = {
    "titan_sparse/trainer.py": _RUNS,
    "titan_sparse/training/optimizer.py": [
        "tests/training/test_optimizer_settings.py",
        "tests/training/test_optimizer.py",
        *_RUNS,
    ],
    "titan_sparse/training/parallelize.py": [
        "tests/training/test_parallelize.py",
        "tests/training/test_sharded_decoder.py",
        *_RUNS,
    ],
    f"{_CHECKPOINT}/checkpointer.py": [*_SAVES, "tests/training/test_poison.py"],
    f"{_CHECKPOINT}/disk.py": _SAVES,
    f"{_CHECKPOINT}/folders.py": _SAVES,
    f"{_CHECKPOINT}/lock.py": _SAVES,
    f"{_CHECKPOINT}/planning.py": _SAVES,
    f"{_CHECKPOINT}/process.py": _SAVES,
    f"{_CHECKPOINT}/progress.py": [*_SAVES, "tests/training/test_stopping.py"],
    f"{_CHECKPOINT}/reader.py": _SAVES,
    f"{_CHECKPOINT}/saver.py": _SAVES,
    f"{_CHECKPOINT}/staging.py": _SAVES,
    f"{_CHECKPOINT}/state.py": _SAVES,
    f"{_CHECKPOINT}/writer.py": _SAVES,
    "titan_sparse/loss.py": ["tests/test_loss.py"],
    "titan_sparse/models/decoder.py": _ROPE,
    "titan_sparse/data/loader.py": _DATA,
    "titan_sparse/data/stream.py": _DATA,
    "titan_sparse/data/packing.py": _DATA,
    "titan_sparse/training/guard.py": _GUARD,
    "titan_sparse/training/recovery.py": _GUARD,
}
