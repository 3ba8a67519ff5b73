// DDP's clock. torch has one for the CPU and one for CUDA; this device's is the host's.
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace c10d {
namespace {

struct HostTimer final : Timer {
  explicit HostTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto from = getTimestamp(start), to = getTimestamp(end);
    if (!from || !to || *to < *from) return std::nullopt;
    return *to - *from;
  }
};

}  // namespace
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, HostTimer)
}  // namespace c10d
