// The operators of the device. What allocates, views or copies is here; everything else runs its CPU kernel on the same memory.
#include "standin.h"

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/ConvUtils.h>
#include <torch/library.h>

#include "generator.h"

#include <atomic>
#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace standin {
namespace {

using at::Tensor;
using c10::IntArrayRef;
std::atomic<long> launches{0};  // of operators that compute or copy
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

// These look at values on the host to know how large their result is.
const std::set<std::string> kWaits = {"aten::nonzero",      "aten::masked_select",   "aten::equal",     "aten::_unique2",
                                      "aten::_unique",      "aten::unique_dim",      "aten::bincount",  "aten::repeat_interleave",
                                      "aten::is_set_to",    "aten::unique_consecutive"};
const std::set<std::string> kIndexing = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};

Tensor make_tensor(c10::Storage storage, c10::DispatchKey key, const caffe2::TypeMeta& dtype, IntArrayRef sizes,
                   IntArrayRef strides, int64_t offset) {
  TORCH_CHECK_TYPE(has_float64() || key != c10::DispatchKey::CUDA || dtype.toScalarType() != at::kDouble,
                   "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. Please use float32 instead.");
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), dtype);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return made;
}

// A tensor of the CPU on the memory of `tensor`. `resizable`: a kernel may give it a new storage.
Tensor on_host(const Tensor& tensor, bool resizable = false) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  const auto& storage = tensor.storage();
  c10::DataPtr data(const_cast<void*>(storage.data()), c10::Device(c10::DeviceType::CPU));
  auto* allocator = resizable ? c10::GetAllocator(c10::DeviceType::CPU) : nullptr;
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), allocator, resizable);
  auto made = make_tensor(std::move(same), c10::DispatchKey::CPU, tensor.dtype(), tensor.sizes(), tensor.strides(), tensor.storage_offset());
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

// `result` of a CPU kernel as a tensor of the device, on the same memory.
Tensor on_device(const Tensor& result, c10::DeviceIndex index) {
  auto storage = adopt(result.storage(), index);
  return make_tensor(std::move(storage), c10::DispatchKey::CUDA, result.dtype(), result.sizes(), result.strides(), result.storage_offset());
}

Tensor restride(const Tensor& self, IntArrayRef sizes, IntArrayRef strides, int64_t offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return view;
}

// ---- allocation --------------------------------------------------------------------------------------------------------

struct OnDevice {  // the current device, for as long as this lives
  c10::DeviceIndex before;
  explicit OnDevice(c10::DeviceIndex index) : before(exchange_device(index)) {
    TORCH_CHECK(current_device() < num_devices(), "CUDA error: invalid device ordinal");
  }
  ~OnDevice() { exchange_device(before); }
};

Tensor allocate(IntArrayRef sizes, IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<c10::Device> device) {
  const auto type = c10::scalarTypeToTypeMeta(dtype.value_or(at::get_default_dtype_as_scalartype()));
  const OnDevice on(device ? device->index() : c10::DeviceIndex(-1));
  int64_t numel = 1;  // up to the last element that the strides reach
  for (size_t dim = 0; dim < sizes.size(); dim++) {
    if (sizes[dim] == 0) {
      numel = 0;
      break;
    }
    numel += (sizes[dim] - 1) * strides[dim];
  }
  const size_t bytes = numel * type.itemsize();
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, device_allocator()->allocate(bytes), device_allocator(), /*resizable=*/true);
  return make_tensor(std::move(storage), c10::DispatchKey::CUDA, type, sizes, strides, 0);
}

std::vector<int64_t> contiguous_strides(IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (auto dim = static_cast<int64_t>(sizes.size()) - 1; dim >= 0; dim--) {
    strides[dim] = step;
    step *= std::max<int64_t>(sizes[dim], 1);
  }
  return strides;
}

void restride_as(const Tensor& tensor, std::optional<at::MemoryFormat> format) {
  const auto wanted = format.value_or(at::MemoryFormat::Contiguous);
  if (wanted == at::MemoryFormat::Contiguous || wanted == at::MemoryFormat::Preserve) return;
  tensor.unsafeGetTensorImpl()->empty_tensor_restride(wanted);
}

Tensor empty(IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<c10::Device> device,
             std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  auto made = allocate(sizes, contiguous_strides(sizes), dtype, device);
  restride_as(made, format);
  return made;
}

Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<c10::Device> device, std::optional<bool>) {
  return allocate(sizes, strides, dtype, device);
}

void resize_storage(const c10::Storage& storage, int64_t bytes) {
  const OnDevice on(storage.device().index());
  auto data = device_allocator()->allocate(bytes);
  if (const auto common = std::min<size_t>(bytes, storage.nbytes())) std::memcpy(data.get(), storage.data(), common);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

const Tensor& resize_(const Tensor& self, IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  if (self.sizes() == sizes) return self;
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  const size_t bytes = (self.storage_offset() + self.numel()) * self.itemsize();
  if (bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
  restride_as(self, format);
  return self;
}

// ---- views -------------------------------------------------------------------------------------------------------------

Tensor as_strided(const Tensor& self, IntArrayRef sizes, IntArrayRef strides, std::optional<int64_t> offset) {
  return restride(self, sizes, strides, offset.value_or(self.storage_offset()));
}
Tensor reshape_alias(const Tensor& self, IntArrayRef sizes, IntArrayRef strides) {
  return restride(self, sizes, strides, self.storage_offset());
}
Tensor view(const Tensor& self, IntArrayRef sizes) {
  const BelowAutograd below;
  const auto shaped = on_host(self).view(sizes);
  return restride(self, shaped.sizes(), shaped.strides(), self.storage_offset());
}
Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  const BelowAutograd below;
  const auto shaped = on_host(self).unfold(dim, size, step);
  return restride(self, shaped.sizes(), shaped.strides(), shaped.storage_offset());
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
  TORCH_CHECK(storage.device().type() == kType, "Attempted to set the storage of a tensor on device \"cuda:0\" to a storage on different device \"",
              storage.device(), "\"");
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  const auto steps = strides.empty() ? contiguous_strides(sizes) : strides.vec();
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, steps, offset);
  return self;
}
Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  const auto numel = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {numel}, {});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_empty(Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, self.device()), device_allocator(), /*resizable=*/true);
  return set_storage(self, std::move(none), 0, {0}, {});
}

// ---- copies ------------------------------------------------------------------------------------------------------------

// A copy that nobody has to wait for is done late under STANDIN_POISON: on a side stream, and to the host on any stream.
// Until then its target is poison. The target of a copy to the host and its source on the host live until then, as
// torch's cache of pinned memory keeps them; memory of the device does not, unless it is recorded on the stream.
void copy_later(const Tensor& self, const Tensor& source, const Tensor& target, const Tensor& from, c10::StreamId stream) {
  if (target.is_non_overlapping_and_dense()) std::memset(target.mutable_data_ptr(), kPoison, target.nbytes());
  const Tensor kept = self.is_cpu() ? self : (source.is_cpu() ? source : target);
  // Aliases have no Python object. To free one takes Python's lock, which a thread that waits for the queues may hold.
  enqueue(stream, [target = target.alias(), from = from.alias(), kept = kept.alias()] {
    const BelowAutograd below;
    target.copy_(from);
  });
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  launches++;
  const BelowAutograd below;
  const bool to_host = self.is_cpu(), crosses = to_host != source.is_cpu();
  const auto& host = to_host ? self : source;
  const bool pinned = crosses && host.has_storage() && is_pinned(host.storage().data());
  if (crosses && !(non_blocking && pinned)) {
    const std::string how = non_blocking ? "non_blocking copy" : "copy", memory = pinned ? "pinned" : "pageable";
    note_wait((how + (to_host ? " to " : " from ") + memory + " memory").c_str());
  }
  const auto device = (self.is_cuda() ? self : source).device().index();
  const auto stream = current_stream(device);
  const bool free_to_wait = non_blocking && (stream != 0 || to_host) && (!crosses || pinned);
  if (poisons() && free_to_wait) {
    copy_later(self, source, on_host(self), on_host(source), stream);
  } else {
    if (to_host) finish(stream);  // in the order of its stream
    on_host(self).copy_(on_host(source));
  }
  return self;
}

at::Scalar local_scalar_dense(const Tensor& self) {
  note_wait("item");
  finish(current_stream(self.device().index()));
  const BelowAutograd below;
  return at::_local_scalar_dense(on_host(self));
}

void record_tensor(Tensor& self, c10::Stream stream) { record_stream(self.storage().data_ptr(), stream.id()); }

// ---- dropout: the CPU's kernel would draw from the CPU's generator --------------------------------------------------------

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  const BelowAutograd below;
  const auto bools = input.options().dtype(at::kBool);
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, bools)};
  const auto mask = at::empty_like(input, bools).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}
Tensor native_dropout_backward(const Tensor& grad, const Tensor& mask, double scale) {
  const BelowAutograd below;
  return grad.mul(mask).mul_(scale);
}

// ---- a product of half precision that is summed in another type, which the CPU has no kernel for ----------------------------

Tensor& addmm_dtype_out(const Tensor& self, const Tensor& left, const Tensor& right, at::ScalarType dtype, const at::Scalar& beta,
                        const at::Scalar& alpha, Tensor& out) {
  const BelowAutograd below;
  auto on_it = on_host(out);
  at::addmm_out(on_it, on_host(self), on_host(left).to(dtype), on_host(right).to(dtype), beta, alpha);
  return out;
}

// ---- a convolution of every channel by itself, for which CUDA has a kernel of its own ----------------------------------------

Tensor conv_depthwise2d(const Tensor& self, const Tensor& weight, IntArrayRef, const std::optional<Tensor>& bias, IntArrayRef stride,
                        IntArrayRef padding, IntArrayRef dilation) {
  const BelowAutograd below;
  const auto on_it = bias ? std::optional<Tensor>(on_host(*bias)) : std::nullopt;
  return on_device(at::conv2d(on_host(self), on_host(weight), on_it, stride, padding, dilation, self.size(1)), self.device().index());
}

std::tuple<Tensor, Tensor> conv_depthwise2d_backward(const Tensor& grad, const Tensor& self, const Tensor& weight, IntArrayRef,
                                                     IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                                                     std::array<bool, 2> wanted) {
  const BelowAutograd below;
  const auto [of_self, of_weight, of_bias] =
      at::convolution_backward(on_host(grad), on_host(self), on_host(weight), std::nullopt, stride, padding, dilation, false, {0, 0},
                               self.size(1), {wanted[0], wanted[1], false});
  const auto back = [&](const Tensor& gradient) { return gradient.defined() ? on_device(gradient, self.device().index()) : gradient; };
  return {back(of_self), back(of_weight)};
}

// Of patches in space and time, as Qwen's vision towers have them.
std::tuple<Tensor, Tensor, Tensor> conv_dilated3d_backward(const Tensor& grad, const Tensor& self, const Tensor& weight, IntArrayRef,
                                                           IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                                                           std::array<bool, 3> wanted) {
  const BelowAutograd below;
  const auto [of_self, of_weight, of_bias] = at::convolution_backward(
      on_host(grad), on_host(self), on_host(weight), IntArrayRef(weight.sizes().data(), 1), stride, padding, dilation, false, {0, 0, 0}, 1, wanted);
  const auto back = [&](const Tensor& gradient) { return gradient.defined() ? on_device(gradient, self.device().index()) : gradient; };
  return {back(of_self), back(of_weight), back(of_bias)};
}

// ---- everything else: the CPU's kernel -----------------------------------------------------------------------------------

bool is_mask(const std::optional<Tensor>& index) {
  return index && index->defined() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte);
}

// One call of an operator: its tensors become tensors of the CPU on the same memory, its results those of the device.
class HostCall {
 public:
  HostCall(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op), stack_(stack), schema_(op.schema()), name_(schema_.name()), first_(stack.size() - schema_.arguments().size()),
        given_(stack.begin() + first_, stack.end()) {}

  void run() {
    for (size_t i = 0; i < given_.size(); i++) stack_[first_ + i] = argument(given_[i], schema_.arguments()[i]);
    if (kWaits.count(name_)) note_wait(name_.c_str());
    if (sees_host_ && indexes()) note_wait("index on the host");
    TORCH_CHECK(!sees_host_ || indexes() || seen_.empty(),
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (", name_, ")");
    {
      const BelowAutograd below;
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    }
    for (const auto& [device, host] : seen_) take_over_size(device, host);
    for (size_t i = 0; i < schema_.returns().size(); i++) stack_[first_ + i] = result(stack_[first_ + i], schema_.returns()[i]);
  }

 private:
  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  const c10::FunctionSchema& schema_;
  const std::string& name_;
  const size_t first_;
  const std::vector<c10::IValue> given_;
  std::vector<std::pair<Tensor, Tensor>> seen_;  // of the device, and what stands for it on the CPU
  c10::DeviceIndex device_ = current_device();
  bool sees_host_ = false;

  bool indexes() const { return kIndexing.count(name_) > 0; }

  c10::IValue argument(const c10::IValue& value, const c10::Argument& declared) {
    const auto* alias = declared.alias_info();
    if (value.isTensor()) return turn(value.toTensor(), alias && alias->isWrite());
    if (value.isTensorList()) {
      c10::List<Tensor> turned;
      for (const Tensor& tensor : value.toTensorVector()) turned.push_back(turn(tensor));
      return turned;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> turned;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        if (indexes() && is_mask(tensor)) note_wait("index by a mask");
        turned.push_back(tensor ? std::optional<Tensor>(turn(*tensor)) : std::nullopt);
      }
      return turned;
    }
    if (value.isDevice()) return c10::Device(c10::DeviceType::CPU);
    if (value.isGenerator()) {
      TORCH_CHECK(!value.toGenerator().device().is_cpu(), "Expected a 'cuda' device type for generator but found 'cpu'");
      return generator_on_host(value.toGenerator());
    }
    if (value.isNone() && declared.type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get())))
      return generator_on_host(default_generator(device_));
    return value;
  }

  Tensor turn(const Tensor& tensor, bool written = false) {
    if (!tensor.defined()) return tensor;
    if (tensor.is_cuda()) {
      device_ = tensor.device().index();
      seen_.emplace_back(tensor, on_host(tensor, written));
      return seen_.back().second;
    }
    sees_host_ |= tensor.is_cpu() && tensor.dim() > 0;  // numbers may come from the host
    return tensor;
  }

  // After a kernel has resized what it was given to write on.
  static void take_over_size(const Tensor& device, const Tensor& host) {
    const bool moved = host.storage().data() != device.storage().data();
    if (host.sizes() == device.sizes() && !moved) return;
    resize_(device, host.sizes(), std::nullopt);
    device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
    if (moved) {
      const BelowAutograd below;
      on_host(device).copy_(host);
    }
  }

  c10::IValue result(const c10::IValue& value, const c10::Argument& declared) {
    if (value.isTensor()) return declared.alias_info() && declared.alias_info()->isWrite() ? written(declared, value) : back(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<Tensor> turned;
    for (const Tensor& tensor : value.toTensorVector()) turned.push_back(back(tensor));
    return turned;
  }

  // The argument that was written on is itself what is returned.
  c10::IValue written(const c10::Argument& declared, const c10::IValue& value) const {
    for (size_t i = 0; i < given_.size(); i++) {
      const auto* alias = schema_.arguments()[i].alias_info();
      if (alias && *alias == *declared.alias_info()) return given_[i];
    }
    return back(value.toTensor());
  }

  Tensor back(const Tensor& tensor) const {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (const auto& [device, host] : seen_) {
      if (tensor.is_same(host)) return device;
      const bool shares = tensor.storage().nbytes() && tensor.storage().data() == host.storage().data();
      if (shares) return make_tensor(device.storage(), c10::DispatchKey::CUDA, tensor.dtype(), tensor.sizes(), tensor.strides(), tensor.storage_offset());
    }
    return on_device(tensor, device_);
  }
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  launches++;
  HostCall(op, *stack).run();
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize_);
  library.impl("as_strided", as_strided);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("view", view);
  library.impl("unfold", unfold);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_empty);
  library.impl("copy_", copy_);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("record_stream", record_tensor);
  library.impl("addmm.dtype_out", addmm_dtype_out);
  library.impl("_conv_depthwise2d", conv_depthwise2d);
  library.impl("native_dropout", native_dropout);
  library.impl("native_dropout_backward", native_dropout_backward);
}

// What the Python side needs: cuda_standin/.
TORCH_LIBRARY(standin, library) {
  library.def("on_host(Tensor self) -> Tensor", [](const Tensor& self) { return on_host(self); });
  library.def("default_generator(int index) -> Generator?", [](int64_t index) { return default_generator(static_cast<c10::DeviceIndex>(index)); });
  library.def("resize_storage(Tensor self, int bytes) -> ()", [](const Tensor& self, int64_t bytes) { resize_storage(self.storage(), bytes); });
}

}  // namespace
}  // namespace standin

namespace at::native {
using standin::conv_depthwise2d_backward;
using standin::conv_dilated3d_backward;
REGISTER_CUDA_DISPATCH(conv_depthwise2d_backward_stub, &conv_depthwise2d_backward)
REGISTER_CUDA_DISPATCH(slow_conv_dilated3d_backward_stub, &conv_dilated3d_backward)
}  // namespace at::native

extern "C" long standin_launches() { return standin::launches; }
