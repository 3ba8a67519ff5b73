// Memory of the devices and pinned memory of the host: counted as torch's caching allocators count them.
#include "standin.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace standin {
namespace {

using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kBlock = 512;         // c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize
constexpr size_t kSegment = 2 << 20;   // kSmallBuffer
constexpr size_t kContext = 400 << 20; // what a CUDA context takes of the card, about; of a small one a twentieth
constexpr size_t kAggregate = 0;       // c10::CachingAllocator::StatType::AGGREGATE
constexpr size_t kAlignment = 64;

int64_t rounded(size_t bytes, size_t unit = kBlock) { return static_cast<int64_t>((bytes + unit - 1) / unit * unit); }

void* allocate_on_host(size_t bytes) {
  void* data = nullptr;
  TORCH_CHECK(posix_memalign(&data, kAlignment, std::max(bytes, kAlignment)) == 0, "the host has no memory left");
  return data;
}

// A block of a device. Its bytes are the host's: allocated here, or those of a CPU kernel's result.
class Block {
 public:
  Block(void* data, size_t bytes, c10::DeviceIndex device, std::optional<c10::Storage> host = std::nullopt)
      : data(data), bytes(bytes), device(device), host(std::move(host)) {}

  void* data;
  size_t bytes;
  c10::DeviceIndex device;
  std::optional<c10::Storage> host;
  std::vector<c10::StreamId> used_on;

  // Frees the memory as soon as no stream uses it any more.
  void release() {
    while (!used_on.empty()) {
      const auto stream = used_on.back();
      used_on.pop_back();
      if (is_idle(stream)) continue;
      enqueue(stream, [this] { release(); });
      return;
    }
    if (poisons() && (!host || host->use_count() == 1)) std::memset(data, kPoison, bytes);
    if (poisons() && !all_idle()) {  // a late copy may still come here, as on a device whose memory is never unmapped
      const std::lock_guard<std::mutex> lock(parked_mutex);
      parked.push_back(this);
      return;
    }
    for (auto* block : take_parked()) block->free();
    free();
  }

  void free() {
    if (!host) std::free(data);
    delete this;
  }

 private:
  static inline std::mutex parked_mutex;
  static inline std::vector<Block*> parked;

  static std::vector<Block*> take_parked() {
    const std::lock_guard<std::mutex> lock(parked_mutex);
    return std::exchange(parked, {});
  }
};

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = current_device();
    if (bytes == 0) return {nullptr, c10::Device(kType, device)};
    count(device, bytes);
    auto* block = new Block(allocate_on_host(bytes), bytes, device);
    if (poisons()) std::memset(block->data, kPoison, bytes);
    return hand_out(block);
  }

  c10::DataPtr adopt(const c10::Storage& host, c10::DeviceIndex device) {
    count(device, host.nbytes());
    return hand_out(new Block(const_cast<void*>(host.data()), host.nbytes(), device, host));
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record_stream(data, stream.id()); }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& stats : stats_) {
      auto& reserved = stats.reserved_bytes[kAggregate];
      reserved.decrease(reserved.current - rounded(stats.allocated_bytes[kAggregate].current, kSegment));
    }
  }
  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_.at(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& stats = stats_.at(device);
    for (auto* stat : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes, &stats.requested_bytes, &stats.allocation})
      (*stat)[kAggregate].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const auto reserved = getDeviceStats(device).reserved_bytes[kAggregate].current;
    return {total_bytes() - reserved, total_bytes() + std::min(kContext, total_bytes() / 20)};
  }

 private:
  std::mutex mutex_;
  std::vector<DeviceStats> stats_{static_cast<size_t>(num_devices())};

  // Raises what a full device raises.
  void count(c10::DeviceIndex device, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& stats = stats_.at(device);
    const auto size = rounded(bytes);
    if (stats.allocated_bytes[kAggregate].current + size > static_cast<int64_t>(total_bytes())) {
      stats.num_alloc_retries++;
      stats.num_ooms++;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", size, " bytes. GPU ", int(device),
                       " (a stand-in) has a total capacity of ", total_bytes(), " bytes");
    }
    stats.allocated_bytes[kAggregate].increase(size);
    stats.active_bytes[kAggregate].increase(size);
    stats.requested_bytes[kAggregate].increase(bytes);
    stats.allocation[kAggregate].increase(1);
    auto& reserved = stats.reserved_bytes[kAggregate];
    const auto needed = rounded(stats.allocated_bytes[kAggregate].current, kSegment);
    if (needed > reserved.current) reserved.increase(needed - reserved.current);
  }

  void discount(const Block& block) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& stats = stats_.at(block.device);
    stats.allocated_bytes[kAggregate].decrease(rounded(block.bytes));
    stats.active_bytes[kAggregate].decrease(rounded(block.bytes));
    stats.requested_bytes[kAggregate].decrease(block.bytes);
    stats.allocation[kAggregate].decrease(1);
  }

  void tell_profiler(const Block& block, int64_t bytes) {
    const auto stats = getDeviceStats(block.device);
    c10::reportMemoryUsageToProfiler(block.data, bytes, stats.allocated_bytes[kAggregate].current,
                                     stats.reserved_bytes[kAggregate].current, c10::Device(kType, block.device));
  }

  c10::DataPtr hand_out(Block* block) {
    tell_profiler(*block, rounded(block->bytes));
    return {block->data, block, &DeviceAllocator::free_block, c10::Device(kType, block->device)};
  }

  static void free_block(void* context);
};

DeviceAllocator& allocator() {
  static auto* made = new DeviceAllocator;  // never destroyed: tensors outlive what C++ destroys at the end
  return *made;
}

void DeviceAllocator::free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  allocator().discount(*block);
  allocator().tell_profiler(*block, -rounded(block->bytes));
  block->release();
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = allocate_on_host(bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    blocks_[static_cast<const char*>(data)] = std::max<size_t>(bytes, 1);
    return {data, data, &PinnedAllocator::free_block, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

  bool owns(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = blocks_.upper_bound(static_cast<const char*>(data));
    if (after == blocks_.begin()) return false;
    const auto& [begin, bytes] = *std::prev(after);
    return static_cast<const char*>(data) < begin + bytes;
  }

 private:
  std::mutex mutex_;
  std::map<const char*, size_t> blocks_;

  static void free_block(void* data);
};

PinnedAllocator& pinned() {
  static auto* made = new PinnedAllocator;
  return *made;
}

void PinnedAllocator::free_block(void* data) {
  {
    std::lock_guard<std::mutex> lock(pinned().mutex_);
    pinned().blocks_.erase(static_cast<const char*>(data));
  }
  std::free(data);
}

const bool registered = [] {
  c10::SetAllocator(kType, &allocator(), /*priority=*/1);
  return true;
}();

}  // namespace

c10::Allocator* device_allocator() { return &allocator(); }
c10::Allocator* pinned_allocator() { return &pinned(); }
bool is_pinned(const void* data) { return pinned().owns(data); }

c10::Storage adopt(const c10::Storage& host, c10::DeviceIndex device) {
  auto data = host.nbytes() ? allocator().adopt(host, device) : c10::DataPtr(nullptr, c10::Device(kType, device));
  return {c10::Storage::use_byte_size_t(), host.nbytes(), std::move(data), &allocator(), /*resizable=*/true};
}

void record_stream(const c10::DataPtr& data, c10::StreamId stream) {
  if (auto* block = static_cast<Block*>(data.get_context())) block->used_on.push_back(stream);
}

}  // namespace standin
