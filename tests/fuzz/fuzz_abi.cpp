// The C ABI under hostile callers. An input describes a small problem that is valid but odd (any BF16 bits, any layout,
// ragged and empty sequences), and perhaps one thing that is wrong with it. Held:
//   - a valid problem succeeds, gives the same bits on any number of threads, and writes nothing between rows;
//   - a wrong one is refused by every entry with a message, and nothing is written;
//   - every buffer has exactly the documented size, so AddressSanitizer sees one element too many.
#include <cmath>
#include <limits>

#include "abi_case.h"

namespace {

using namespace fuzz_abi;

void succeeds(dmattn_status status, const char* what) {
  if (status != DMATTN_OK) fail(what);
}

// ---- Valid problems -------------------------------------------------------------------------------------------------

// Bits of everything that forward and backward wrote, on `threads` threads.
std::vector<uint16_t> run_twin(Case& c, int threads) {
  c.problem.threads = threads;
  for (Tensor* output : {&c.o, &c.dq, &c.dk, &c.dv, &c.o_low}) output->memory.reset();
  succeeds(dmattn_forward(&c.problem, &c.forward), "forward refused a valid problem");
  succeeds(dmattn_backward(&c.problem, &c.backward), "backward refused a valid problem");
  std::vector<uint16_t> bits;
  for (Tensor* output : {&c.o, &c.dq, &c.dk, &c.dv}) {
    require(output->gaps_untouched(), "an element between rows was written");
    const std::vector<uint16_t> part = output->memory.copy();
    bits.insert(bits.end(), part.begin(), part.end());
  }
  return bits;
}

void run_probe(Case& c) {
  if (c.variable) {  // probe takes sequences of one length
    c.problem.cu_seqlens_q = c.problem.cu_seqlens_k = nullptr;
    c.problem.batch = 1;
  }
  char* json = nullptr;
  succeeds(dmattn_probe(&c.problem, &c.probe, &json), "probe refused a valid problem");
  require(json != nullptr && json[0] == '{', "probe gave no document");
  dmattn_free(json);
}

void run_valid(Case& c, FuzzedDataProvider& fuzz) {
  size_t forward_bytes = 1, backward_bytes = 1;
  succeeds(dmattn_workspace_size(&c.problem, &forward_bytes, &backward_bytes), "workspace_size refused");
  require(forward_bytes == 0 && backward_bytes == 0, "the CPU asks for a workspace");
  const std::vector<uint16_t> bits = run_twin(c, 1);
  switch (fuzz.ConsumeIntegralInRange(0, 4)) {
    case 0: require(run_twin(c, fuzz.ConsumeIntegralInRange(2, 5)) == bits, "threads change bits"); break;
    case 1:
      c.backward.delta_out = c.delta_out.data();
      succeeds(dmattn_delta(&c.problem, &c.backward), "delta refused a valid problem");
      break;
    case 2: succeeds(dmattn_quantise(&c.problem, &c.quantise), "quantise refused a valid problem"); break;
    case 3: succeeds(dmattn_reference(&c.problem, &c.exact), "reference refused a valid problem"); break;
    default: run_probe(c);
  }
}

// Sequences without rows, however many: nothing to read, so every pointer may be NULL, and nothing to allocate.
void run_empty(Case& c, FuzzedDataProvider& fuzz) {
  dmattn_problem& p = c.problem;
  p.cu_seqlens_q = p.cu_seqlens_k = nullptr;
  p.batch = int64_t{1} << fuzz.ConsumeIntegralInRange(0, 31);
  p.q_len = p.k_len = 0;
  dmattn_forward_args forward{};
  dmattn_backward_args backward{};
  forward.struct_size = sizeof forward;
  backward.struct_size = sizeof backward;
  succeeds(dmattn_forward(&p, &forward), "forward refused sequences without rows");
  succeeds(dmattn_backward(&p, &backward), "backward refused sequences without rows");
}

// ---- Wrong calls ----------------------------------------------------------------------------------------------------

// Every entry refuses `problem` with the case's arguments, says why in one line, and writes nothing.
void check_refused(Case& c, const dmattn_problem* problem, bool reference_refuses = true) {
  const auto refused = [](dmattn_status status, const char* name) {
    if (status == DMATTN_OK) fail(name);
    require(dmattn_last_error()[0] != '\0', "a refusal without a message");
    require(std::strchr(dmattn_last_error(), '\n') == nullptr, "a message of more than one line");
  };
  char* json = nullptr;
  c.backward.delta_out = c.delta_out.data();
  refused(dmattn_forward(problem, &c.forward), "forward took a wrong call");
  refused(dmattn_backward(problem, &c.backward), "backward took a wrong call");
  refused(dmattn_delta(problem, &c.backward), "delta took a wrong call");
  refused(dmattn_quantise(problem, &c.quantise), "quantise took a wrong call");
  if (reference_refuses) refused(dmattn_reference(problem, &c.exact), "reference took a wrong call");
  refused(dmattn_probe(problem, &c.probe, &json), "probe took a wrong call");
  require(json == nullptr, "a refused probe left a pointer");
  require(c.outputs_untouched(), "a refused call wrote an output");
}

// NULL in place of a struct.
void run_missing_structs(Case& c) {
  check_refused(c, nullptr);
  char* json = nullptr;
  size_t bytes = 0;
  const dmattn_problem* p = &c.problem;
  const dmattn_status statuses[] = {dmattn_forward(p, nullptr),
                                    dmattn_backward(p, nullptr),
                                    dmattn_delta(p, nullptr),
                                    dmattn_quantise(p, nullptr),
                                    dmattn_reference(p, nullptr),
                                    dmattn_probe(p, nullptr, &json),
                                    dmattn_probe(p, &c.probe, nullptr),
                                    dmattn_workspace_size(p, nullptr, &bytes),
                                    dmattn_workspace_size(p, &bytes, nullptr),
                                    dmattn_workspace_size(nullptr, &bytes, &bytes)};
  for (const dmattn_status status : statuses) require(status == DMATTN_INVALID_VALUE, "NULL was taken");
}

// A pointer that a call cannot do without, or a size that no struct has.
void run_wrong_args(Case& c, FuzzedDataProvider& fuzz) {
  const auto short_size = [&](size_t size) { return fuzz.ConsumeIntegralInRange<size_t>(0, size - 1); };
  const bool empty = c.problem.batch == 0 || c.q.memory.size() == 0 || c.k.memory.size() == 0;
  const int which = fuzz.ConsumeIntegralInRange(0, 2);
  if (which == 0 || empty) {
    c.forward.struct_size = short_size(sizeof c.forward);
    c.backward.struct_size = short_size(sizeof c.backward);
    c.quantise.struct_size = short_size(sizeof c.quantise);
    c.exact.struct_size = short_size(sizeof c.exact);
    c.probe.struct_size = short_size(sizeof c.probe);
  } else if (which == 1) {
    c.forward.v.data = c.backward.v.data = c.exact.v.data = c.probe.v.data = c.quantise.x.data = nullptr;
  } else {
    c.forward.o.data = c.backward.d_o.data = c.exact.q.data = c.probe.k.data = nullptr;
    c.quantise.codes = nullptr;
  }
  check_refused(c, &c.problem);
}

// The problem of an older header: shorter, and with nothing behind it.
void run_short_problem(Case& c, FuzzedDataProvider& fuzz) {
  dmattn_problem& p = c.problem;
  p.struct_size = fuzz.ConsumeIntegralInRange<size_t>(0, sizeof p - 1);
  const size_t held = std::max(p.struct_size, sizeof p.struct_size);
  const std::unique_ptr<char[]> prefix(new char[held]);
  std::memcpy(prefix.get(), &p, held);
  check_refused(c, reinterpret_cast<const dmattn_problem*>(prefix.get()));
}

// Variable lengths with one list missing, or an offset that is not 0 at the start, falls, or is past the end.
void run_wrong_offsets(Case& c, FuzzedDataProvider& fuzz) {
  if (!c.variable) {
    const int32_t zeros[] = {0, 0, 0};
    (fuzz.ConsumeBool() ? c.problem.cu_seqlens_q : c.problem.cu_seqlens_k) = zeros;
    check_refused(c, &c.problem);
  } else {
    Exact<int32_t>& cu = fuzz.ConsumeBool() ? c.cu_q : c.cu_k;
    cu[fuzz.ConsumeIntegralInRange<size_t>(0, cu.size() - 1)] = fuzz.ConsumeBool() ? -1 : 200;
    check_refused(c, &c.problem);
  }
}

// One field of the problem that cannot be.
void run_wrong_problem(Case& c, FuzzedDataProvider& fuzz) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  const int64_t below_zero = -fuzz.ConsumeIntegralInRange<int64_t>(1, kHuge);
  const int64_t below_one = fuzz.ConsumeBool() ? 0 : below_zero;
  const int32_t no_code = fuzz.ConsumeBool() ? fuzz.ConsumeIntegralInRange<int32_t>(4, 1 << 30)
                                             : -fuzz.ConsumeIntegralInRange<int32_t>(1, 1 << 30);
  const float scales[] = {0.0f, -1.0f, NAN, INFINITY, -INFINITY};
  dmattn_problem& p = c.problem;
  const int field = fuzz.ConsumeIntegralInRange(0, 16);
  switch (field) {
    case 0: p.batch = below_zero; break;
    case 1: p.q_len = below_zero; break;
    case 2: p.k_len = below_zero; break;
    case 3: p.q_heads = below_one; break;
    case 4: p.kv_heads = below_one; break;
    case 5: p.kv_heads = p.q_heads + fuzz.ConsumeIntegralInRange<int64_t>(1, 100); break;
    case 6: p.head_dim = below_one; break;
    case 7: p.head_dim = fuzz.ConsumeIntegralInRange<int64_t>(4097, kHuge); break;
    case 8: p.softmax_scale = fuzz.PickValueInArray(scales); break;
    case 9: p.mode = no_code; break;
    case 10: p.accumulator = no_code; break;
    case 11: p.device = no_code; break;
    case 12: p.causal = no_code; break;
    case 13: p.threads = -fuzz.ConsumeIntegralInRange<int32_t>(1, 1 << 30); break;
    case 14:  // more bytes than there are addresses
      p.q_len = p.k_len = kHuge - fuzz.ConsumeIntegralInRange<int64_t>(0, 1000);
      p.batch = std::max<int64_t>(p.batch, 1);
      p.cu_seqlens_q = p.cu_seqlens_k = nullptr;
      break;
    case 15: p.numerics = no_code; break;
    default: p.centre = p.numerics == DMATTN_PAPER && fuzz.ConsumeBool() ? int32_t{DMATTN_CENTRE_QK} : no_code;
  }
  check_refused(c, &p, field < 15);  // FP64 knows no numerics and centres nothing
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider fuzz(data, size);
  const int kind = fuzz.ConsumeIntegralInRange(0, 15);
  Case c(fuzz);
  switch (kind) {
    case 0: run_missing_structs(c); break;
    case 1: run_short_problem(c, fuzz); break;
    case 2: run_wrong_offsets(c, fuzz); break;
    case 3: run_wrong_args(c, fuzz); break;
    case 4: run_empty(c, fuzz); break;
    case 5:
    case 6: run_wrong_problem(c, fuzz); break;
    default: run_valid(c, fuzz);
  }
  return 0;
}
