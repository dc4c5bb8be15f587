"""`RecordingConnector`: LamellaConnector that writes down when what happened, for `lamella explain` and Perfetto.

    LAMELLA_RECORD=/tmp/run vllm serve MODEL --kv-transfer-config '{"kv_connector": "RecordingConnector",
        "kv_connector_module_path": "lamella.connector.vllm_recording", ...}'
    lamella explain slowest --trace /tmp/run

It decides nothing: every call goes on to `LamellaConnector`. What it costs is a line a step and a request, and on a GPU
two events a layer while something is landing. There steps and waits are timed on the stream that computes, and tied to
the host's clock once, before the first step. What a replayed step waits, before its graph or inside, is not told apart
from its own time: `full_graphs: never` shows every wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from lamella.connector.observations import marks_of
from lamella.connector.run_log import SCHEDULER_LOG, RunLog, record_folder
from lamella.connector.step_clock import StepClock, TimedStep
from lamella.connector.step_orders import LoadOrder
from lamella.connector.vllm import LamellaConnector, LamellaOrders
from lamella.connector.vllm_worker import WorkerSide
from lamella.cuda_ext.transfer import Arriving


class RecordingWorker(WorkerSide):
    """A worker side that keeps the transfer of each load until it has been written down."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.transfers: dict[int, tuple[LoadOrder, Arriving]] = {}
        super().__init__(*arguments, **named)
        self.marks = marks_of(self._device)
        mark = self.marks.mark()
        if self._device.startswith("cuda"):
            import torch

            torch.cuda.synchronize(self._device)
        self.clock = StepClock(self.marks, mark, time.monotonic_ns())

    def _submit_load(self, order: LoadOrder) -> Callable[[], Arriving]:
        submit = super()._submit_load(order)

        def submit_and_keep() -> Arriving:
            transfer = submit()
            self.transfers[order.number] = (order, transfer)
            return transfer

        return submit_and_keep


class RecordingConnector(LamellaConnector):
    """See the module.

    Raises:
        ValueError: as `LamellaConnector`, or no folder named.
        OSError: the folder cannot be written.
    """

    _worker_side = RecordingWorker

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        folder = record_folder()
        self._steps: deque[TimedStep] = deque()
        self._seen: set[str] = set()
        if role is KVConnectorRole.SCHEDULER:
            self._log = RunLog(folder / SCHEDULER_LOG)
            settings = self.settings
            self._log.write(
                "engine",
                system=f"{vllm_config.model_config.model} in vLLM",
                strategy=f"{settings.order}/{settings.layers_per_slice}/{settings.release or 'first'}",
            )
        else:
            self._log = RunLog(folder / f"worker-{vllm_config.parallel_config.rank}.jsonl")

    # ---- the worker's hooks

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """As `LamellaConnector`, with a worker side that keeps its transfers."""
        super().register_kv_caches(kv_caches)
        if self.worker is not None:
            self._log.write("caches", num_layers=self.worker.caches.layout.num_layers)

    def bind_connector_metadata(self, connector_metadata: LamellaOrders) -> None:
        """A step begins."""
        if isinstance(self.worker, RecordingWorker):
            self._write_computed()
            self._steps.append(TimedStep(self.worker.marks.mark()))
        super().bind_connector_metadata(connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """How long the layer was waited for, if any load could have been."""
        worker = self.worker
        layer = worker.caches.layers.get(layer_name) if worker is not None and worker.loads.gated else None
        if layer is None or not isinstance(worker, RecordingWorker) or not self._steps:
            super().wait_for_layer_load(layer_name)
            return
        begun = worker.marks.mark()
        super().wait_for_layer_load(layer_name)
        self._steps[-1].waits.append((layer, begun, worker.marks.mark()))

    def wait_for_save(self) -> None:
        """The step's forward pass has been launched."""
        if isinstance(self.worker, RecordingWorker) and self._steps:
            self._steps[-1].end = self.worker.marks.mark()
        super().wait_for_save()
        self._write_landed()

    def _write_computed(self) -> None:
        """Steps that the device has done with are written down, in order."""
        assert isinstance(self.worker, RecordingWorker), "steps are timed where caches are"
        while self._steps:
            step = self._steps[0]
            if step.end is None:
                self._log.write("step_empty")
            else:
                found = self.worker.clock.resolve(step)
                if found is None:
                    return
                begin_ns, waits, end_ns = found
                self._log.write("step", began_ns=begin_ns, ended_ns=end_ns, waits=waits)
            self._steps.popleft()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Called in every step, also in those that compute nothing."""
        self._write_landed()
        return super().get_block_ids_with_load_errors()

    def shutdown(self) -> None:
        """What landed last is written down as well."""
        self._write_landed()
        if isinstance(self.worker, RecordingWorker):
            if self._steps and str(self.worker._device).startswith("cuda"):
                import torch

                torch.cuda.synchronize(self.worker._device)
            self._write_computed()
        super().shutdown()
        self._log.close()

    def _write_landed(self) -> None:
        if not isinstance(self.worker, RecordingWorker):
            return
        for number, (order, transfer) in list(self.worker.transfers.items()):
            progress = transfer.query()
            if not progress.state.is_final:
                continue
            del self.worker.transfers[number]
            self._log.write(
                "load",
                request=order.request,
                tokens=order.num_tokens - order.skip_tokens,
                state=progress.state.name,
                submitted_ns=progress.submitted_ns,
                started_ns=progress.started_ns,
                num_bytes=transfer.num_bytes,
                slices=[[part.first_layer, part.num_layers] for part in transfer.slices],
                landed_ns=list(transfer.timestamps_ns().landed_ns),
            )

    # ---- the scheduler's hooks

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The first question about a request says that the engine has it."""
        if request.request_id not in self._seen:
            self._seen.add(request.request_id)
            ago_ns = max(0, time.time_ns() - round(request.arrival_time * 1e9))
            self._log.write(
                "admitted",
                request=request.request_id,
                prompt_tokens=request.num_prompt_tokens,
                arrived_ns=time.monotonic_ns() - ago_ns,
            )
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> LamellaOrders:
        """A step has formed: (request, tokens there, tokens to compute) of its members."""
        new = scheduler_output.num_scheduled_tokens
        cached = scheduler_output.scheduled_cached_reqs
        members = [(one.req_id, one.num_computed_tokens) for one in scheduler_output.scheduled_new_reqs]
        members += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        self._log.write("scheduled", batch=[[name, computed, new[name]] for name, computed in members])
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Requests received are let go here."""
        super().update_connector_output(connector_output)
        received = connector_output.finished_recving
        if received:
            self._log.write("released", requests=sorted(received))
