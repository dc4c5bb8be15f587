/* Lamella's C ABI: the one header of liblamella_cpu and liblamella_cuda.
 *
 * Plain C, raw pointers and sizes; no framework, no exception and no ownership crosses it. Every function that can fail
 * returns an lm_status; the sentence that says why is then lm_last_error() of the same thread. Addresses travel as
 * 64-bit integers, because an engine's memory may be host or device memory. Structures are read during the call only,
 * unless a function says otherwise.
 *
 * Python declares the same structures in lamella/cuda_ext/_library.py; a test compares their sizes and offsets.
 */
#ifndef LAMELLA_LAMELLA_H
#define LAMELLA_LAMELLA_H

#include <stdint.h>

#if defined(__GNUC__)
#define LM_API __attribute__((visibility("default")))
#else
#define LM_API
#endif

/* Raised by one with every change of a structure or signature below; Python refuses a library of another version. */
#define LM_ABI_VERSION 1

#ifdef __cplusplus
extern "C" {
#endif

typedef enum lm_status {
  LM_OK = 0,
  LM_INVALID = 1,   /* the caller's mistake; nothing was moved */
  LM_NO_MEMORY = 2, /* host memory or threads ran out; the destination may be partly written */
  LM_CUDA = 3       /* the CUDA runtime refused; the message carries its text */
} lm_status;

typedef enum lm_form { LM_FORM_TOKEN = 0, LM_FORM_BLOCK = 1 } lm_form;
typedef enum lm_direction { LM_RETRIEVE = 0, LM_STORE = 1 } lm_direction;
typedef enum lm_method { LM_DIRECT = 0, LM_STAGED = 1 } lm_method;

/* One kernel group: its sizes, where its array lies in the object, its paged cache and its block table. */
typedef struct lm_group {
  int32_t num_layers;    /* L of this group */
  int32_t kv;            /* K, 1 or 2 */
  int32_t num_heads;     /* H */
  int32_t head_dim;      /* D / H */
  int32_t element_bytes; /* 1, 2 or 4 */
  int32_t block_tokens;  /* tokens of one block */
  int32_t num_blocks;    /* blocks of the paged cache; 0 where only a plan is asked for */
  int32_t num_block_ids;
  int64_t object_offset;    /* bytes from the object's start to this group's array */
  const int32_t *layers;    /* [num_layers] the stage's layer index of each layer, ascending */
  const int32_t *block_ids; /* [num_block_ids] block of tokens [i * block_tokens, (i + 1) * block_tokens) */
  const uint64_t *bases;    /* [num_layers][kv] address of block 0, token 0, head 0, dim 0; NULL for a plan */
  int64_t block_stride;     /* bytes between neighbours, any sign */
  int64_t token_stride;
  int64_t head_stride;
  int64_t dim_stride;
} lm_group;

typedef struct lm_slice {
  int32_t first_layer; /* of the stage */
  int32_t num_layers;
} lm_slice;

/* A compact transfer: everything from which the windows and pieces follow. */
typedef struct lm_request {
  int32_t form;      /* lm_form */
  int32_t direction; /* lm_direction */
  int32_t chunk_tokens;
  int32_t num_groups;
  const lm_group *groups;
  int32_t num_slices;
  int32_t has_null_block;
  const lm_slice *slices; /* in layer order, without a gap */
  int64_t null_block;     /* read only where has_null_block is not 0 */
  int64_t num_tokens;
  int64_t skip_tokens;
  int64_t window_bytes;
} lm_request;

/* reference.plan.Piece; for the launches below also with first_layer = num_layers = 0, which selects every layer. */
typedef struct lm_piece {
  int32_t object_index;
  int32_t group;
  int32_t first_layer;
  int32_t num_layers;
  int32_t first_token;
  int32_t num_tokens;
  int64_t staging_offset;
} lm_piece;

/* reference.plan.Window: pieces [first_piece, first_piece + num_pieces) of the plan. */
typedef struct lm_window {
  int64_t first_piece;
  int64_t num_pieces;
  int64_t num_bytes;
  int64_t completes_slice; /* -1: none */
} lm_window;

/* Host objects by chunk; 0 where the request does not touch the chunk. */
typedef struct lm_host_objects {
  const uint64_t *addresses;
  int64_t num_objects;
  uint64_t registered_base;       /* where the pool's registration pieces are counted from */
  int64_t registered_piece_bytes; /* a copy is split where two pieces meet; 0: one piece */
} lm_host_objects;

/* Called on the caller's thread, once for each slice in order, after its last byte has landed. */
typedef void (*lm_on_slice)(void *context, int32_t slice);

typedef struct lm_cpu_options {
  int32_t method;        /* lm_method */
  int32_t threads;       /* at least 1; the caller's thread is one of them */
  uint64_t staging;      /* address of staging_bytes bytes for LM_STAGED; 0: allocated for this call */
  int64_t staging_bytes; /* where staging is given: at least window_bytes, or all the request's bytes if fewer */
  lm_on_slice on_slice;  /* may be NULL */
  void *context;
} lm_cpu_options;

LM_API int32_t lm_abi_version(void);

/* Why this thread's last failing call failed; "" before the first. Valid until this thread's next failing call. */
LM_API const char *lm_last_error(void);

/* ------------------------------------------------------------------ host memory: both libraries */

/* Expands a request into the pieces and windows of reference.plan.
 *
 * *num_pieces and *num_windows always receive the plan's counts. Arrays are filled as far as their capacity goes, so a
 * first call with capacities of 0 (arrays may then be NULL) asks for the sizes. */
LM_API lm_status lm_plan(const lm_request *request, lm_piece *pieces, int64_t piece_capacity, lm_window *windows,
                         int64_t window_capacity, int64_t *num_pieces, int64_t *num_windows);

/* Executes a request on host memory, window by window, and returns when the last byte has moved. The caller keeps
 * objects and caches alive and alone until then. LM_INVALID leaves every byte as it was. */
LM_API lm_status lm_cpu_execute(const lm_request *request, const lm_host_objects *objects,
                                const lm_cpu_options *options);

/* The scatter (store: the gather) of a window's images on host memory, by the kernels' own code on one thread. The images lie at staging + staging_offset of their piece. A piece's first_layer and num_layers are the launch's layer
 * selector, layer_offset and staged_layers; both 0 mean every layer of the group. */
LM_API lm_status lm_cpu_scatter(const lm_request *request, const lm_piece *pieces, int64_t num_pieces,
                                uint64_t staging);

/* Between objects and blocks without staging, as the kernel that reads mapped host memory does it; pieces as above. */
LM_API lm_status lm_cpu_move_mapped(const lm_request *request, const lm_piece *pieces, int64_t num_pieces,
                                    const lm_host_objects *objects);

/* ------------------------------------------------------------------ kernel launches: liblamella_cuda only
 *
 * Both enqueue on `stream` (a cudaStream_t) of the current device and return at once. The request has one group, whose
 * bases and block_ids are readable by the device; its slices and null block are not looked at. The structures and the
 * pieces may be reused on return; device-readable memory must stay as it is until the stream has passed the launch.
 * base_bits and object_bits are all base and object addresses OR-ed together, which says how they are aligned; num_ctas
 * bounds the grid, 0 leaves it to the library. */

/* lm_cpu_scatter, as one kernel for each 480 pieces. */
LM_API lm_status lm_cuda_scatter(const lm_request *request, const lm_piece *pieces, int64_t num_pieces,
                                 uint64_t staging, uint64_t base_bits, int32_t num_ctas, void *stream);

/* Between mapped host objects and blocks, without staging. `objects` is a device-readable table by absolute chunk of
 * addresses that kernels can use. */
LM_API lm_status lm_cuda_move_mapped(const lm_request *request, const lm_piece *pieces, int64_t num_pieces,
                                     const uint64_t *objects, uint64_t object_bits, uint64_t base_bits,
                                     int32_t num_ctas, void *stream);

#ifdef __cplusplus
}
#endif

#include "lamella/engine.h"
#include "lamella/memory.h"

#endif /* LAMELLA_LAMELLA_H */
