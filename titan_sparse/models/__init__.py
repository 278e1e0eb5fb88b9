"""One decoder for Llama-3.1, Qwen2.5 and Qwen3. Imports nothing, so that flavours load without
torch."""
