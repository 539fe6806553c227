#include "core/problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"

namespace dmattn {
namespace {

constexpr int64_t kMostElements = int64_t{1} << 48;  // of one tensor: far above any memory, far below overflow
constexpr int64_t kWidestPaperHead = 4096;
constexpr int kMostThreads = 4096;
constexpr size_t kDefaultWorkspaceCap = size_t{1} << 30;
constexpr int64_t kDeviceBlockRows = 128;             // the kernels pad every sequence to blocks of this many rows
constexpr int64_t kMostWorkItems = int64_t{1} << 30;  // of a kernel: blocks x heads, with room to round up

#if defined(DMATTN_HAVE_CUDA)
constexpr bool kHaveCuda = true;
#else
constexpr bool kHaveCuda = false;
#endif

void check_range(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most)
    throw InvalidValue(fmt::format("{}: expected {} ... {}, got {}", name, least, most, value));
}

int64_t product(std::initializer_list<int64_t> factors, const char* what) {
  int64_t total = 1;
  for (const int64_t factor : factors)
    if (__builtin_mul_overflow(total, factor, &total) || total > kMostElements)
      throw InvalidValue(fmt::format("{}: expected at most 2^48 elements, got more", what));
  return total;
}

template <class Enum>
Enum choice(const char* name, int32_t value, std::initializer_list<Enum> choices) {
  if (value < 0 || static_cast<size_t>(value) >= choices.size())
    throw InvalidValue(fmt::format("{}: expected 0 ... {}, got {}", name, choices.size() - 1, value));
  return choices.begin()[value];
}

void check_offsets(const char* name, const int32_t* offsets, int64_t batch, int64_t total) {
  if (offsets[0] != 0) throw InvalidValue(fmt::format("{}[0]: expected 0, got {}", name, offsets[0]));
  for (int64_t b = 0; b < batch; ++b)
    if (offsets[b + 1] < offsets[b])
      throw InvalidValue(fmt::format("{}[{}]: expected at least {} (offsets never fall), got {}", name, b + 1,
                                     offsets[b], offsets[b + 1]));
  if (offsets[batch] > total)
    throw InvalidValue(fmt::format("{}[{}]: expected at most {} rows, got {}", name, batch, total, offsets[batch]));
}

void add_sequences(Problem& out, const dmattn_problem& in) {
  if ((in.cu_seqlens_q == nullptr) != (in.cu_seqlens_k == nullptr))
    throw InvalidValue("cu_seqlens: expected both of cu_seqlens_q and cu_seqlens_k or neither, got one");
  out.variable_length = in.cu_seqlens_q != nullptr;
  out.max_q_len = in.q_len;
  out.max_k_len = in.k_len;
  if (!out.variable_length) {
    if (out.cuda) return;
    if (in.q_len == 0 && in.k_len == 0) out.batch = 0;  // however many sequences without rows: nothing to do
    out.sequences.assign(static_cast<size_t>(out.batch), {0, in.q_len, 0, in.k_len});
    return;
  }
  if (out.cuda) {  // the offsets are on the device, where the kernels clamp them
    check_range("max_q_len", in.max_q_len, 0, in.q_len);
    check_range("max_k_len", in.max_k_len, 0, in.k_len);
    if (in.max_q_len > 0) out.max_q_len = in.max_q_len;
    if (in.max_k_len > 0) out.max_k_len = in.max_k_len;
    out.cu_seqlens_q = in.cu_seqlens_q;
    out.cu_seqlens_k = in.cu_seqlens_k;
    return;
  }
  check_offsets("cu_seqlens_q", in.cu_seqlens_q, in.batch, in.q_len);
  check_offsets("cu_seqlens_k", in.cu_seqlens_k, in.batch, in.k_len);
  for (int64_t b = 0; b < in.batch; ++b)
    out.sequences.push_back({in.cu_seqlens_q[b], in.cu_seqlens_q[b + 1] - in.cu_seqlens_q[b], in.cu_seqlens_k[b],
                             in.cu_seqlens_k[b + 1] - in.cu_seqlens_k[b]});
}

void check_device(const dmattn_problem& in) {
  if (in.device != DMATTN_CPU && in.device != DMATTN_CUDA)
    throw InvalidValue(fmt::format("device: expected 0 (cpu) or 1 (cuda), got {}", in.device));
  if (in.device == DMATTN_CPU) return;
  if (!kHaveCuda) throw Unsupported("device: expected cpu, got cuda (this build has no CUDA backend)");
  check_range("device_index", in.device_index, 0, std::numeric_limits<int32_t>::max());
}

// The kernels count rows, blocks and images in 32 bits.
void check_device_limits(const Problem& p) {
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  check_range("batch (on CUDA)", p.batch, 0, most - 1);
  check_range("q_heads (on CUDA)", p.q_heads, 1, most);
  struct Side {
    const char *rows_name, *longest_name;
    int64_t rows, longest, heads;
  };
  for (const Side& side : {Side{"q_len (on CUDA)", "max_q_len", p.q_len, p.max_q_len, p.q_heads},
                           Side{"k_len (on CUDA)", "max_k_len", p.k_len, p.max_k_len, p.kv_heads}}) {
    check_range(side.rows_name, side.rows, 0, most);
    // Every sequence as long as the longest: that many work items are counted.
    const int64_t blocks = p.batch * ((side.longest + kDeviceBlockRows - 1) / kDeviceBlockRows);
    // Rounding a sequence's rows up to two blocks stays below 2^31.
    const int64_t limit = std::min(most / kDeviceBlockRows - 1, kMostWorkItems / side.heads);
    if (blocks > limit)
      throw InvalidValue(fmt::format(
          "{}: expected batch x blocks of {} rows of the longest sequence to be at most {} with {} heads, got {}",
          p.variable_length ? side.longest_name : side.rows_name, kDeviceBlockRows, limit, side.heads, blocks));
  }
}

void check_combination(const Problem& p) {
  if (p.cuda && p.numerics == Numerics::paper)
    throw Unsupported("numerics: expected hopper with device cuda, got paper (it runs on the CPU alone)");
  if (p.cuda && p.accumulator == Accumulator::fp32)
    throw Unsupported("accumulator: expected tensor_core with device cuda, got fp32 (it runs on the CPU alone)");
  if (p.numerics == Numerics::paper) {
    check_range("head_dim", p.head_dim, 1, kWidestPaperHead);
    if (p.centre == Centre::qk) throw Unsupported("centre: expected none or k in paper numerics, got qk");
  } else if (p.head_dim != 64 && p.head_dim != 128 && p.head_dim != 256) {
    throw Unsupported(fmt::format(
        "head_dim: expected 64, 128 or 256 in hopper numerics, got {} (paper numerics takes any on the CPU)",
        p.head_dim));
  }
}

}  // namespace

bool needs_unrounded_sum(const Problem& problem, const dmattn_forward_args& args) {
  return args.lse != nullptr || problem.mode != Mode::onepass || problem.numerics != Numerics::hopper;
}

bool keeps_codes(const Problem& problem, const dmattn_saved& saved) { return problem.cuda && saved.codes != nullptr; }

void check_struct_size(size_t got, size_t expected, const std::string& name) {
  if (got != expected)
    throw InvalidValue(
        fmt::format("{}.struct_size: expected {}, got {} (header and library differ?)", name, expected, got));
}

void check_pointer(const void* pointer, const std::string& name) {
  if (pointer == nullptr) throw InvalidValue(name + ": expected a pointer, got NULL");
}

Problem check_problem(const dmattn_problem* problem) {
  check_pointer(problem, "problem");
  const dmattn_problem& in = *problem;
  check_struct_size(in.struct_size, sizeof(dmattn_problem), "problem");
  check_device(in);
  constexpr int64_t most = kMostElements;
  check_range("batch", in.batch, 0, int64_t{1} << 31);
  check_range("q_heads", in.q_heads, 1, int64_t{1} << 31);
  check_range("kv_heads", in.kv_heads, 1, int64_t{1} << 31);
  check_range("q_len", in.q_len, 0, most);
  check_range("k_len", in.k_len, 0, most);
  check_range("head_dim", in.head_dim, 1, kWidestPaperHead);
  if (in.q_heads % in.kv_heads != 0)
    throw InvalidValue(fmt::format("q_heads: expected a multiple of kv_heads = {}, got {}", in.kv_heads, in.q_heads));
  const int64_t entries = in.cu_seqlens_q ? 1 : in.batch;
  product({std::max<int64_t>(entries, 1), in.q_heads, std::max<int64_t>(in.q_len, 1), in.head_dim}, "q");
  product({std::max<int64_t>(entries, 1), in.kv_heads, std::max<int64_t>(in.k_len, 1), in.head_dim}, "k");
  if (!std::isfinite(in.softmax_scale) || in.softmax_scale <= 0)
    throw InvalidValue(fmt::format("softmax_scale: expected a finite number above 0, got {}", in.softmax_scale));
  if (in.causal != 0 && in.causal != 1) throw InvalidValue(fmt::format("causal: expected 0 or 1, got {}", in.causal));
  check_range("threads", in.threads, 0, kMostThreads);
  Problem out{in.batch,
              in.q_heads,
              in.kv_heads,
              in.q_len,
              in.k_len,
              in.head_dim,
              in.softmax_scale,
              in.causal == 1,
              false,
              Mode::matched,
              Numerics::hopper,
              Centre::qk,
              Accumulator::tensor_core,
              in.threads,
              {}};
  out.cuda = in.device == DMATTN_CUDA;
  out.device_index = in.device_index;
  out.stream = in.stream;
  out.workspace_cap = in.workspace_cap > 0 ? in.workspace_cap : kDefaultWorkspaceCap;
  out.mode = choice("mode", in.mode, {Mode::matched, Mode::onepass, Mode::consistent, Mode::stale});
  out.numerics = choice("numerics", in.numerics, {Numerics::hopper, Numerics::paper});
  out.centre = choice("centre", in.centre, {default_centre(out.numerics), Centre::none, Centre::k, Centre::qk});
  out.accumulator = choice("accumulator", in.accumulator, {Accumulator::tensor_core, Accumulator::fp32});
  check_combination(out);
  add_sequences(out, in);
  if (out.cuda) check_device_limits(out);
  return out;
}

void check_tensor(const Problem& problem, const dmattn_tensor& tensor, bool is_query, const std::string& name,
                  Access access) {
  const int64_t entries = problem.variable_length ? 1 : problem.batch;
  const int64_t rows = is_query ? problem.q_len : problem.k_len;
  const int64_t heads = is_query ? problem.q_heads : problem.kv_heads;
  if (entries == 0 || rows == 0 || problem.batch == 0) return;  // nothing to read or write
  check_pointer(tensor.data, name + ".data");
  if (reinterpret_cast<uintptr_t>(tensor.data) % sizeof(uint16_t) != 0)
    throw InvalidValue(name + ".data: expected an address aligned to 2 bytes");
  struct Extent {
    int64_t stride, count;
    const char* name;
  };
  std::vector<Extent> extents{{tensor.seq_stride, rows, "seq_stride"}, {tensor.head_stride, heads, "head_stride"}};
  if (!problem.variable_length) extents.push_back({tensor.batch_stride, entries, "batch_stride"});
  int64_t reach = problem.head_dim;
  for (const Extent& extent : extents) {
    int64_t span = 0;
    if (extent.count <= 1) continue;
    if (extent.stride < 0)
      throw InvalidValue(fmt::format("{}.{}: expected at least 0, got {}", name, extent.name, extent.stride));
    if (__builtin_mul_overflow(extent.stride, extent.count - 1, &span) || __builtin_add_overflow(reach, span, &reach) ||
        reach > kMostElements)
      throw InvalidValue(
          fmt::format("{}.{}: {} is too large for {} entries", name, extent.name, extent.stride, extent.count));
  }
  if (access == Access::input) return;
  // Sorted by stride, each dimension must step over all the smaller ones.
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) { return a.stride < b.stride; });
  int64_t below = problem.head_dim;
  for (const Extent& extent : extents) {
    if (extent.count <= 1) continue;
    if (extent.stride < below)
      throw InvalidValue(fmt::format("{}.{}: expected at least {} so that entries do not overlap, got {}", name,
                                     extent.name, below, extent.stride));
    below = extent.stride * (extent.count - 1) + below;
  }
}

}  // namespace dmattn
