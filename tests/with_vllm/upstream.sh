#!/usr/bin/env bash
# upstream.sh FOLDER PYTHON : vLLM's own scheduler-side tests, unpacked from the source package of 0.32.0 into FOLDER and
# re-pointed at LamellaConnector (repointed.py). The wheel has no tests, so pip unpacks the source package and then fails
# to prepare it for want of build tools; --no-clean leaves the tree. Needs pytest-asyncio and tblib beside pytest.
# Of the general scheduler tests those that have a connector, except with a mock that answers in its place.
set -uo pipefail
folder=${1:?usage: upstream.sh FOLDER PYTHON}
python=${2:?usage: upstream.sh FOLDER PYTHON}
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$folder" && folder=$(cd "$folder" && pwd)
if [ ! -d "$folder/tests" ]; then
    scratch=$(mktemp -d "$folder/sdist.XXXXXX")
    trap 'rm -rf "$scratch"' EXIT
    TMPDIR=$scratch "$python" -m pip download --no-clean --no-deps --no-build-isolation --no-binary=vllm \
        -d "$scratch/out" vllm==0.32.0 >"$scratch/log" 2>&1
    source=$(ls -d "$scratch"/pip-download-*/vllm_*/ 2>/dev/null | head -1)
    if [ -z "$source" ]; then
        tail -5 "$scratch/log" >&2
        exit 1
    fi
    cp -r "$source/tests" "$source/pyproject.toml" "$folder"/
    # The tests' default model: only its config is read, and a relative path that exists wins over the hub.
    mkdir -p "$folder/facebook/opt-125m"
    cat >"$folder/facebook/opt-125m/config.json" <<'JSON'
{"activation_function":"relu","architectures":["OPTForCausalLM"],"bos_token_id":2,"do_layer_norm_before":true,"dropout":0.1,"eos_token_id":2,"ffn_dim":3072,"hidden_size":768,"max_position_embeddings":2048,"model_type":"opt","num_attention_heads":12,"num_hidden_layers":12,"pad_token_id":1,"torch_dtype":"float16","vocab_size":50272,"word_embed_proj_dim":768}
JSON
fi
unit=$folder/tests/v1/kv_connector/unit
core=$folder/tests/v1/core
sed -i 's|kv_connector: str = "NixlConnector",|kv_connector: str = "RepointedConnector",|;
        s|kv_connector_module_path=kv_connector_module_path,|kv_connector_module_path=kv_connector_module_path or ("with_vllm.repointed" if kv_connector == "RepointedConnector" else None),|' "$unit/utils.py"
sed -i 's|if isinstance(use_kv_connector, MockKVConfig):|if isinstance(use_kv_connector, MockKVConfig) and use_kv_connector.matched_tokens:|;
        s|kv_connector="ExampleConnector",|kv_connector="RepointedConnector", kv_connector_module_path="with_vllm.repointed",|;
        s|kv_connector_extra_config={"shared_storage_path": "local_storage"},||' "$core/utils.py" "$core/test_scheduler.py"
mapfile -t left_out < <(sed -n 's/^[a-z-]* \(tests\/.*\)$/--deselect=\1/p' "$here/upstream_differences.txt")
cd "$folder"
export HF_HUB_OFFLINE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1
PYTHONPATH=$here/..${PYTHONPATH:+:$PYTHONPATH} "$python" -m pytest -q -p no:cacheprovider -p no:logging --disable-warnings \
    --tb=line "${left_out[@]}" "$unit"/test_{remote_prefill_lifecycle,remote_decode_lifecycle,kv_connector_lifecycle}.py \
    "$unit"/test_{cache_pollution_prevention,error_propagation,invalid_blocks_correctness,kv_load_failure_recovery}.py \
    "$unit"/test_{output_aggregator,scheduler_kv_connector_override}.py \
    "$core"/test_async_scheduler.py::test_{connector_metadata_precedes_async_placeholder_advance,kv_pressure_preempt_mid_handoff} \
    "$core"/test_async_scheduler.py::test_requires_kv_delivery_defaults_to_producer_role \
    "$core"/test_deferred_block_free.py::test_gate_enabled_for_async_consumer \
    "$core"/test_scheduler.py::test_{abort_request_finished_recving,abort_request_waiting_for_remote_kvs} \
    "$core"/test_scheduler.py::test_{delayed_kv_connector_free_keeps_scheduler_active,prepend_skipped_requests_order} \
    "$core"/test_scheduler.py::test_{prefix_cache_query_not_inflated_by_connector_defer,priority_scheduling_preemption_and_resumption_when_out_of_kv}
