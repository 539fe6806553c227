// The C ABI: checks arguments, calls the backend, turns exceptions into a status and a message.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

#include "abi/backends.h"
#include "abi/probe_arguments.h"
#include "core/error.h"
#include "core/problem.h"
#include "cpu/backend.h"
#include "delta_matching/delta_matching.h"
#include "io/json_report.h"
#include "numerics/constants.h"

namespace {

using dmattn::Access;
using dmattn::InvalidValue;
using dmattn::Problem;

thread_local std::string last_error;

dmattn_status fail(dmattn_status status, const char* message) noexcept {
  try {
    last_error = message;
  } catch (...) {  // not even the message fits: the status has to do
    last_error.clear();
  }
  return status;
}

template <class Work>
dmattn_status guarded(Work work) noexcept {
  last_error.clear();
  try {
    work();
    return DMATTN_OK;
  } catch (const InvalidValue& error) {
    return fail(DMATTN_INVALID_VALUE, error.what());
  } catch (const dmattn::Unsupported& error) {
    return fail(DMATTN_UNSUPPORTED, error.what());
  } catch (const dmattn::DeviceError& error) {
    return fail(DMATTN_DEVICE_ERROR, error.what());
  } catch (const std::bad_alloc&) {
    return fail(DMATTN_OUT_OF_MEMORY, "out of host memory");
  } catch (const std::length_error&) {
    return fail(DMATTN_OUT_OF_MEMORY, "out of host memory: the problem is larger than a vector can be");
  } catch (const std::exception& error) {
    return fail(DMATTN_INTERNAL, error.what());
  } catch (...) {
    return fail(DMATTN_INTERNAL, "unknown fault");
  }
}

void check_row_vector(const Problem& problem, const void* pointer, const char* name) {
  if (problem.row_vector_length() > 0) dmattn::check_pointer(pointer, name);
}

void check_inputs(const Problem& problem, const dmattn_tensor& q, const dmattn_tensor& k, const dmattn_tensor& v) {
  check_tensor(problem, q, true, "q", Access::input);
  check_tensor(problem, k, false, "k", Access::input);
  check_tensor(problem, v, false, "v", Access::input);
}

// Whether the operand is laid out like q.
bool check_operand(const Problem& problem, int32_t operand) {
  if (operand < DMATTN_OPERAND_Q || operand > DMATTN_OPERAND_Q_SCORES)
    throw InvalidValue(fmt::format("operand: expected 0 ... 4, got {}", operand));
  const bool on_gpu = operand != DMATTN_OPERAND_Q && operand != DMATTN_OPERAND_D_O;
  if (problem.cuda && !on_gpu)
    throw dmattn::Unsupported(
        fmt::format("operand: expected K (1), V (2) or Q_SCORES (4) with device cuda, got {}", operand));
  if (!problem.cuda && operand == DMATTN_OPERAND_Q_SCORES)
    throw dmattn::Unsupported("operand: expected 0 ... 3 with device cpu, got 4 (Q_SCORES is offered with cuda alone)");
  return operand != DMATTN_OPERAND_K && operand != DMATTN_OPERAND_V;
}

// For what the GPU does not offer: the caller's tensors would be device memory.
void check_cpu_only(const dmattn_problem& problem, const char* what) {
  if (problem.device == DMATTN_CUDA)
    throw dmattn::Unsupported(fmt::format("device: expected cpu, got cuda ({} runs on the CPU alone)", what));
}

Problem check_backward(const dmattn_problem* raw, const dmattn_backward_args* args) {
  Problem problem = dmattn::check_problem(raw);
  dmattn::check_pointer(args, "args");
  dmattn::check_struct_size(args->struct_size, sizeof *args, "args");
  if (keeps_codes(problem, args->saved))
    check_tensor(problem, args->q, true, "q", Access::input);
  else
    check_inputs(problem, args->q, args->k, args->v);
  check_tensor(problem, args->o, true, "o", Access::input);
  check_tensor(problem, args->d_o, true, "d_o", Access::input);
  if ((args->saved.reference == nullptr) != (args->saved.sum == nullptr))
    throw InvalidValue("saved: expected both of reference and sum or neither, got one");
  if (!args->saved.reference && problem.numerics == dmattn::Numerics::hopper)
    check_row_vector(problem, args->lse, "lse (needed where saved is missing)");
  if (args->saved.o_low.data) check_tensor(problem, args->saved.o_low, true, "saved.o_low", Access::input);
  return problem;
}

}  // namespace

extern "C" {

const char* dmattn_version(void) { return DMATTN_VERSION_STRING; }
int32_t dmattn_numerics_version(void) { return dmattn::numerics::kNumericsVersion; }
const char* dmattn_last_error(void) { return last_error.c_str(); }
int32_t dmattn_device_available(int32_t device) {
  try {
    if (device == DMATTN_CPU) return 1;
    return device == DMATTN_CUDA && dmattn::cuda_backend() && dmattn::cuda_backend()->available() ? 1 : 0;
  } catch (...) {
    return 0;
  }
}

dmattn_status dmattn_workspace_size(const dmattn_problem* raw, size_t* forward_bytes, size_t* backward_bytes) {
  return guarded([&] {
    const Problem problem = dmattn::check_problem(raw);
    dmattn::check_pointer(forward_bytes, "forward_bytes");
    dmattn::check_pointer(backward_bytes, "backward_bytes");
    const dmattn::WorkspaceSizes sizes = backend_of(problem).workspace_size(problem);
    *forward_bytes = sizes.forward;
    *backward_bytes = sizes.backward;
  });
}

dmattn_status dmattn_saved_codes_size(const dmattn_problem* raw, size_t* bytes) {
  return guarded([&] {
    const Problem problem = dmattn::check_problem(raw);
    dmattn::check_pointer(bytes, "bytes");
    *bytes = backend_of(problem).saved_codes_size(problem);
  });
}

dmattn_status dmattn_forward(const dmattn_problem* raw, const dmattn_forward_args* args) {
  return guarded([&] {
    const Problem problem = dmattn::check_problem(raw);
    dmattn::check_pointer(args, "args");
    dmattn::check_struct_size(args->struct_size, sizeof *args, "args");
    check_inputs(problem, args->q, args->k, args->v);
    check_tensor(problem, args->o, true, "o", Access::output);
    if (args->saved.o_low.data) check_tensor(problem, args->saved.o_low, true, "saved.o_low", Access::output);
    backend_of(problem).forward(problem, *args);
  });
}

dmattn_status dmattn_backward(const dmattn_problem* raw, const dmattn_backward_args* args) {
  return guarded([&] {
    const Problem problem = check_backward(raw, args);
    if (args->dq.data) check_tensor(problem, args->dq, true, "dq", Access::output);
    if (args->dk.data) check_tensor(problem, args->dk, false, "dk", Access::output);
    if (args->dv.data) check_tensor(problem, args->dv, false, "dv", Access::output);
    backend_of(problem).backward(problem, *args);
  });
}

dmattn_status dmattn_delta(const dmattn_problem* raw, const dmattn_backward_args* args) {
  return guarded([&] {
    const Problem problem = check_backward(raw, args);
    check_row_vector(problem, args->delta_out, "delta_out");
    backend_of(problem).delta(problem, *args);
  });
}

dmattn_status dmattn_quantise(const dmattn_problem* raw, const dmattn_quantise_args* args) {
  return guarded([&] {
    const Problem problem = dmattn::check_problem(raw);
    dmattn::check_pointer(args, "args");
    dmattn::check_struct_size(args->struct_size, sizeof *args, "args");
    const bool is_query = check_operand(problem, args->operand);
    check_tensor(problem, args->x, is_query, "x", Access::input);
    if (args->operand == DMATTN_OPERAND_Q_SCORES) check_tensor(problem, args->k, false, "k", Access::input);
    if (problem.batch > 0 && (is_query ? problem.q_len : problem.k_len) > 0) {
      dmattn::check_pointer(args->codes, "codes");
      dmattn::check_pointer(args->scale, "scale");
    }
    const int64_t heads = is_query ? problem.q_heads : problem.kv_heads;
    if (args->mean && problem.batch == 0 && !problem.cuda)  // sequences without rows still have a mean each: zero
      std::fill_n(args->mean, raw->batch * heads * problem.head_dim, 0.0f);
    backend_of(problem).quantise(problem, *args);
  });
}

dmattn_status dmattn_reference(const dmattn_problem* raw, const dmattn_reference_args* args) {
  return guarded([&] {
    // FP64 knows no numerics: check as paper numerics, which takes any head_dim.
    dmattn::check_pointer(raw, "problem");
    dmattn::check_struct_size(raw->struct_size, sizeof *raw, "problem");
    dmattn_problem plain = *raw;
    check_cpu_only(plain, "reference");
    plain.numerics = DMATTN_PAPER;
    plain.centre = DMATTN_CENTRE_DEFAULT;
    const Problem problem = dmattn::check_problem(&plain);
    dmattn::check_pointer(args, "args");
    dmattn::check_struct_size(args->struct_size, sizeof *args, "args");
    check_inputs(problem, args->q, args->k, args->v);
    if (args->dq || args->dk || args->dv) check_tensor(problem, args->d_o, true, "d_o", Access::input);
    dmattn::cpu::reference(problem, *args);
  });
}

dmattn_status dmattn_probe(const dmattn_problem* raw, const dmattn_probe_args* args, char** json) {
  return guarded([&] {
    dmattn::check_pointer(json, "json");
    *json = nullptr;
    const Problem problem = dmattn::check_problem(raw);
    check_cpu_only(*raw, "probe");
    dmattn::check_pointer(args, "args");
    dmattn::check_struct_size(args->struct_size, sizeof *args, "args");
    check_inputs(problem, args->q, args->k, args->v);
    check_tensor(problem, args->d_o, true, "d_o", Access::input);
    const dmattn::Layer layer = dmattn::probe_layer(problem, *args);
    const dmattn::RunOptions options = dmattn::probe_options(problem, args->modes);
    const std::string text = dmattn::probe_json(dmattn::probe(layer, options), layer, options, "", "cpu");
    char* copy = static_cast<char*>(std::malloc(text.size() + 1));
    if (!copy) throw std::bad_alloc();
    std::memcpy(copy, text.c_str(), text.size() + 1);
    *json = copy;
  });
}

void dmattn_free(void* pointer) { std::free(pointer); }

}  // extern "C"
