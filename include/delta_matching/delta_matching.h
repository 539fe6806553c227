/* delta-matching: FP8 attention for training that keeps the gradient's invariant.
 *
 * C ABI. Plain structs, no CUDA and no Torch in sight. Every function returns a status; on anything but
 * DMATTN_OK, dmattn_last_error() holds one line that names the argument, what was expected and what came,
 * and no output has been written (DMATTN_DEVICE_ERROR: outputs are undefined).
 *
 * Notation: per head, S = Q K^T * softmax_scale, P = softmax(S), O = P V; dP = dO V^T,
 * dS = P o (dP - delta), delta_i = sum_j P_ij dP_ij. `mode` says where delta comes from (docs/method.md).
 *
 * Layout: q, o, d_o, dq are [batch, q_len, q_heads, head_dim]; k, v, dk, dv are
 * [batch, k_len, kv_heads, head_dim]; BF16 bits (uint16_t); the last dimension is contiguous, the others have
 * element strides. With cu_seqlens ("varlen") the tensors are [total, heads, head_dim] and batch_stride is
 * ignored. Row vectors (lse, delta, saved statistics) are FP32, contiguous: [batch, q_heads, q_len], or
 * [q_heads, total_q] with cu_seqlens.
 *
 * CUDA: with device = DMATTN_CUDA every tensor, row vector, cu_seqlens, workspace and saved.codes is device memory of
 * device_index, and the call only queues kernels on `stream`: no allocation, no synchronisation, nothing kept between
 * calls, so that a CUDA graph can capture it. cu_seqlens cannot be checked without reading them back: the kernels clamp
 * offsets that fall or leave the tensor, so nothing outside is touched, but results of such a call are meaningless;
 * callers who want an error check the offsets first. Compute capability 9.0 (Hopper), hopper numerics, the tensor
 * core's accumulator.
 *
 * Threads: every function may be called from several threads at once. The library keeps no state between
 * calls but the thread-local error message. It never allocates device memory and never synchronises a stream.
 */
#ifndef DELTA_MATCHING_H
#define DELTA_MATCHING_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define DMATTN_API
#else
#define DMATTN_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dmattn_status {
  DMATTN_OK = 0,
  DMATTN_INVALID_VALUE = 1, /* a value or a pointer is out of its domain (Python: ValueError) */
  DMATTN_UNSUPPORTED = 2,   /* well-formed, but not offered here: device, head_dim, combination (RuntimeError) */
  DMATTN_OUT_OF_MEMORY = 3, /* host memory ran out; nothing was written */
  DMATTN_INTERNAL = 4,      /* a fault of the library */
  DMATTN_DEVICE_ERROR = 5   /* the CUDA runtime refused a query or a launch (RuntimeError) */
} dmattn_status;

/* Where delta comes from. */
typedef enum dmattn_mode {
  DMATTN_MATCHED = 0,    /* sum_j P dP of the operands dS uses; costs a pass */
  DMATTN_ONEPASS = 1,    /* <quantised dO, O in FP32>, dS from the rounded P; no extra pass */
  DMATTN_CONSISTENT = 2, /* <quantised dO, O in BF16> */
  DMATTN_STALE = 3       /* <dO, O in BF16>, the usual shortcut */
} dmattn_mode;

typedef enum dmattn_numerics {
  DMATTN_HOPPER = 0, /* what the Hopper kernels compute, bit by bit; head_dim 64, 128, 256 */
  DMATTN_PAPER = 1   /* the recipe of the Delta-Matching article; CPU only, any head_dim >= 1 */
} dmattn_numerics;

/* What is subtracted before the codes of S are made. */
typedef enum dmattn_centre {
  DMATTN_CENTRE_DEFAULT = 0, /* K in paper numerics, Q and K in hopper numerics */
  DMATTN_CENTRE_NONE = 1,
  DMATTN_CENTRE_K = 2, /* K's mean over the sequence */
  DMATTN_CENTRE_QK = 3 /* and Q's mean over each block of queries, for S alone */
} dmattn_centre;

/* How hopper numerics adds up a product of codes. */
typedef enum dmattn_accumulator {
  DMATTN_ACCUMULATOR_TENSOR_CORE = 0, /* the 13-fraction-bit model of wgmma */
  DMATTN_ACCUMULATOR_FP32 = 1         /* FP32, to tell the accumulator's error from the codes' */
} dmattn_accumulator;

typedef enum dmattn_device { DMATTN_CPU = 0, DMATTN_CUDA = 1 } dmattn_device;

typedef struct dmattn_problem {
  size_t struct_size;   /* sizeof(dmattn_problem) */
  int64_t batch;        /* sequences; >= 0 */
  int64_t q_heads;      /* >= 1, a multiple of kv_heads */
  int64_t kv_heads;     /* >= 1 */
  int64_t q_len;        /* rows of q per sequence; with cu_seqlens: rows of q in all */
  int64_t k_len;        /* rows of k and v per sequence; with cu_seqlens: rows in all */
  int64_t head_dim;     /* hopper: 64, 128 or 256; paper: 1 ... 4096 */
  float softmax_scale;  /* finite and > 0; usually 1 / sqrt(head_dim) */
  int32_t causal;       /* 0 full; 1 causal, aligned bottom-right: key j is seen by query i if j <= i + k_len - q_len */
  int32_t mode;         /* dmattn_mode */
  int32_t numerics;     /* dmattn_numerics */
  int32_t centre;       /* dmattn_centre */
  int32_t accumulator;  /* dmattn_accumulator */
  int32_t device;       /* dmattn_device */
  int32_t device_index; /* GPU, when device is DMATTN_CUDA */
  void *stream;         /* cudaStream_t, when device is DMATTN_CUDA */
  int32_t threads;      /* CPU threads; 0 = all; never changes a bit */
  /* Variable lengths: batch + 1 row offsets each, both or neither (NULL = every sequence has q_len, k_len).
   * Start at 0, never fall, end at or below q_len / k_len; rows past the end are not read or written. */
  const int32_t *cu_seqlens_q;
  const int32_t *cu_seqlens_k;
  /* With cu_seqlens on CUDA: no sequence is longer; 0 = the totals. They bound the workspace and the work that is
   * queued; a longer sequence makes the results meaningless, as wrong offsets do. Ignored otherwise. */
  int64_t max_q_len;
  int64_t max_k_len;
  /* CUDA backward: most bytes of dS held at a time; 0 = 1 GiB. Less room means more and smaller launches, and never
   * changes a bit. A query head (with cu_seqlens: a group of them) against 128 keys is held even where that takes more;
   * FP32 sums between launches come on top, below the cap where they can be. */
  size_t workspace_cap;
} dmattn_problem;

typedef struct dmattn_tensor {
  void *data;           /* BF16; inputs are only read */
  int64_t batch_stride; /* elements; ignored with cu_seqlens */
  int64_t seq_stride;
  int64_t head_stride;
} dmattn_tensor;

/* What the forward leaves for the backward. Without it (pointers NULL) the backward starts from lse, which holds only
 * the unrounded sum, and in onepass from O without its remainder: other roundings, so other bits, and onepass falls
 * back to about consistent's accuracy. onepass reads the second of the two sums alone: its forward in hopper numerics
 * without lse leaves NaN in the first.
 *
 * codes, on CUDA alone: the FP8 codes of q, k and v with their scales, K's mean and the biases of Q's means. The
 * forward writes them, the backward and dmattn_delta read them in place of making them again, and then look neither at
 * k nor at v, whose data may be NULL. No bit depends on it. They belong to their problem: if shapes, cu_seqlens (and
 * the offsets in them), max_q_len, max_k_len, softmax_scale, causal or centre of the two calls differ, or something has
 * written to the codes, the results are meaningless. Mode, stream and workspace_cap may differ. */
typedef struct dmattn_saved {
  float *reference;    /* row vector: M, the row's reference exponent (log2 units, an integer in hopper) */
  float *sum;          /* two row vectors, one after the other: sums of 2^(x - M) of unrounded, then of rounded P */
  dmattn_tensor o_low; /* onepass: BF16 of O - bf16(O), laid out like o; else data = NULL */
  void *codes;         /* dmattn_saved_codes_size bytes, aligned to 256; NULL: not kept. Ignored on the CPU */
  size_t codes_bytes;  /* of codes */
} dmattn_saved;

typedef struct dmattn_forward_args {
  size_t struct_size; /* sizeof(dmattn_forward_args) */
  dmattn_tensor q, k, v;
  dmattn_tensor o;    /* out */
  float *lse;         /* out, may be NULL: row vector, natural log of sum_j exp(S_ij); -inf for a row without keys */
  dmattn_saved saved; /* out, each pointer may be NULL */
  void *workspace;    /* device memory of at least dmattn_workspace_size bytes; NULL when that is 0 (CPU) */
  size_t workspace_bytes;
} dmattn_forward_args;

typedef struct dmattn_backward_args {
  size_t struct_size;            /* sizeof(dmattn_backward_args) */
  dmattn_tensor q, k, v, o, d_o; /* k.data, v.data: may be NULL with saved.codes */
  const float *lse;              /* row vector; read only where saved is missing, may be NULL otherwise */
  dmattn_saved saved;            /* in */
  const float *delta;            /* in, may be NULL: row vector, true delta to use in place of the mode's own */
  float *delta_out;              /* out, may be NULL: row vector, the true delta that was used */
  dmattn_tensor dq, dk, dv;      /* out; data = NULL leaves that gradient out */
  void *workspace;
  size_t workspace_bytes;
} dmattn_backward_args;

/* Operand to quantise: decides block rows and centring. */
typedef enum dmattn_operand {
  DMATTN_OPERAND_Q = 0,       /* plain, as dK takes it: blocks of 1024 rows (paper: 128) */
  DMATTN_OPERAND_K = 1,       /* blocks of 64 rows, the mean over the sequence removed if centre has K */
  DMATTN_OPERAND_V = 2,       /* blocks of 64 rows */
  DMATTN_OPERAND_D_O = 3,     /* blocks of 1024 rows (paper: 128) */
  DMATTN_OPERAND_Q_SCORES = 4 /* blocks of 128 rows, as S takes them: the mean of its block of rows removed if centre
                                 has Q, scales raised until the bias of every key of `k` fits; CUDA only */
} dmattn_operand;

typedef struct dmattn_quantise_args {
  size_t struct_size; /* sizeof(dmattn_quantise_args) */
  int32_t operand;    /* dmattn_operand */
  dmattn_tensor x;    /* in */
  uint8_t *codes;     /* out: E4M3 codes, contiguous [batch, len, heads, head_dim] ([total, heads, head_dim]) */
  float *scale;       /* out: [batch, heads, ceil(len / block)]: multiplies a code to dequantise;
                         with cu_seqlens [batch, heads, ceil(max len / block)], unused entries 0; max len: of the
                         offsets, on CUDA max_q_len or max_k_len */
  float *mean;        /* out, may be NULL: [batch, heads, head_dim], what was subtracted; Q_SCORES:
                         [batch, heads, n, head_dim], n = ceil(len / (128 max(1, ceil(len / 8192)))); with
                         cu_seqlens n = min(64, ceil(max len / 128)), unused entries undefined */
  dmattn_tensor k;    /* in, Q_SCORES alone: the keys that q meets */
  void *workspace;    /* device memory of at least dmattn_workspace_size's forward_bytes; NULL on the CPU */
  size_t workspace_bytes;
} dmattn_quantise_args;

/* Version of the library ("0.1.0") and of the hopper numerics contract (docs/numerics.md): bits are comparable
 * only where the latter agrees. */
DMATTN_API const char *dmattn_version(void);
DMATTN_API int32_t dmattn_numerics_version(void);

/* The calling thread's last failure, "" if none. Valid until that thread's next call. */
DMATTN_API const char *dmattn_last_error(void);

/* 1 if calls with this device can run here, else 0. CUDA: this build has the kernels and some GPU here runs them. */
DMATTN_API int32_t dmattn_device_available(int32_t device);

/* Device bytes that forward and backward need (dmattn_delta: the backward's; dmattn_quantise: the forward's). 0 on the
 * CPU, which uses host memory of its own, linear in q_len + k_len. On CUDA they follow from the problem alone (with
 * cu_seqlens from batch, totals and max lengths, never from the offsets), and the workspace must be aligned to 256
 * bytes, as cudaMalloc and Torch give it; it holds nothing between calls. */
DMATTN_API dmattn_status dmattn_workspace_size(const dmattn_problem *problem, size_t *forward_bytes,
                                               size_t *backward_bytes);

/* Bytes of dmattn_saved's codes: 0 on the CPU, which keeps none. They follow from the problem alone, as the workspace's
 * do, and not from its mode. With codes a backward needs that much less workspace. */
DMATTN_API dmattn_status dmattn_saved_codes_size(const dmattn_problem *problem, size_t *bytes);

DMATTN_API dmattn_status dmattn_forward(const dmattn_problem *problem, const dmattn_forward_args *args);
DMATTN_API dmattn_status dmattn_backward(const dmattn_problem *problem, const dmattn_backward_args *args);

/* The mode's true delta alone: args->delta_out is required, dq, dk, dv are ignored. */
DMATTN_API dmattn_status dmattn_delta(const dmattn_problem *problem, const dmattn_backward_args *args);

/* On CUDA: K, V and Q_SCORES. */
DMATTN_API dmattn_status dmattn_quantise(const dmattn_problem *problem, const dmattn_quantise_args *args);

/* FP64 attention (docs/numerics.md, "reference"): O, lse and the gradients that are asked for (they need d_o),
 * written as contiguous doubles in the layouts above. Outputs may be NULL. Reads BF16 inputs; head_dim 1 ... 4096; the
 * problem's numerics and centre are not looked at, its mode must be valid and plays no part. */
typedef struct dmattn_reference_args {
  size_t struct_size; /* sizeof(dmattn_reference_args) */
  dmattn_tensor q, k, v, d_o;
  double *o, *lse, *dq, *dk, *dv;
} dmattn_reference_args;
DMATTN_API dmattn_status dmattn_reference(const dmattn_problem *problem, const dmattn_reference_args *args);

/* What FP8 does to one attention layer: residuals, column sums and errors against FP64, per mode and head.
 * `modes` is a bit mask of 1 << dmattn_mode, 0 = all; problem->mode must be valid and plays no part. On success *json
 * is a dmattn.probe/1 document (docs/schemas.md) that the caller frees with dmattn_free, otherwise NULL. */
typedef struct dmattn_probe_args {
  size_t struct_size; /* sizeof(dmattn_probe_args) */
  dmattn_tensor q, k, v, d_o;
  uint32_t modes;
} dmattn_probe_args;
DMATTN_API dmattn_status dmattn_probe(const dmattn_problem *problem, const dmattn_probe_args *args, char **json);
DMATTN_API void dmattn_free(void *pointer);

#ifdef __cplusplus
}
#endif
#endif /* DELTA_MATCHING_H */
