#include "abi/caller.h"

#include <fmt/format.h>

#include <cstring>
#include <new>
#include <stdexcept>

#include "core/error.h"
#if defined(DMATTN_HAVE_CUDA)
#include "cuda/host_call.h"
#endif

namespace dmattn::abi {
namespace {

int32_t code(Mode mode) {
  switch (mode) {
    case Mode::stale: return DMATTN_STALE;
    case Mode::consistent: return DMATTN_CONSISTENT;
    case Mode::onepass: return DMATTN_ONEPASS;
    case Mode::matched: return DMATTN_MATCHED;
    default: throw Unsupported(fmt::format("mode: the C ABI does not offer {}", name(mode)));
  }
}

}  // namespace

void call(dmattn_status status, const char* function) {
  if (status == DMATTN_OK) return;
  const std::string what = fmt::format("{}: {}", function, dmattn_last_error());
  if (status == DMATTN_INVALID_VALUE) throw InvalidValue(what);
  if (status == DMATTN_UNSUPPORTED) throw Unsupported(what);
  if (status == DMATTN_DEVICE_ERROR) throw DeviceError(what);
  if (status == DMATTN_OUT_OF_MEMORY) throw std::bad_alloc();
  throw std::runtime_error(what);
}

void check_gpu(int device_index, const std::string& what) {
  dmattn_problem problem = hopper_problem({true, device_index}, Mode::matched);
  problem.batch = problem.q_heads = problem.kv_heads = problem.q_len = problem.k_len = 1;
  problem.head_dim = 64;
  problem.softmax_scale = 1;
  size_t forward = 0, backward = 0;
  if (dmattn_workspace_size(&problem, &forward, &backward) == DMATTN_OK) return;
  throw Unsupported(fmt::format("{} and needs a Hopper GPU (see --device-index): {}", what, dmattn_last_error()));
}

dmattn_problem hopper_problem(const Side& side, Mode mode) {
  dmattn_problem problem{};
  problem.struct_size = sizeof problem;
  problem.mode = code(mode);
  problem.numerics = DMATTN_HOPPER;
  problem.device = side.gpu ? DMATTN_CUDA : DMATTN_CPU;
  problem.device_index = side.gpu ? side.device_index : 0;
  return problem;
}

WorkspaceSizes workspace_sizes(const dmattn_problem& problem) {
  WorkspaceSizes sizes{};
  call(dmattn_workspace_size(&problem, &sizes.forward, &sizes.backward), "dmattn_workspace_size");
  return sizes;
}

size_t saved_codes_size(const dmattn_problem& problem) {
  size_t bytes = 0;
  call(dmattn_saved_codes_size(&problem, &bytes), "dmattn_saved_codes_size");
  return bytes;
}

// ---- memory of either side -----------------------------------------------------------------------------------------

class Block::Memory {
 public:
  virtual ~Memory() = default;
  virtual void* data() = 0;
  virtual void write(const void* from) = 0;
  virtual void read(void* to) const = 0;
};

class Block::HostMemory : public Memory {
 public:
  explicit HostMemory(size_t bytes) : bytes_(bytes, 0xff) {}
  void* data() override { return bytes_.data(); }
  void write(const void* from) override { std::memcpy(bytes_.data(), from, bytes_.size()); }
  void read(void* to) const override { std::memcpy(to, bytes_.data(), bytes_.size()); }

 private:
  std::vector<uint8_t> bytes_;
};

#if defined(DMATTN_HAVE_CUDA)

class Block::GpuMemory : public Memory {
 public:
  GpuMemory(int device_index, size_t bytes) : memory_(device_index, bytes) {}
  void* data() override { return memory_.data(); }
  void write(const void* from) override { memory_.write(from); }
  void read(void* to) const override { memory_.read(to); }

 private:
  cuda::DeviceMemory memory_;
};

Block::Block(const Side& side, size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  if (side.gpu)
    memory_ = std::make_unique<GpuMemory>(side.device_index, bytes);
  else
    memory_ = std::make_unique<HostMemory>(bytes);
}

void wait(const Side& side, const char* what) {
  if (side.gpu) cuda::wait_for_gpu(side.device_index, what);
}

#else

Block::Block(const Side& side, size_t bytes) : bytes_(bytes) {
  if (side.gpu) throw Unsupported("device: expected cpu, got cuda (this build has no CUDA backend)");
  if (bytes > 0) memory_ = std::make_unique<HostMemory>(bytes);
}

void wait(const Side&, const char*) {}

#endif

Block::~Block() = default;

void* Block::address() { return memory_ ? memory_->data() : nullptr; }

void Block::copy_from(const void* from, size_t bytes) {
  if (bytes != bytes_) throw std::logic_error("abi::Block: sizes differ");
  if (memory_) memory_->write(from);
}

void Block::copy_to(void* to) const {
  if (memory_) memory_->read(to);
}

// ---- calls ---------------------------------------------------------------------------------------------------------

Attention::Attention(const Side& side, const dmattn_problem& problem, const Inputs& in, bool saves_codes)
    : side_(side),
      problem_(problem),
      q_(side, in.q),
      k_(side, in.k),
      v_(side, in.v),
      d_o_(side, in.d_o),
      o_(side, in.q.size() * sizeof(uint16_t)),
      o_low_(side, in.q.size() * sizeof(uint16_t)),
      dq_(side, in.q.size() * sizeof(uint16_t)),
      dk_(side, in.k.size() * sizeof(uint16_t)),
      dv_(side, in.v.size() * sizeof(uint16_t)),
      lse_(side, rows() * sizeof(float)),
      reference_(side, rows() * sizeof(float)),
      sum_(side, 2 * rows() * sizeof(float)),
      delta_(side, rows() * sizeof(float)),
      codes_bytes_(saves_codes ? saved_codes_size(problem) : 0),
      codes_(side, codes_bytes_) {
  const auto elements = [&](int64_t length, int64_t heads) {
    return static_cast<size_t>(problem.batch * length * heads * problem.head_dim);
  };
  const size_t queries = elements(problem.q_len, problem.q_heads), keys = elements(problem.k_len, problem.kv_heads);
  if (in.q.size() != queries || in.d_o.size() != queries || in.k.size() != keys || in.v.size() != keys)
    throw std::logic_error("abi::Attention: tensors are not of the problem's size");
}

dmattn_tensor Attention::tensor(Block& block, int64_t length, int64_t heads) const {
  return {block.data(), length * heads * problem_.head_dim, heads * problem_.head_dim, problem_.head_dim};
}

dmattn_saved Attention::saved() {
  dmattn_saved out{reference_.data<float>(), sum_.data<float>(), {}, codes_.data(), codes_bytes_};
  if (problem_.mode == DMATTN_ONEPASS) out.o_low = of_queries(o_low_);
  return out;
}

void Attention::forward() {
  const size_t bytes = workspace_sizes(problem_).forward;
  Block workspace(side_, bytes);
  dmattn_forward_args args{};
  args.struct_size = sizeof args;
  args.q = of_queries(q_);
  args.k = of_keys(k_);
  args.v = of_keys(v_);
  args.o = of_queries(o_);
  args.lse = lse_.data<float>();
  args.saved = saved();
  args.workspace = workspace.data();
  args.workspace_bytes = bytes;
  call(dmattn_forward(&problem_, &args), "dmattn_forward");
  wait(side_, "dmattn_forward");  // before the workspace goes
}

void Attention::run_backward(BackwardCall function, const char* name, bool gradients) {
  const size_t bytes = workspace_sizes(problem_).backward - codes_bytes_;
  Block workspace(side_, bytes);
  dmattn_backward_args args{};
  args.struct_size = sizeof args;
  args.q = of_queries(q_);
  if (codes_bytes_ == 0) {
    args.k = of_keys(k_);
    args.v = of_keys(v_);
  }
  args.o = of_queries(o_);
  args.d_o = of_queries(d_o_);
  args.saved = saved();
  args.delta_out = delta_.data<float>();
  if (gradients) {
    args.dq = of_queries(dq_);
    args.dk = of_keys(dk_);
    args.dv = of_keys(dv_);
  }
  args.workspace = workspace.data();
  args.workspace_bytes = bytes;
  call(function(&problem_, &args), name);
  wait(side_, name);
}

void Attention::backward() { run_backward(dmattn_backward, "dmattn_backward", true); }

void Attention::delta() { run_backward(dmattn_delta, "dmattn_delta", false); }

void Attention::take_forward(const Results& from) {
  o_.write(from.o);
  o_low_.write(from.o_low);
  lse_.write(from.lse);
  reference_.write(from.reference);
  sum_.write(from.sum);
}

Results Attention::results() const {
  return {o_.read<uint16_t>(),      o_low_.read<uint16_t>(), dq_.read<uint16_t>(),
          dk_.read<uint16_t>(),     dv_.read<uint16_t>(),    lse_.read<float>(),
          reference_.read<float>(), sum_.read<float>(),      delta_.read<float>()};
}

}  // namespace dmattn::abi
