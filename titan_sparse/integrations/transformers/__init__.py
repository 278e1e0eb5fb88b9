"""attend() as an attn_implementation of any decoder of Hugging Face transformers.

    from titan_sparse.integrations.transformers import AttentionSettings, register

    register(AttentionSettings(pattern=VerticalSlash(recall=0.95)))
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="titan_sparse")

Raises ImportError, in one line, where transformers is missing.
"""

from titan_sparse.options.extras import is_installed

if not is_installed("transformers"):
    raise ImportError(
        "titan_sparse.integrations.transformers needs transformers; "
        'write pip install "titan-sparse[huggingface]"'
    )

from titan_sparse.integrations.transformers.attention import keep_attention, register
from titan_sparse.integrations.transformers.masks import AttentionMask, AttentionSettings

__all__ = ["AttentionMask", "AttentionSettings", "keep_attention", "register"]
