// A layer through the C ABI, on either device: what `dmattn probe --device cuda` measures.
#pragma once

#include "abi/caller.h"
#include "analysis/analysis.h"

namespace dmattn::abi {

class AbiKernels : public LayerKernels {
 public:
  // Of the options: centre, accumulator and threads. Hopper numerics, no ablations.
  AbiKernels(const Side& side, const RunOptions& options) : side_(side), options_(options) {}

  LayerOutputs run(const Layer& layer, Mode mode) override;

 private:
  dmattn_problem problem_of(const Layer& layer, Mode mode) const;

  Side side_;
  RunOptions options_;
};

}  // namespace dmattn::abi
