"""Modules that may refuse to import without an extra, and the package that it brings; no other module may."""

NEEDS_AN_EXTRA = {
    "lamella.connector.blend": "torch",
    "lamella.connector.blend_rotation": "torch",
    "lamella.connector.blend_tensors": "torch",
    "lamella.connector.blend_times": "torch",
    "lamella.connector.torch_stream": "torch",
    "lamella.cuda_ext.torch": "torch",
    "lamella.connector.vllm": "vllm",
    "lamella.connector.vllm_engine": "vllm",
    "lamella.connector.vllm_recording": "vllm",
    "lamella.connector.vllm_stats": "vllm",
    **{
        f"lamella.server.{name}": "msgspec"
        for name in (
            *(
                "adapters",
                "back_end",
                "bench",
                "client",
                "connection",
                "engine_mover",
                "engine_objects",
                "frames",
                "handlers",
                "lending",
                "loop",
                "metrics",
                "mover",
                "moves",
            ),
            *(
                "protocol",
                "rank",
                "rank_mover",
                "rank_stores",
                "sequences",
                "server_side",
                "service",
                "sessions",
                "shapes",
                "tcp",
            ),
            *("wire", "worker", "worker_side"),
        )
    },
}
