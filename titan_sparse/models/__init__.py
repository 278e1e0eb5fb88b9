"""One decoder for Llama-3.1, Qwen2.5 and Qwen3. Kept free of imports so that flavours load without torch."""
