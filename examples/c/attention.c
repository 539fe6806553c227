/* Attention forward and backward through the C ABI, on the CPU: every mode on one small random layer with an attention
 * sink (a first key that draws most of every row, as in many trained models), compared with FP64. The sink is where the
 * usual shortcut for delta goes wrong, so the table shows what the modes are for.
 *
 * Exit code: 0 all checks held, 1 a check failed, 2 the library refused a call. */
#include <delta_matching/delta_matching.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 256, HEAD_DIM = 64, Q_HEADS = 2, KV_HEADS = 1 };
enum { Q_SIZE = TOKENS * Q_HEADS * HEAD_DIM, KV_SIZE = TOKENS * KV_HEADS * HEAD_DIM, ROWS = Q_HEADS * TOKENS };

/* ---- BF16 ------------------------------------------------------------------------------------------------------- */

/* BF16 is the upper half of an FP32: round to nearest, ties to even. (Finite values only; enough here.) */
static uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static double from_bf16(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* ---- Data ------------------------------------------------------------------------------------------------------- */

static uint64_t random_state = 1;

static double uniform(void) { /* (0, 1); a 64-bit linear congruential generator is plenty for an example */
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return ((double)(random_state >> 11) + 0.5) / 9007199254740992.0;
}

static double gaussian(void) { /* Box-Muller */
  const double radius = sqrt(-2 * log(uniform()));
  return radius * cos(6.283185307179586 * uniform());
}

static void fill_gaussian(uint16_t *x, int count) {
  for (int i = 0; i < count; ++i) x[i] = to_bf16((float)gaussian());
}

/* Channel 0 of every query is 4 and key 0 lives in channel 0 alone: its logit is 8 over the others'. */
static void add_sink(uint16_t *q, uint16_t *k) {
  for (int i = 0; i < TOKENS * Q_HEADS; ++i) q[i * HEAD_DIM] = to_bf16(4);
  for (int i = 0; i < TOKENS * KV_HEADS; ++i) k[i * HEAD_DIM] = 0;
  memset(k, 0, sizeof *k * KV_HEADS * HEAD_DIM);
  for (int h = 0; h < KV_HEADS; ++h) k[h * HEAD_DIM] = to_bf16((float)(8 * sqrt(HEAD_DIM) / 4));
}

/* ---- The library ------------------------------------------------------------------------------------------------ */

/* A contiguous [batch, tokens, heads, head_dim] tensor. Strides count elements. */
static dmattn_tensor tensor(uint16_t *data, int heads) {
  dmattn_tensor t;
  t.data = data;
  t.head_stride = HEAD_DIM;
  t.seq_stride = (int64_t)heads * HEAD_DIM;
  t.batch_stride = TOKENS * t.seq_stride;
  return t;
}

/* Every call returns a status, and a message says what was wrong with the arguments. */
static void check(dmattn_status status, const char *what) {
  if (status == DMATTN_OK) return;
  fprintf(stderr, "%s: %s\n", what, dmattn_last_error());
  exit(2);
}

/* struct_size tells the library which version of the struct it is given. Zero is a sensible default for every field
 * that is not set here: one thread per core, hopper numerics, the default centring, no variable lengths. */
static dmattn_problem make_problem(dmattn_mode mode) {
  dmattn_problem p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  p.batch = 1;
  p.q_heads = Q_HEADS;
  p.kv_heads = KV_HEADS;
  p.q_len = TOKENS;
  p.k_len = TOKENS;
  p.head_dim = HEAD_DIM;
  p.softmax_scale = (float)(1 / sqrt(HEAD_DIM));
  p.causal = 1;
  p.mode = (int32_t)mode;
  p.device = DMATTN_CPU;
  return p;
}

/* Inputs, and the FP64 result that everything is compared with. */
static uint16_t q[Q_SIZE], k[KV_SIZE], v[KV_SIZE], d_o[Q_SIZE];
static double ref_o[Q_SIZE], ref_dq[Q_SIZE], ref_dk[KV_SIZE], ref_dv[KV_SIZE];

typedef struct result {
  uint16_t o[Q_SIZE], dq[Q_SIZE], dk[KV_SIZE], dv[KV_SIZE];
  float delta[ROWS]; /* the delta that the backward used */
} result;

/* Forward and backward in one mode. `delta`: NULL for the mode's own, else what to use in its place. */
static void run(dmattn_mode mode, const float *delta, result *out) {
  static float lse[ROWS], reference[ROWS], sum[2 * ROWS];
  static uint16_t o_low[Q_SIZE];
  const dmattn_problem problem = make_problem(mode);

  dmattn_forward_args forward;
  memset(&forward, 0, sizeof forward);
  forward.struct_size = sizeof forward;
  forward.q = tensor(q, Q_HEADS);
  forward.k = tensor(k, KV_HEADS);
  forward.v = tensor(v, KV_HEADS);
  forward.o = tensor(out->o, Q_HEADS);
  forward.lse = lse;
  /* What the backward needs to see the very same P. Only onepass has a use for O's low half. */
  forward.saved.reference = reference;
  forward.saved.sum = sum;
  if (mode == DMATTN_ONEPASS) forward.saved.o_low = tensor(o_low, Q_HEADS);
  check(dmattn_forward(&problem, &forward), "forward");

  dmattn_backward_args backward;
  memset(&backward, 0, sizeof backward);
  backward.struct_size = sizeof backward;
  backward.q = forward.q;
  backward.k = forward.k;
  backward.v = forward.v;
  backward.o = forward.o;
  backward.d_o = tensor(d_o, Q_HEADS);
  backward.lse = lse;
  backward.saved = forward.saved;
  backward.delta = delta;
  backward.delta_out = out->delta;
  backward.dq = tensor(out->dq, Q_HEADS);
  backward.dk = tensor(out->dk, KV_HEADS);
  backward.dv = tensor(out->dv, KV_HEADS);
  check(dmattn_backward(&problem, &backward), "backward");
}

static void run_reference(void) {
  const dmattn_problem problem = make_problem(DMATTN_MATCHED); /* the mode does not matter in FP64 */
  dmattn_reference_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.q = tensor(q, Q_HEADS);
  args.k = tensor(k, KV_HEADS);
  args.v = tensor(v, KV_HEADS);
  args.d_o = tensor(d_o, Q_HEADS);
  args.o = ref_o;
  args.dq = ref_dq;
  args.dk = ref_dk;
  args.dv = ref_dv;
  check(dmattn_reference(&problem, &args), "reference");
}

/* ---- The program ------------------------------------------------------------------------------------------------ */

/* |x - ref| / |ref|, Frobenius norms. */
static double error(const uint16_t *x, const double *ref, int count) {
  double difference = 0, norm = 0;
  for (int i = 0; i < count; ++i) {
    const double d = from_bf16(x[i]) - ref[i];
    difference += d * d;
    norm += ref[i] * ref[i];
  }
  return sqrt(difference / norm);
}

static void print_errors(const char *name, const result *r) {
  printf("%-24s %7.2f %% %7.2f %% %7.2f %% %7.2f %%\n", name, 100 * error(r->o, ref_o, Q_SIZE),
         100 * error(r->dq, ref_dq, Q_SIZE), 100 * error(r->dk, ref_dk, KV_SIZE), 100 * error(r->dv, ref_dv, KV_SIZE));
}

static int failures = 0;

static void expect(int condition, const char *what) {
  printf("%s  %s\n", condition ? "ok    " : "FAILED", what);
  if (!condition) ++failures;
}

int main(void) {
  static const struct {
    dmattn_mode mode;
    const char *name;
  } modes[] = {{DMATTN_STALE, "stale"},
               {DMATTN_CONSISTENT, "consistent"},
               {DMATTN_MATCHED, "matched"},
               {DMATTN_ONEPASS, "onepass"}};
  static result results[4], borrowed; /* indexed by dmattn_mode */

  fill_gaussian(q, Q_SIZE);
  fill_gaussian(k, KV_SIZE);
  fill_gaussian(v, KV_SIZE);
  fill_gaussian(d_o, Q_SIZE);
  add_sink(q, k);
  run_reference();

  printf("delta_matching %s, numerics %d: %d tokens, %d query heads, head_dim %d, with a sink\n\n", dmattn_version(),
         (int)dmattn_numerics_version(), TOKENS, Q_HEADS, HEAD_DIM);
  printf("%-24s %9s %9s %9s %9s\n", "error against FP64", "O", "dQ", "dK", "dV");
  for (int i = 0; i < 4; ++i) {
    run(modes[i].mode, NULL, &results[modes[i].mode]);
    print_errors(modes[i].name, &results[modes[i].mode]);
  }
  /* Delta is all that is wrong with stale: give it matched's, and its gradients are matched's. */
  run(DMATTN_STALE, results[DMATTN_MATCHED].delta, &borrowed);
  print_errors("stale, matched's delta", &borrowed);
  printf("\n");

  const double stale = error(results[DMATTN_STALE].dq, ref_dq, Q_SIZE);
  const double matched = error(results[DMATTN_MATCHED].dq, ref_dq, Q_SIZE);
  const double onepass = error(results[DMATTN_ONEPASS].dq, ref_dq, Q_SIZE);
  const double repaired = error(borrowed.dq, ref_dq, Q_SIZE);
  expect(error(results[DMATTN_MATCHED].o, ref_o, Q_SIZE) < 0.1, "O is within 10 % of FP64");
  expect(2 * matched < stale, "matched at least halves stale's error of dQ");
  expect(2 * onepass < stale, "so does onepass, without the extra pass");
  expect(fabs(repaired - matched) < 0.05 * matched, "stale with matched's delta is matched");

  /* A call that cannot be served says so and writes nothing. */
  dmattn_problem wrong = make_problem(DMATTN_MATCHED);
  size_t forward_bytes = 0, backward_bytes = 0;
  wrong.head_dim = 63;
  const dmattn_status status = dmattn_workspace_size(&wrong, &forward_bytes, &backward_bytes);
  expect(status != DMATTN_OK && dmattn_last_error()[0] != '\0', "head_dim 63 is refused in hopper numerics:");
  printf("        \"%s\"\n", dmattn_last_error());
  return failures == 0 ? 0 : 1;
}
