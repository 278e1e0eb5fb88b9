"""The model "titan_sparse" of lm-eval (pip install "titan-sparse[eval]"): its
tasks on our checkpoints.

    python -m titan_sparse.integrations.lm_eval --model titan_sparse \\
        --model_args checkpoint=outputs/run --tasks TASKS

This is lm_eval's own command line, with our model registered. model.py has the arguments.
"""

from titan_sparse.options.extras import need_here

need_here("train")
need_here("eval")

from titan_sparse.integrations.lm_eval.model import TitanSparseLM

__all__ = ["TitanSparseLM"]
