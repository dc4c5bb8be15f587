#!/usr/bin/env bash
# What Lamella does, in a few minutes on a CPU. `make demo` runs it; by itself it wants `lamella` and `python` on PATH.
# Set LAMELLA_TRACE to a trace in Mooncake's format to replay real traffic instead of a generated sample.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${1:-out/demo}
if [ -n "${LAMELLA_TRACE:-}" ] && { [ -d "$LAMELLA_TRACE" ] || [ ! -r "$LAMELLA_TRACE" ]; }; then
    echo "LAMELLA_TRACE is no file that can be read: $LAMELLA_TRACE" >&2
    exit 2
fi
mkdir -p "$out"

title() {
    if [ -t 1 ]; then printf '\n\033[1m== %s\033[0m\n' "$*"; else printf '\n== %s\n' "$*"; fi
}

title "This machine (lamella doctor)"
lamella doctor

title "A small Llama whose KV leaves for host memory and comes back slice by slice (examples/llama_layer_loop.py)"
if python -c 'import torch' 2>/dev/null; then
    python "$here/llama_layer_loop.py"
    echo "and with the wait for each layer's own slice removed, which must fail:"
    if python "$here/llama_layer_loop.py" --no-wait; then
        echo "the layers did not need their waits: the example proves nothing" >&2
        exit 1
    fi
else
    echo "left out: torch is not installed here (no CPU build was to be had)"
fi

title "Every slice width leaves exactly the bytes it must, on real models' shapes (lamella verify)"
lamella verify --model llama-3.1-8b --layout packed-nhd
echo
for shape in "llama-3.1-70b --tensor-parallel 8" "qwen3-32b --tensor-parallel 4 --layout kv-nb-h-bs-d" \
    "deepseek-v3" "gemma-3-27b --tensor-parallel 8"; do
    read -ra options <<<"$shape"
    printf '%-62s ' "--model $shape" # now: what follows takes some seconds
    if ! report=$(lamella verify --model "${options[@]}" --width 1 --width 8 2>&1); then
        printf '\n%s\n' "$report"
        exit 1
    fi
    tail -n 1 <<<"$report"
done

title "Before deploying: does it pay in this regime? (lamella simulate)"
lamella simulate --out "$out"

title "And where does it? The regime map on an H200's profile (lamella sweep)"
lamella sweep --out "$out"

title "On a trace: chunk-major against the layerwise policies (lamella replay)"
if [ -n "${LAMELLA_TRACE:-}" ]; then
    echo "replaying $LAMELLA_TRACE"
else
    echo "LAMELLA_TRACE names no trace, so this is a small generated sample of conversations, not real traffic"
fi
lamella replay --json "$out/replay.json" --html "$out/replay.html"

title "Written"
printf 'pages (all of a result, with its pictures):\n'
find "$out" -name '*.html' -printf '  %p\n' | sort
printf 'pictures:\n'
find "$out" -name '*.png' -printf '  %p\n' | sort
printf 'data:\n'
find "$out" -name '*.json' -printf '  %p\n' | sort
