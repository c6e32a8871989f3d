"""The embedded CPU engine: a HF causal LM in fp32 behind continuous batching."""
