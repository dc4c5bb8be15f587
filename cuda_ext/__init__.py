"""The movement: executes transfer plans on host memory and on CUDA devices."""

if __name__ != "lamella.cuda_ext":
    raise ImportError(f"import lamella.cuda_ext, not {__name__}: a second module object would have its own types")
