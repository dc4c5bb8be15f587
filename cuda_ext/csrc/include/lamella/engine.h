/* The transfer engine's part of the C ABI.
 *
 * An engine owns one lane a direction: a native thread, its streams and its part of the staging ring. Transfers are
 * submitted from any thread and run on their lane; every function here may be called from any thread. The caller keeps
 * host objects and caches alive until the transfer has drained (a final state), which lm_engine_next_drained reports.
 */
#ifndef LAMELLA_ENGINE_H
#define LAMELLA_ENGINE_H

#include "lamella/lamella.h"

#ifdef __cplusplus
extern "C" {
#endif

/* More values of lm_status, returned by the functions of this header only. */
#define LM_TIMEOUT 4 /* the bound given has passed; nothing changed */
#define LM_STOPPED 5 /* the transfer failed or was cancelled; the message says why */

typedef struct lm_engine lm_engine;
typedef struct lm_transfer lm_transfer;
typedef struct lm_fence lm_fence;

typedef enum lm_device { LM_DEVICE_CPU = 0, LM_DEVICE_CUDA = 1 } lm_device;

/* How a slice's bytes move. */
typedef enum lm_copy_method {
  LM_COPY_AUTO = 0,
  LM_COPY_STAGED_BATCH = 1,  /* batched copies into the staging ring, one scatter a window */
  LM_COPY_STAGED_2D = 2,     /* rows of one stride merge into 2-D copies, then as above */
  LM_COPY_DIRECT_BATCH = 3,  /* batched copies straight into blocks, no kernel */
  LM_COPY_GATHER = 4         /* a kernel reads the mapped host memory (CPU device: one pass, no staging) */
} lm_copy_method;

typedef enum lm_carrier { LM_CARRIER_EVENT = 0, LM_CARRIER_VALUE = 1 } lm_carrier;

typedef enum lm_state {
  LM_QUEUED = 0,
  LM_RUNNING = 1,
  LM_LANDED = 2,    /* this and what follows are final: nothing of it is in flight */
  LM_CANCELLED = 3,
  LM_FAILED = 4
} lm_state;

/* What the copy method is chosen by: a calibrated device. */
typedef struct lm_rates {
  double wire_bytes_per_s;   /* one long pinned copy */
  double gather_bytes_per_s; /* a kernel that reads mapped memory */
  int64_t copy_2d_ns;        /* host time of one 2-D copy */
  int64_t num_points;        /* of the three arrays, ascending in run_bytes */
  const int64_t *run_bytes;
  const double *batch_bytes_per_s;   /* batched copies of runs of that length */
  const double *strided_bytes_per_s; /* 2-D copies of such rows */
} lm_rates;

typedef struct lm_engine_options {
  int32_t device;          /* lm_device */
  int32_t ordinal;         /* which CUDA device */
  int32_t carrier;         /* lm_carrier */
  int32_t num_layers;      /* most layers of a stage that will be registered */
  int64_t staging_bytes;   /* of the ring that both lanes share; at least 4 windows */
  int64_t window_bytes;    /* of one window */
  int64_t in_flight_bytes; /* bound on the wire, a lane; what has left it and waits for a kernel the ring bounds */
  int64_t turn_bytes;      /* copied until copies of others may come in between; 0: they wait for the lane's end */
  int32_t batch_entries;   /* most entries of one batched copy */
  int32_t kernel_ctas;     /* thread blocks of one scatter */
  int32_t avoid_kernels;   /* 1: this process must launch none where a copy can do */
  int32_t batch_flags;     /* cudaMemcpyFlags of a batched copy */
  int32_t paced;           /* CPU device: 1: a window moves only when granted, for tests */
  int32_t gather_factor_percent; /* AUTO gathers where copies would take so much of its time; 0: never */
  lm_rates rates;
} lm_engine_options;

/* Faults that tests plant. */
typedef enum lm_fault {
  LM_FAULT_ISSUED = 0,    /* the window fails when it is issued */
  LM_FAULT_COMPLETED = 1, /* or when it completes */
  LM_FAULT_LOST = 2,      /* the device is lost before the window is issued */
  LM_FAULT_STUCK = 3      /* the window never completes */
} lm_fault;

typedef struct lm_submission {
  int32_t cache;     /* from lm_engine_register */
  int32_t direction; /* lm_direction */
  int32_t method;    /* lm_copy_method */
  int32_t num_slices;
  const lm_slice *slices; /* in layer order, without a gap */
  const int64_t *keys;    /* [num_slices] smaller leaves earlier */
  int64_t num_tokens;
  int64_t skip_tokens;
  int64_t null_block;
  int32_t has_null_block;
  int32_t num_groups;
  const int32_t *const *block_ids; /* a table for each kernel group */
  const int32_t *num_block_ids;
  lm_host_objects objects;
  uint64_t fence_event;  /* CUDA event, recorded; 0: none */
  uint64_t fence_stream; /* CUDA stream whose work so far comes first; read where has_fence_stream is not 0 */
  int32_t has_fence_stream;
  uint32_t generation; /* of the count word; 0: the engine counts */
  lm_fence *fence;     /* CPU device; NULL: none */
  int64_t deadline_ns; /* CLOCK_MONOTONIC; the transfer fails then; 0: never */
  uint64_t token;      /* handed back when the transfer has drained */
  uint64_t board;      /* address of a 64-bit word that receives generation << 32 | recorded; 0: none */
  void (*on_drained)(void *context, uint64_t token); /* on the lane's thread, after the last byte; may be NULL */
  void *context;
} lm_submission;

typedef struct lm_progress {
  int32_t state; /* lm_state */
  int32_t num_slices;
  int32_t recorded; /* slices enqueued with their event */
  int32_t landed;   /* slices visible on the other side */
  uint32_t generation;
  int32_t method; /* lm_copy_method that runs; LM_COPY_AUTO until chosen */
  int64_t num_bytes;
  int64_t submitted_ns; /* CLOCK_MONOTONIC */
  int64_t started_ns;   /* 0 before the first window */
  int64_t num_copies;   /* entries and 2-D copies enqueued so far */
} lm_progress;

typedef struct lm_lane_status {
  int64_t thread_cpu_ns; /* processor time of the lane's thread */
  int64_t windows;
  int64_t in_flight_bytes; /* on the wire */
  int64_t peak_in_flight_bytes;
  int64_t last_key; /* of the slice begun last */
  int64_t live;     /* transfers not yet final */
} lm_lane_status;

LM_API lm_status lm_engine_create(const lm_engine_options *options, lm_engine **engine);

/* Cancels what is in flight, waits at most timeout_ns for it to drain, then ends the threads. LM_TIMEOUT: the device
 * did not drain; threads and memory are left to it, and the engine is unusable all the same. */
LM_API int32_t lm_engine_close(lm_engine *engine, int64_t timeout_ns);

/* Frees a closed engine; no transfer of it may be used afterwards. */
LM_API void lm_engine_destroy(lm_engine *engine);

/* Makes a paged cache known: form, chunk_tokens and groups (sizes, bases, strides; no block ids) of `shape`. */
LM_API lm_status lm_engine_register(lm_engine *engine, const lm_request *shape, int32_t *cache);

/* Queues a transfer and returns; everything that can fail cheaply has been checked (LM_INVALID). Structures are copied.
 * *queued receives its progress before the lane has seen it. */
LM_API int32_t lm_engine_submit(lm_engine *engine, const lm_submission *submission, lm_transfer **transfer,
                                lm_progress *queued);

/* The token of a transfer that has drained and was not reported yet; LM_TIMEOUT: none within the bound. */
LM_API int32_t lm_engine_next_drained(lm_engine *engine, int64_t timeout_ns, uint64_t *token);

LM_API lm_status lm_engine_lane_status(lm_engine *engine, int32_t direction, lm_lane_status *status);

/* The word of a layer that captured graphs wait on until it is 0, and the wait itself, to be captured on `stream`. */
LM_API lm_status lm_engine_pending_word(lm_engine *engine, int32_t layer, uint64_t *address);
LM_API lm_status lm_engine_wait_pending(lm_engine *engine, int32_t layer, uint64_t stream);

/* For tests. Paced CPU device: lets `windows` more windows of a lane move. Any device: at the lane's window `window`
 * (counted from its first) there is a fault, `when` being an lm_fault. */
LM_API lm_status lm_engine_grant(lm_engine *engine, int32_t direction, int64_t windows);
LM_API lm_status lm_engine_plant_fault(lm_engine *engine, int32_t direction, int64_t window, int32_t when);

LM_API lm_status lm_transfer_progress(lm_transfer *transfer, lm_progress *progress);

/* Waits until the transfer is final. */
LM_API int32_t lm_transfer_wait(lm_transfer *transfer, int64_t timeout_ns);

/* `stream` goes on only after `layer` has landed. Waits on the host, at most timeout_ns, only for what must be recorded
 * first, and says for how long. CPU device: the caller itself waits until the layer has landed. */
LM_API int32_t lm_transfer_wait_layer(lm_transfer *transfer, int32_t layer, uint64_t stream, int64_t timeout_ns,
                                      int64_t *host_wait_ns);

/* Waits on the host until `slices` slices are recorded (landed = 0) or landed (1). */
LM_API int32_t lm_transfer_wait_slices(lm_transfer *transfer, int32_t slices, int32_t landed, int64_t timeout_ns);

/* From now on graphs replayed behind `stream` wait, layer by layer, for what has not landed. */
LM_API int32_t lm_transfer_gate(lm_transfer *transfer, uint64_t stream, int64_t timeout_ns);

/* Stops issuing; the transfer is final once what is in flight has drained. Nothing happens to a final one. */
LM_API lm_status lm_transfer_cancel(lm_transfer *transfer);

/* [num_slices] CLOCK_MONOTONIC of each slice, 0 where it has not happened. */
LM_API lm_status lm_transfer_timestamps(lm_transfer *transfer, int64_t *recorded_ns, int64_t *landed_ns);

/* Copies the reason of a failed transfer, "" for others. */
LM_API lm_status lm_transfer_error(lm_transfer *transfer, char *text, int64_t capacity);

/* Gives the handle back; the transfer itself goes on. */
LM_API void lm_transfer_release(lm_transfer *transfer);

/* A fence of the CPU device: closed until it is signalled. */
LM_API lm_status lm_fence_create(lm_fence **fence);
LM_API lm_status lm_fence_signal(lm_fence *fence);
LM_API void lm_fence_release(lm_fence *fence);

#ifdef __cplusplus
}
#endif

#endif /* LAMELLA_ENGINE_H */
