"""A GGUF file as a folder that transformers reads: config.json, the tokenizer, and the small tensors."""
