// The C ABI from its caller's side, on whichever device: memory, one forward and backward, and statuses that are
// exceptions again.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/backend.h"
#include "core/modes.h"
#include "delta_matching/delta_matching.h"

namespace dmattn::abi {

// Where calls run and where their tensors lie.
struct Side {
  bool gpu = false;
  int device_index = 0;
};

// Throws what the status stands for, `function` in front of the message.
void call(dmattn_status status, const char* function);

// Throws Unsupported with one line, `what` in front, if the kernels do not run on that GPU, or there is none.
void check_gpu(int device_index, const std::string& what);

// Waits until a side has done what was queued; throws if any of it failed.
void wait(const Side& side, const char* what);

// Hopper numerics on a side; the shape is left to the caller.
dmattn_problem hopper_problem(const Side& side, Mode mode);

WorkspaceSizes workspace_sizes(const dmattn_problem& problem);
size_t saved_codes_size(const dmattn_problem& problem);

// An array in the memory of a side; NaN until something is written.
class Block {
 public:
  Block(const Side& side, size_t bytes);
  template <class T>
  Block(const Side& side, const std::vector<T>& content) : Block(side, content.size() * sizeof(T)) {
    write(content);
  }
  ~Block();

  template <class T = void>
  T* data() {
    return static_cast<T*>(address());
  }
  template <class T>
  void write(const std::vector<T>& from) {
    copy_from(from.data(), from.size() * sizeof(T));
  }
  template <class T>
  std::vector<T> read() const {
    std::vector<T> to(bytes_ / sizeof(T));
    copy_to(to.data());
    return to;
  }

 private:
  class Memory;
  class HostMemory;
  class GpuMemory;

  void* address();  // null if empty
  void copy_from(const void* from, size_t bytes);
  void copy_to(void* to) const;

  size_t bytes_;
  std::unique_ptr<Memory> memory_;
};

// BF16, contiguous: [batch, length, heads, head_dim].
struct Inputs {
  std::vector<uint16_t> q, k, v, d_o;
};

// What a forward and a backward leave, on the host. The row vectors are those of dmattn_saved, and true delta.
struct Results {
  std::vector<uint16_t> o, o_low, dq, dk, dv;
  std::vector<float> lse, reference, sum, delta;
};

// The tensors of one problem in the memory of a side, and the calls on them. Sequences of one length. With saved codes
// the forward leaves them, where the side has any, and the backward gets neither k nor v.
class Attention {
 public:
  Attention(const Side& side, const dmattn_problem& problem, const Inputs& in, bool saves_codes = false);

  void forward();
  void backward();
  void delta();                            // alone
  void take_forward(const Results& from);  // in place of the own one

  std::vector<float> delta_out() const { return delta_.read<float>(); }
  Results results() const;

 private:
  size_t rows() const { return static_cast<size_t>(problem_.batch * problem_.q_heads * problem_.q_len); }
  dmattn_tensor tensor(Block& block, int64_t length, int64_t heads) const;
  dmattn_tensor of_queries(Block& block) const { return tensor(block, problem_.q_len, problem_.q_heads); }
  dmattn_tensor of_keys(Block& block) const { return tensor(block, problem_.k_len, problem_.kv_heads); }
  dmattn_saved saved();
  using BackwardCall = dmattn_status (*)(const dmattn_problem*, const dmattn_backward_args*);
  void run_backward(BackwardCall function, const char* name, bool gradients);

  Side side_;
  dmattn_problem problem_;
  Block q_, k_, v_, d_o_, o_, o_low_, dq_, dk_, dv_, lse_, reference_, sum_, delta_;
  size_t codes_bytes_;  // 0: none are kept
  Block codes_;
};

}  // namespace dmattn::abi
