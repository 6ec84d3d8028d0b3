// Operators of the simulated devices, on the CPU's kernels.
//
// An operator whose tensors are on CUDA reaches `compute`, the fallback of all that have no kernel for CUDA. It checks
// that they are on one device, runs the CPU's kernel on aliases, CPU tensors over the same memory, and gives what comes
// out to the device. Everything above, autograd with its thread for each device included, is PyTorch's own.

#include "device.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <cstring>
#include <set>
#include <string>
#include <vector>

using namespace c10;
using namespace simulated;

namespace {

constexpr size_t STAGED_BYTES = 64 << 10;  // the driver copies this much from pageable memory before it returns

// ---- waits of the host ----------------------------------------------------------------------------------------------

pybind11::function* listener = nullptr;  // called with the operator's name whenever a host would wait for the device

void host_waits(const std::string& name) {
  if (listener != nullptr) {
    pybind11::gil_scoped_acquire gil;
    (*listener)(name);
  }
}

// Their result, or its shape, depends on values.
const std::set<std::string> READS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2",
    "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave.Tensor", "aten::masked_scatter_"};

void copy_waits(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (to.device() == from.device() || to.numel() == 0) {
    return;
  }
  const at::Tensor& host = to.is_cuda() ? from : to;
  const bool is_staged = to.is_cuda() && host.nbytes() <= STAGED_BYTES;
  if (!(non_blocking && (is_staged || is_pinned(host.storage().data())))) {
    host_waits(to.is_cuda() ? "copy to the device" : "copy to the host");
  }
}

// ---- the same memory on the CPU and on the device -------------------------------------------------------------------

void release_storage(void* storage) {
  delete static_cast<Storage*>(storage);
}

// `tensor` over the same memory on `device`.
at::Tensor moved(const at::Tensor& tensor, Device device) {
  const Storage& storage = tensor.storage();
  DataPtr memory(storage.mutable_data(), new Storage(storage), &release_storage, device);
  Allocator* allocator = device.is_cuda() ? device_memory() : GetAllocator(kCPU);
  Storage own(Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), allocator, /*resizable=*/true);
  const auto keys = DispatchKeySet(device.is_cuda() ? DispatchKey::CUDA : DispatchKey::CPU);
  auto result = at::detail::make_tensor<TensorImpl>(std::move(own), keys, tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return result;
}

at::Tensor view_of(
    const at::Tensor& base, IntArrayRef sizes, IntArrayRef strides, int64_t offset, caffe2::TypeMeta dtype) {
  auto view = at::detail::make_tensor<TensorImpl>(TensorImpl::VIEW, Storage(base.storage()), base.key_set(), dtype);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return view;
}

at::Tensor on_cpu(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda() ? moved(tensor, Device(kCPU)) : tensor;
}

// Applies `change` to every tensor in `value`, whatever list it is in.
template <typename Change>
IValue with_tensors(const IValue& value, const Change& change) {
  if (value.isTensor()) {
    return change(value.toTensor());
  }
  if (value.isOptionalTensorList()) {
    List<std::optional<at::Tensor>> changed;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      changed.push_back(tensor.has_value() ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    }
    return changed;
  }
  if (value.isTensorList()) {
    List<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      changed.push_back(change(tensor));
    }
    return changed;
  }
  return value;
}

// ---- the fallback ---------------------------------------------------------------------------------------------------

struct Call {
  std::string name;
  std::vector<at::Tensor> on_device, aliases;
  std::string on_host;  // name of an argument

  // Indices on the host are copied: allowed, with a wait.
  bool may_be_on_host(const std::string& argument) const {
    return argument == "indices" && name.find("index") != std::string::npos;
  }

  at::Tensor to_host(const at::Tensor& tensor, const std::string& argument) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (tensor.is_cuda()) {
      // `index` itself asks for the places of a mask, with `nonzero`.
      const bool is_index = argument == "indices" && name.find("index_put") != std::string::npos;
      if (is_index && (tensor.scalar_type() == kBool || tensor.scalar_type() == kByte)) {
        host_waits("index by a mask");
      }
      TORCH_CHECK(on_device.empty() || on_device[0].device() == tensor.device(), name,
                  ": expected all tensors to be on the same device, found ", on_device[0].device(), " and ",
                  tensor.device());
      on_device.push_back(tensor);
      aliases.push_back(moved(tensor, Device(kCPU)));
      return aliases.back();
    }
    if (tensor.dim() > 0) {
      if (may_be_on_host(argument)) {
        host_waits("index from the host");
      } else {
        on_host = argument;
      }
    }
    return tensor;
  }

  // A result: one of the arguments, a view of one, or a new tensor.
  at::Tensor to_device(const at::Tensor& tensor) const {
    if (!tensor.defined() || !tensor.device().is_cpu()) {
      return tensor;
    }
    for (size_t i = 0; i < aliases.size(); ++i) {
      if (tensor.is_same(aliases[i])) {
        return on_device[i];
      }
      if (tensor.storage().is_alias_of(aliases[i].storage())) {
        return view_of(on_device[i], tensor.sizes(), tensor.strides(), tensor.storage_offset(), tensor.dtype());
      }
    }
    return moved(tensor, on_device.empty() ? Device(kCUDA, current) : on_device[0].device());
  }

  // What the CPU's kernel did to the shape or the memory of an argument (`out=`, `resize_`).
  void take_over_shapes() const {
    for (size_t i = 0; i < aliases.size(); ++i) {
      const Storage& changed = aliases[i].storage();
      StorageImpl* own = on_device[i].storage().unsafeGetStorageImpl();
      if (changed.data() != own->data()) {
        own->set_data_ptr_noswap(
            DataPtr(changed.mutable_data(), new Storage(changed), &release_storage, on_device[i].device()));
        own->set_nbytes(changed.nbytes());
      }
      if (!aliases[i].sizes().equals(on_device[i].sizes()) || !aliases[i].strides().equals(on_device[i].strides())) {
        on_device[i].unsafeGetTensorImpl()->set_sizes_and_strides(
            aliases[i].sizes(), aliases[i].strides(), aliases[i].storage_offset());
      }
    }
  }
};

void compute(const OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  Call call{toString(op.schema().operator_name()), {}, {}, {}};
  torch::jit::Stack values;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const IValue& value = torch::jit::peek(*stack, i, arguments.size());
    if (value.isDevice()) {
      values.emplace_back(Device(kCPU));
    } else {
      values.push_back(with_tensors(value, [&](const at::Tensor& t) { return call.to_host(t, arguments[i].name()); }));
    }
  }
  torch::jit::drop(*stack, arguments.size());
  TORCH_CHECK(call.on_device.empty() || call.on_host.empty(), call.name,
              ": expected all tensors to be on the same device, but `", call.on_host, "` is on the CPU");
  const bool knows_shape = call.name == "aten::repeat_interleave.Tensor" && !values[1].isNone();  // output_size
  if (READS.count(call.name) > 0 && !knows_shape) {
    host_waits(call.name.substr(sizeof("aten::") - 1));
  }
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &values);
  call.take_over_shapes();
  for (const IValue& value : values) {
    stack->push_back(with_tensors(value, [&](const at::Tensor& t) { return call.to_device(t); }));
  }
}

// ---- operators that are about memory --------------------------------------------------------------------------------

ScalarType scalar_or_default(std::optional<ScalarType> dtype) {
  return dtype.value_or(get_default_dtype_as_scalartype());
}

at::Tensor empty(SymIntArrayRef sizes, std::optional<ScalarType> dtype, std::optional<Layout>,
                 std::optional<Device> device, std::optional<bool>, std::optional<MemoryFormat> format) {
  const OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), device_memory(), DispatchKeySet(DispatchKey::CUDA),
                                   scalar_or_default(dtype), format);
}

at::Tensor empty_strided(SymIntArrayRef sizes, SymIntArrayRef strides, std::optional<ScalarType> dtype,
                         std::optional<Layout>, std::optional<Device> device, std::optional<bool>) {
  const OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                                           device_memory(), DispatchKeySet(DispatchKey::CUDA),
                                           scalar_or_default(dtype));
}

at::Tensor zero_tensor(SymIntArrayRef sizes, std::optional<ScalarType> dtype, std::optional<Layout> layout,
                       std::optional<Device> device, std::optional<bool> pin) {
  at::Tensor tensor = empty(sizes, dtype, layout, device, pin, std::nullopt);
  if (tensor.nbytes() > 0) {
    std::memset(tensor.mutable_data_ptr(), 0, tensor.nbytes());
  }
  return tensor;
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  copy_waits(to, from, non_blocking);
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  copy_waits(to, from, non_blocking);
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor as_strided(
    const at::Tensor& self, SymIntArrayRef sizes, SymIntArrayRef strides, std::optional<SymInt> offset) {
  return view_of(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                 offset.has_value() ? offset->guard_int(__FILE__, __LINE__) : self.storage_offset(), self.dtype());
}

const at::Tensor& resize_(const at::Tensor& self, SymIntArrayRef sizes, std::optional<MemoryFormat>) {
  TensorImpl* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(sizes));
  const size_t needed = (tensor->numel() + tensor->storage_offset()) * self.itemsize();
  StorageImpl* storage = self.storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) {
    DataPtr memory = device_memory()->allocate(needed);
    if (storage->nbytes() > 0) {
      std::memcpy(memory.get(), storage->data(), storage->nbytes());
    }
    storage->set_data_ptr_noswap(std::move(memory));
    storage->set_nbytes(needed);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, Storage source, SymInt offset, SymIntArrayRef sizes, SymIntArrayRef strides) {
  TensorImpl* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(source));
  tensor->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), offset.guard_int(__FILE__, __LINE__));
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.element_size());
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(source));
  tensor->set_sizes_contiguous({numel});
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  TensorImpl* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(source.storage());
  tensor->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

at::Tensor& set_nothing(at::Tensor& self) {
  Storage nothing(Storage::use_byte_size_t(), 0, device_memory()->allocate(0), device_memory(), /*resizable=*/true);
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(nothing));
  self.unsafeGetTensorImpl()->set_sizes_contiguous({0});
  return self;
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_efficientzerotensor", zero_tensor);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
}

PYBIND11_MODULE(simulated_cuda_device, m) {
  m.attr("NUM_DEVICES") = static_cast<int>(NUM_DEVICES);
  m.def("on_cpu", &on_cpu, "The tensor over the same memory on the CPU.");
  m.def("current_device", []() { return static_cast<int>(current); });
  m.def("set_device", [](int device) {
    TORCH_CHECK(device >= 0 && device < NUM_DEVICES, "CUDA error: invalid device ordinal");
    current = static_cast<DeviceIndex>(device);
  });
  m.def("is_pinned", [](const at::Tensor& tensor) { return is_pinned(tensor.storage().data()); });
  m.def("when_the_host_waits", [](pybind11::function function) { listener = new pybind11::function(function); });
}

}  // namespace
