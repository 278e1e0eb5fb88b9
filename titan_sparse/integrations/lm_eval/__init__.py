"""The model "titan_sparse" of lm-eval (pip install -e ".[eval]"): its tasks on our checkpoints.

    python -m titan_sparse.integrations.lm_eval --model titan_sparse \\
        --model_args checkpoint=outputs/run --tasks TASKS

This is lm_eval's own command line, with our model registered. model.py has the arguments.
"""

try:
    import lm_eval  # noqa: F401
except ImportError as error:
    raise ImportError('lm_eval cannot be imported; pip install -e ".[eval]"') from error

from titan_sparse.integrations.lm_eval.model import TitanSparseLM

__all__ = ["TitanSparseLM"]
