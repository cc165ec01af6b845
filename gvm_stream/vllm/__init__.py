"""Everything that imports vLLM, and what must happen before that."""
