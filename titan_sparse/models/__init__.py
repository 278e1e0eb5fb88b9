"""Decoders: our own for Llama-3.1, Qwen2.5 and Qwen3 (decoder.py), and one made of transformers'
modules for other families (transformers_decoder.py). This file does not load torch, so
that flavours do without it."""

from titan_sparse.options.extras import need_here

need_here("train")
