"""What vllm_step_times.py measures: its cells, and the model as a Hugging Face config."""

CACHED = (0, 1024, 4096, 8192, 15152, 32768, 65536, 131072)
NEW = (16, 64, 256, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (128, 1024, 4096, 16384, 65536, 131072)
BATCHED = (
    (2, 0, 512),
    (4, 0, 512),
    (2, 0, 2048),
    (4, 0, 2048),
    (2, 15152, 512),
    (4, 15152, 512),
    (2, 15152, 2048),
    (4, 15152, 2048),
    (4, 4096, 64),
    (4, 65536, 64),
)  # (requests, cached, new) in one step
MIXED = (
    (8, 0, 512),
    (8, 15152, 512),
    (8, 15152, 2048),
    (32, 0, 512),
    (32, 15152, 512),
    (32, 0, 2048),
    (32, 15152, 2048),
    (32, 4096, 7936),
    (64, 15152, 2048),
)  # (decodes at 4096 tokens of context, cached, new)
REAL_HITS = ((4096, 512), (15152, 1024), (32768, 2048), (65536, 256))
MIXED_CONTEXT = 4096
BLOCK_TOKENS = 16
KV_BYTES_PER_TOKEN = 2 * 32 * 8 * 128 * 2
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 147456,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128009,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "use_cache": True,
}
