"""Modules that may refuse to import without an extra, and the package that it brings; no other module may."""

NEEDS_AN_EXTRA = {
    "lamella.connector.torch_stream": "torch",
    "lamella.cuda_ext.torch": "torch",
    "lamella.connector.vllm": "vllm",
    "lamella.connector.vllm_engine": "vllm",
    "lamella.connector.vllm_stats": "vllm",
}
