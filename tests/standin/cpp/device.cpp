// What torch asks of a kind of device: how many there are, streams and events, generators, and CUDA's hooks.
#include "standin.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "generator.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <unordered_map>

namespace standin {
namespace {

double setting(const char* name, double otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? std::atof(value) : otherwise;
}

using WaitCallback = void (*)(const char* kind);
std::atomic<WaitCallback> wait_callback{nullptr};
std::atomic<int> sync_debug_mode{0};  // of torch.cuda.set_sync_debug_mode: 1 warns, 2 raises

thread_local c10::DeviceIndex device_of_thread = 0;
thread_local std::unordered_map<c10::DeviceIndex, c10::StreamId> streams_of_thread;
std::atomic<c10::StreamId> next_stream{1};

// The work that a stream has not done yet. Numbers count from the stream's first work on, as events name them.
struct Queue {
  uint64_t num_done = 0, num_queued = 0;
  std::deque<Work> waiting;
};

std::recursive_mutex queues_mutex;
std::unordered_map<c10::StreamId, Queue>& queues() {
  static auto* made = new std::unordered_map<c10::StreamId, Queue>;
  return *made;
}

void finish_until(c10::StreamId stream, uint64_t number) {
  std::lock_guard<std::recursive_mutex> lock(queues_mutex);
  auto& queue = queues()[stream];
  while (queue.num_done < number && !queue.waiting.empty()) {
    auto work = std::move(queue.waiting.front());
    queue.waiting.pop_front();
    queue.num_done++;
    work();
  }
}

void finish_all() {
  std::lock_guard<std::recursive_mutex> lock(queues_mutex);
  std::vector<c10::StreamId> streams;
  for (const auto& [stream, queue] : queues()) streams.push_back(stream);
  for (const auto stream : streams) finish(stream);
}

struct Event {
  std::chrono::steady_clock::time_point time;
  c10::StreamId stream = 0;
  uint64_t number = 0;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;

  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices(); }
  c10::Device getDevice() const override { return {kType, current_device()}; }
  c10::Device exchangeDevice(c10::Device device) const override { return {kType, exchange_device(device.index())}; }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchange_device(device.index()); }

  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, indexed(device), current_stream(indexed(device).index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, indexed(device)); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    return c10::Stream(c10::Stream::UNSAFE, indexed(device), next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    streams_of_thread[stream.device_index()] = stream.id();
    return before;
  }
  // Whoever asks again and again finds it done some time: here at once.
  bool queryStream(const c10::Stream& stream) const override {
    finish(stream.id());
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    note_wait("synchronize stream");
    finish(stream.id());
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    note_wait("synchronize device", /*is_asked_for=*/true);
    finish_all();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, stream.id());
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    std::lock_guard<std::recursive_mutex> lock(queues_mutex);
    *static_cast<Event*>(*event) = {std::chrono::steady_clock::now(), stream.id(), queues()[stream.id()].num_queued};
  }
  void block(void* event, const c10::Stream&) const override {
    if (const auto* recorded = static_cast<Event*>(event)) finish_until(recorded->stream, recorded->number);
  }
  bool queryEvent(void* event) const override {
    block(event, getDefaultStream(getDevice()));
    return true;
  }
  void synchronizeEvent(void* event) const override {
    note_wait("synchronize event", /*is_asked_for=*/true);
    queryEvent(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const auto elapsed = static_cast<Event*>(second)->time - static_cast<Event*>(first)->time;
    return std::chrono::duration<double, std::milli>(elapsed).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

 private:
  static c10::Device indexed(c10::Device device) {
    return {kType, device.index() < 0 ? current_device() : device.index()};
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}

  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }

  int getNumGPUs() const override { return num_devices(); }
  c10::DeviceIndex deviceCount() const override { return num_devices(); }
  c10::DeviceIndex current_device() const override { return standin::current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return standin::current_device(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { exchange_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return exchange_device(index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchange_device(index); }
  void deviceSynchronize(c10::DeviceIndex) const override {
    note_wait("synchronize device", /*is_asked_for=*/true);
    finish_all();
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return new_generator(index); }

  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Device getDeviceFromPtr(void*) const override { return {kType, 0}; }
};

// Draws on the host, from a state of its own: what a device draws does not move the host's generator, nor the other way.
struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator inner;

  explicit DeviceGenerator(c10::DeviceIndex index, at::Generator of = at::detail::createCPUGenerator())
      : GeneratorImpl({kType, index}, c10::DispatchKeySet(c10::DispatchKey::CUDA)), inner(std::move(of)) {}

  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device_.index(), inner.clone()); }
};

}  // namespace

c10::DeviceIndex num_devices() {
  static const auto count = static_cast<c10::DeviceIndex>(setting("STANDIN_DEVICES", 1));
  return count;
}
size_t total_bytes() {
  static const auto bytes = static_cast<size_t>(setting("STANDIN_GIB", 8) * (size_t(1) << 30));
  return bytes;
}
bool poisons() {
  static const bool on = setting("STANDIN_POISON", 0) != 0;
  return on;
}
bool has_float64() {
  static const bool has = setting("STANDIN_FLOAT64", 1) != 0;
  return has;
}

c10::DeviceIndex current_device() { return device_of_thread; }
c10::DeviceIndex exchange_device(c10::DeviceIndex index) {
  return std::exchange(device_of_thread, index < 0 ? device_of_thread : index);
}
c10::StreamId current_stream(c10::DeviceIndex index) { return streams_of_thread[index]; }

void note_wait(const char* kind, bool is_asked_for) {
  if (const auto callback = wait_callback.load()) callback(kind);
  if (is_asked_for) return;
  TORCH_CHECK(sync_debug_mode < 2, "called a synchronizing CUDA operation");
  if (sync_debug_mode == 1) TORCH_WARN("called a synchronizing CUDA operation");
}

void enqueue(c10::StreamId stream, Work work) {
  std::lock_guard<std::recursive_mutex> lock(queues_mutex);
  auto& queue = queues()[stream];
  queue.waiting.push_back(std::move(work));
  queue.num_queued++;
}
bool is_idle(c10::StreamId stream) {
  std::lock_guard<std::recursive_mutex> lock(queues_mutex);
  return queues()[stream].waiting.empty();
}
bool all_idle() {
  std::lock_guard<std::recursive_mutex> lock(queues_mutex);
  return std::all_of(queues().begin(), queues().end(), [](const auto& entry) { return entry.second.waiting.empty(); });
}
void finish(c10::StreamId stream) {
  std::lock_guard<std::recursive_mutex> lock(queues_mutex);
  finish_until(stream, queues()[stream].num_queued);
}

at::Generator new_generator(c10::DeviceIndex index) {
  return at::make_generator<DeviceGenerator>(index < 0 ? current_device() : index);
}
const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>;
    for (c10::DeviceIndex device = 0; device < num_devices(); device++) {
      made->push_back(new_generator(device));
      made->back().set_current_seed(c10::default_rng_seed_val);
    }
    return made;
  }();
  return generators->at(index < 0 ? current_device() : index);
}
at::Generator generator_on_host(const at::Generator& generator) {
  if (generator.device().is_cpu()) return generator;
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->inner;
}

}  // namespace standin

namespace at {
using standin::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}  // namespace at

extern "C" {
void standin_on_wait(void (*callback)(const char*)) { standin::wait_callback = callback; }
int standin_sync_debug_mode() { return standin::sync_debug_mode; }
void standin_set_sync_debug_mode(int mode) { standin::sync_debug_mode = mode; }
int standin_current_device() { return standin::current_device(); }
int standin_exchange_device(int index) { return standin::exchange_device(static_cast<c10::DeviceIndex>(index)); }
}
