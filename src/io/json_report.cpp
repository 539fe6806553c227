#include "io/json_report.h"

#include "io/json_build.h"

namespace dmattn {
namespace {

ordered_json head_of_document(const char* schema, const RunOptions& options, const std::string& device) {
  return {{"schema", schema},
          {"version", DMATTN_VERSION_STRING},
          {"numerics", name(options.numerics)},
          {"centre", name(options.centre)},
          {"device", device}};
}

// The cast's own errors are not spread like P, so only a sum from before it sharpens or flattens.
ordered_json json_of(const SignedResidual& residual, bool before_cast) {
  ordered_json document{{"rms", number(residual.rms)}, {"mean", number(residual.mean)}};
  if (before_cast) {
    document["sharpens"] = number(residual.sharpens);
    document["flattens"] = number(residual.flattens);
  }
  return document;
}

// Four digits: there is one of them for each channel, head and mode.
ordered_json json_of(const std::vector<double>& columns) {
  ordered_json out = ordered_json::array();
  for (const double value : columns)
    out.push_back(std::isfinite(value) ? ordered_json(std::strtod(fmt::format("{:.3e}", value).c_str(), nullptr))
                                       : ordered_json(nullptr));
  return out;
}

// A head's own entry names itself as its worst head, so that both levels read alike.
ordered_json json_of(const ModeResult& mode) {
  const bool known = mode.worst_head >= 0;
  return {
      {"residual", json_of(mode.residual)},
      {"residual_after_cast", json_of(mode.residual_after_cast)},
      {"column_sum", number(mode.column_sum)},
      {"error", json_of(mode.error)},
      {"worst_head",
       {{"head", known ? ordered_json(mode.worst_head) : ordered_json(nullptr)}, {"dq", number(mode.worst_head_dq)}}},
      {"signed_residual", json_of(mode.signed_residual, true)},
      {"signed_residual_after_cast", json_of(mode.signed_residual_after_cast, false)},
      {"column_sum_after_cast", number(mode.column_sum_after_cast)}};
}

ordered_json json_of(const std::map<Mode, ModeResult>& modes) {
  ordered_json document = ordered_json::object();
  for (const auto& [mode, result] : modes) document[std::string(name(mode))] = json_of(result);
  return document;
}

ordered_json json_of(const HeadResult& head) {
  std::map<Mode, ModeResult> modes = head.modes;
  for (auto& [mode, result] : modes) {
    result.worst_head = head.head;
    result.worst_head_dq = result.error.dq;
  }
  ordered_json document{{"head", head.head}, {"modes", json_of(modes)}, {"entropy", number(head.entropy)}};
  for (const auto& [mode, result] : head.modes)
    document["modes"][std::string(name(mode))]["columns_after_cast"] = json_of(result.columns_after_cast);
  return document;
}

ordered_json input_of(const Layer& layer, const std::string& file) {
  ordered_json input{{"file", file.empty() ? ordered_json(nullptr) : ordered_json(file)},
                     {"tokens", layer.q_tokens},
                     {"q_heads", layer.q_heads},
                     {"kv_heads", layer.kv_heads},
                     {"head_dim", layer.head_dim},
                     {"softmax_scale", number(layer.softmax_scale)},
                     {"causal", layer.causal}};
  if (layer.k_tokens != layer.q_tokens) input["k_tokens"] = layer.k_tokens;
  return input;
}

}  // namespace

ordered_json probe_document(const ProbeResult& result, const Layer& layer, const RunOptions& options,
                            const std::string& file, const std::string& device) {
  ordered_json document = head_of_document("dmattn.probe/1", options, device);
  document["input"] = input_of(layer, file);
  document["modes"] = json_of(result.modes);
  document["heads"] = ordered_json::array();
  for (const HeadResult& head : result.heads) document["heads"].push_back(json_of(head));
  document["nonfinite_heads"] = result.nonfinite_heads;
  return document;
}

ordered_json sweep_document(const std::vector<SweepRow>& rows, const RunOptions& options, const std::string& device) {
  ordered_json document = head_of_document("dmattn.sweep/1", options, device);
  document["rows"] = ordered_json::array();
  for (const SweepRow& row : rows) {
    document["rows"].push_back({{"inputs", row.inputs},
                                {"spread", number(row.spread)},
                                {"mode", name(row.mode)},
                                {"residual", number(row.residual)},
                                {"residual_after_cast", number(row.residual_after_cast)},
                                {"column_sum", number(row.column_sum)},
                                {"error_o", number(row.error_o)},
                                {"error_dq", number(row.error_dq)},
                                {"error_dk", number(row.error_dk)},
                                {"error_dv", number(row.error_dv)}});
  }
  return document;
}

ordered_json row_document(const RowResult& result, const RunOptions& options, const std::string& device) {
  ordered_json document = head_of_document("dmattn.row/1", options, device);
  document["row"] = {
      {"tokens", result.row.tokens}, {"head_dim", result.row.head_dim}, {"query", result.row.tokens - 1}};
  document["modes"] = ordered_json::object();
  for (const auto& [mode, row] : result.modes) {
    document["modes"][std::string(name(mode))] = {{"delta", number(row.delta)},
                                                  {"sum_positive", number(row.sum_positive)},
                                                  {"sum_negative", number(row.sum_negative)},
                                                  {"row_sum", number(row.row_sum)},
                                                  {"share", number(row.share)}};
  }
  document["split"] = {{"probability", number(result.split_probability)},
                       {"gradient", number(result.split_gradient)},
                       {"remainder", number(result.split_remainder)}};
  return document;
}

std::string probe_json(const ProbeResult& result, const Layer& layer, const RunOptions& options,
                       const std::string& file, const std::string& device) {
  return dumped(probe_document(result, layer, options, file, device), 2);
}

std::string sweep_json(const std::vector<SweepRow>& rows, const RunOptions& options, const std::string& device) {
  return dumped(sweep_document(rows, options, device), 2);
}

std::string row_json(const RowResult& result, const RunOptions& options, const std::string& device) {
  return dumped(row_document(result, options, device), 2);
}

}  // namespace dmattn
