from gvm_stream.vllm.environment import hide_unmatched

hide_unmatched()  # before anything imports transformers
