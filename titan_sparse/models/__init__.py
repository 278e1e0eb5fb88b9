"""Decoders: our own for Llama-3.1, Qwen2.5 and Qwen3 (decoder.py), and one made of transformers'
modules for other families (transformers_decoder.py). This file imports nothing, so that flavours
load without torch."""
