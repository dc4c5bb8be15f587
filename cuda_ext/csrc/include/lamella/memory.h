/* Memory and raw copies of one device: what the pool, the benchmarks and the calibration need beside the engine.
 * Included by lamella.h, never alone.
 *
 * liblamella_cuda does this on CUDA device `ordinal`, liblamella_cpu on host memory (it takes ordinal 0 only). Every
 * function sets the device first, so none of them leaves a context on another one. All of them return when the work is
 * done and use no default stream.
 */
#ifndef LAMELLA_MEMORY_H
#define LAMELLA_MEMORY_H

#ifdef __cplusplus
extern "C" {
#endif

/* Host pages become reachable for the device's copy engines and kernels, or no longer. Whole pages. */
LM_API lm_status lm_host_register(int32_t ordinal, uint64_t address, int64_t num_bytes);
LM_API lm_status lm_host_unregister(int32_t ordinal, uint64_t address);

typedef struct lm_device_facts {
  char name[256];
  char pci_bus_id[32]; /* "" for the CPU */
  int64_t free_bytes;
  int64_t total_bytes;
  int32_t driver_version; /* as the CUDA runtime counts, 13000 for 13.0; 0 for the CPU */
  int32_t multiprocessors;
} lm_device_facts;

LM_API lm_status lm_device_facts_of(int32_t ordinal, lm_device_facts *facts);

LM_API lm_status lm_memory_allocate(int32_t ordinal, int64_t num_bytes, uint64_t *address);
LM_API lm_status lm_memory_free(int32_t ordinal, uint64_t address);
LM_API lm_status lm_memory_fill(int32_t ordinal, uint64_t address, int32_t byte, int64_t num_bytes);
/* Any combination of host and device addresses. */
LM_API lm_status lm_memory_copy(int32_t ordinal, uint64_t to, uint64_t from, int64_t num_bytes);

typedef enum lm_probe_method {
  LM_PROBE_WHOLE = 0,  /* one copy of num_runs * run_bytes bytes */
  LM_PROBE_BATCH = 1,  /* batched copies, a run an entry, at the offsets given */
  LM_PROBE_STRIDED = 2 /* one 2-D copy, at the pitches given */
} lm_probe_method;

/* A raw copy between registered host memory and device memory. */
typedef struct lm_probe {
  int32_t direction; /* lm_direction */
  int32_t method;    /* lm_probe_method */
  uint64_t host;
  uint64_t device;
  int64_t num_runs;
  int64_t run_bytes;
  const int64_t *host_offsets; /* [num_runs], LM_PROBE_BATCH */
  const int64_t *device_offsets;
  int64_t host_pitch; /* LM_PROBE_STRIDED */
  int64_t device_pitch;
  int32_t batch_entries; /* most entries of one batched copy */
  int32_t batch_flags;   /* cudaMemcpyFlags */
} lm_probe;

typedef struct lm_probe_time {
  int64_t copy_ns;  /* from the common start until this copy's end, on the device's clock */
  int64_t issue_ns; /* host time of enqueueing it */
} lm_probe_time;

/* Starts all probes at once, each on a stream of its own, and waits for them. CPU: one thread a probe. */
LM_API lm_status lm_probe_run(int32_t ordinal, const lm_probe *probes, int32_t num_probes, lm_probe_time *times);

#ifdef __cplusplus
}
#endif

#endif /* LAMELLA_MEMORY_H */
