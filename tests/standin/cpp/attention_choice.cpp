// Which kernel scaled_dot_product_attention takes: as sdp_utils.cpp of CUDA, for those that cuda_standin/attention.py has.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/SDPBackend.h>
#include <torch/library.h>

#include <cstdlib>

namespace standin {
namespace {

using at::Tensor;

bool is_ampere_or_newer() {
  const char* capability = std::getenv("STANDIN_CAPABILITY");
  return !capability || !*capability || std::atof(capability) >= 8;
}

int64_t choose(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout,
               bool, std::optional<double>, bool grouped) {
  const auto& context = at::globalContext();
  const bool half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  const bool fits = dropout == 0 && query.dim() == 4 && query.size(-1) == value.size(-1) && query.size(-1) % 8 == 0;
  const bool single = query.scalar_type() == at::kFloat;  // no fused kernel takes float64
  const bool has_mask = mask && mask->defined();
  if (fits && half && !has_mask && is_ampere_or_newer() && context.userEnabledFlashSDP())
    return static_cast<int64_t>(at::SDPBackend::flash_attention);
  if (fits && (half || single) && !grouped && !(has_mask && mask->requires_grad()) && context.userEnabledMemEfficientSDP())
    return static_cast<int64_t>(at::SDPBackend::efficient_attention);
  TORCH_CHECK(context.userEnabledMathSDP(), "No available kernel. Aborting execution.");
  return static_cast<int64_t>(at::SDPBackend::math);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) { library.impl("_fused_sdp_choice", choose); }

}  // namespace
}  // namespace standin

namespace at::native {
using standin::choose;
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &choose)
}  // namespace at::native
