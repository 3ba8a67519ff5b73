// A device of the type "cuda" whose memory is the host's, for a torch that was built without CUDA. See ../README.md.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <functional>
#include <optional>

namespace standin {

constexpr c10::DeviceType kType = c10::DeviceType::CUDA;

// ---- settings: environment variables, read once ----------------------------------------------------------------------
c10::DeviceIndex num_devices();  // STANDIN_DEVICES
size_t total_bytes();            // STANDIN_GIB, of each device
bool poisons();                  // STANDIN_POISON: freed memory, and targets of copies not yet waited for, read as NaN
bool has_float64();              // STANDIN_FLOAT64=0: refused, in the words of Apple's GPUs
constexpr int kPoison = 0xFF;    // every byte of them

// ---- the current device and stream of this thread ---------------------------------------------------------------------
c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex index);  // a negative one changes nothing; returns the one before
c10::StreamId current_stream(c10::DeviceIndex index);

// ---- what the host waits for ------------------------------------------------------------------------------------------
void note_wait(const char* kind, bool is_asked_for = false);  // with a warning in torch's debug mode, unless it is

// ---- streams: work that is done as soon as somebody waits for it, and no sooner ---------------------------------------
using Work = std::function<void()>;
void enqueue(c10::StreamId stream, Work work);
bool is_idle(c10::StreamId stream);
bool all_idle();
void finish(c10::StreamId stream);  // waits for nothing that other streams have

// ---- memory -----------------------------------------------------------------------------------------------------------
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);
// `host`, the result of a kernel of the CPU, as memory of a device: counted there until the storage that is returned goes.
c10::Storage adopt(const c10::Storage& host, c10::DeviceIndex index);
// Memory of a device that a stream still uses is not used again before that stream has come so far.
void record_stream(const c10::DataPtr& data, c10::StreamId stream);

}  // namespace standin
