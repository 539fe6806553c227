// The C ABI under hostile callers. An input describes a small problem that is valid but odd (any BF16 bits, any layout,
// ragged and empty sequences), and perhaps one thing that is wrong with it. Held:
//   - a valid problem succeeds, gives the same bits on any number of threads, and writes nothing between rows;
//   - a wrong one is refused with a message, and nothing is written;
//   - every buffer has exactly the documented size, so AddressSanitizer sees one element too many.
#include <cmath>
#include <limits>

#include "abi_case.h"

namespace {

using namespace fuzz_abi;

void succeeds(dmattn_status status, const char* what) {
  if (status != DMATTN_OK) fail(what);
}

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

void run_valid(Case& c, FuzzedDataProvider& fuzz) {
  size_t forward_bytes = 1, backward_bytes = 1;
  succeeds(dmattn_workspace_size(&c.problem, &forward_bytes, &backward_bytes), "workspace_size refused");
  require(forward_bytes == 0 && backward_bytes == 0, "the CPU asks for a workspace");
  const std::vector<uint16_t> bits = run_twin(c, 1);
  switch (fuzz.ConsumeIntegralInRange(0, 4)) {
    case 0:
      require(run_twin(c, fuzz.ConsumeIntegralInRange(2, 5)) == bits, "threads change bits");
      break;
    case 1:
      c.backward.delta_out = c.delta_out.data();
      succeeds(dmattn_delta(&c.problem, &c.backward), "delta refused a valid problem");
      break;
    case 2:
      succeeds(dmattn_quantise(&c.problem, &c.quantise), "quantise refused a valid problem");
      break;
    case 3:
      succeeds(dmattn_reference(&c.problem, &c.exact), "reference refused a valid problem");
      break;
    default: {
      char* json = nullptr;
      succeeds(dmattn_probe(&c.problem, &c.probe, &json), "probe refused a valid problem");
      require(json != nullptr && json[0] == '{', "probe gave no document");
      dmattn_free(json);
    }
  }
}

// Makes one field of the problem wrong.
void break_problem(Case& c, FuzzedDataProvider& fuzz) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  const int64_t negative = -fuzz.ConsumeIntegralInRange<int64_t>(1, kHuge);
  const int32_t wrong_code = fuzz.ConsumeBool() ? fuzz.ConsumeIntegralInRange<int32_t>(4, 1 << 30)
                                                : -fuzz.ConsumeIntegralInRange<int32_t>(1, 1 << 30);
  const float scales[] = {0.0f, -1.0f, NAN, INFINITY, -INFINITY};
  dmattn_problem& p = c.problem;
  switch (fuzz.ConsumeIntegralInRange(0, 18)) {
    case 0:
      p.struct_size = fuzz.ConsumeIntegralInRange<size_t>(0, sizeof p - 1);
      break;
    case 1:
      p.batch = negative;
      break;
    case 2:
      p.q_len = negative;
      break;
    case 3:
      p.k_len = negative;
      break;
    case 4:
      p.q_heads = fuzz.ConsumeBool() ? 0 : negative;
      break;
    case 5:
      p.kv_heads = fuzz.ConsumeBool() ? 0 : negative;
      break;
    case 6:
      p.kv_heads = p.q_heads + fuzz.ConsumeIntegralInRange<int64_t>(1, 100);
      break;
    case 7:
      p.head_dim = fuzz.ConsumeBool() ? 0 : negative;
      break;
    case 8:
      p.head_dim = fuzz.ConsumeIntegralInRange<int64_t>(4097, kHuge);
      break;
    case 9:
      p.softmax_scale = fuzz.PickValueInArray(scales);
      break;
    case 10:
      p.mode = wrong_code;
      break;
    case 11:
      p.numerics = wrong_code;
      break;
    case 12:
      p.centre = wrong_code;
      break;
    case 13:
      p.accumulator = wrong_code;
      break;
    case 14:
      p.device = wrong_code;
      break;
    case 15:
      p.threads = -fuzz.ConsumeIntegralInRange<int32_t>(1, 1 << 30);
      break;
    case 16:  // more bytes than there are addresses
      p.q_len = kHuge - fuzz.ConsumeIntegralInRange<int64_t>(0, 1000);
      p.k_len = p.q_len;
      p.batch = std::max<int64_t>(p.batch, 1);
      if (c.variable) p.cu_seqlens_q = nullptr;  // with them, sizes past the last offset would be fine
      break;
    case 17:
      if (c.variable) {
        (fuzz.ConsumeBool() ? p.cu_seqlens_q : p.cu_seqlens_k) = nullptr;
      } else {
        p.q_heads = 0;
      }
      break;
    default:
      if (c.variable) {
        Exact<int32_t>& cu = fuzz.ConsumeBool() ? c.cu_q : c.cu_k;
        const size_t i = fuzz.ConsumeIntegralInRange<size_t>(0, cu.size() - 1);
        cu[i] = fuzz.ConsumeBool() ? -1 : 200;  // not 0, or below the one before; past the end
      } else {
        p.mode = wrong_code;
      }
  }
}

// A pointer that a call cannot do without, or a size that no struct has.
void break_args(Case& c, FuzzedDataProvider& fuzz) {
  const auto short_size = [&](size_t size) { return fuzz.ConsumeIntegralInRange<size_t>(0, size - 1); };
  const bool queries = c.q.memory.size() > 0;
  const int which = fuzz.ConsumeIntegralInRange(0, 2);
  if (which == 0 || !queries || c.k.memory.size() == 0) {
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
}

void run_refused(Case& c, FuzzedDataProvider& fuzz) {
  const dmattn_problem* problem = &c.problem;
  const int what = fuzz.ConsumeIntegralInRange(0, 4);
  if (what == 0) {
    problem = nullptr;
  } else if (what == 1) {
    break_args(c, fuzz);
  } else {
    break_problem(c, fuzz);
  }
  char* json = nullptr;
  c.backward.delta_out = c.delta_out.data();
  const auto refused = [](dmattn_status status, const char* name) {
    if (status == DMATTN_OK) fail(name);
    require(dmattn_last_error()[0] != '\0', "a refusal without a message");
    require(std::strchr(dmattn_last_error(), '\n') == nullptr, "a message of more than one line");
  };
  // What the mode, centre, ... of a call that does not use them holds is not looked at by every entry.
  refused(dmattn_forward(problem, &c.forward), "forward took a wrong problem");
  refused(dmattn_backward(problem, &c.backward), "backward took a wrong problem");
  refused(dmattn_delta(problem, &c.backward), "delta took a wrong problem");
  refused(dmattn_quantise(problem, &c.quantise), "quantise took a wrong problem");
  refused(dmattn_reference(problem, &c.exact), "reference took a wrong problem");
  refused(dmattn_probe(problem, &c.probe, &json), "probe took a wrong problem");
  require(json == nullptr, "a refused probe wrote its pointer");
  require(c.outputs_untouched(), "a refused call wrote an output");
  refused(dmattn_forward(&c.problem, nullptr), "forward took no arguments");
  refused(dmattn_backward(&c.problem, nullptr), "backward took no arguments");
  refused(dmattn_workspace_size(&c.problem, nullptr, nullptr), "workspace_size took no pointers");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider fuzz(data, size);
  const bool valid = fuzz.ConsumeBool();
  Case c(fuzz);
  if (valid) {
    run_valid(c, fuzz);
  } else {
    run_refused(c, fuzz);
  }
  return 0;
}
