// Simulated CUDA devices for a CPU build of PyTorch: their memory, which is host memory, and the hooks that PyTorch
// needs for devices and streams. Operations on a stream run immediately.

#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <utility>

using namespace c10;
using namespace simulated;

thread_local DeviceIndex simulated::current = 0;

namespace {

constexpr int FRESH = 0xFF;  // bytes of uninitialised memory: NaN in every floating-point format
constexpr size_t ALIGNMENT = 512;

// ---- memory ---------------------------------------------------------------------------------------------------------

void release(void* memory) {
  std::free(memory);
}

void* fresh_memory(size_t bytes) {
  if (bytes == 0) {
    return nullptr;
  }
  const size_t padded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  void* memory = std::aligned_alloc(ALIGNMENT, padded);
  TORCH_CHECK(memory != nullptr, "the simulated device is out of memory: ", bytes, " bytes");
  return std::memset(memory, FRESH, padded);
}

struct DeviceMemory final : Allocator {
  DataPtr allocate(size_t bytes) override {
    void* memory = fresh_memory(bytes);
    return {memory, memory, &release, Device(kCUDA, current)};
  }
  DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

std::mutex pinned_lock;
std::set<const void*> pinned;

void release_pinned(void* memory) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  pinned.erase(memory);
  std::free(memory);
}

struct PinnedMemory final : Allocator {
  DataPtr allocate(size_t bytes) override {
    void* memory = fresh_memory(bytes);
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned.insert(memory);
    return {memory, memory, &release_pinned, Device(kCPU)};
  }
  DeleterFnPtr raw_deleter() const override {
    return &release_pinned;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

DeviceMemory memory_of_devices;
PinnedMemory pinned_memory;
REGISTER_ALLOCATOR(kCUDA, &memory_of_devices);

}  // namespace

Allocator* simulated::device_memory() {
  return &memory_of_devices;
}

bool simulated::is_pinned(const void* memory) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  return pinned.count(memory) > 0;
}

namespace {

// ---- devices and streams --------------------------------------------------------------------------------------------

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override {
    return kCUDA;
  }
  Device exchangeDevice(Device device) const override {
    const Device before(kCUDA, current);
    uncheckedSetDevice(device);
    return before;
  }
  Device getDevice() const override {
    return Device(kCUDA, current);
  }
  void setDevice(Device device) const override {
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    current = device.has_index() ? device.index() : current;
  }
  Stream getStream(Device device) const noexcept override {
    return Stream(Stream::DEFAULT, Device(kCUDA, device.has_index() ? device.index() : current));
  }
  Stream getDefaultStream(Device device) const override {
    return getStream(device);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getStream(device);
  }
  Stream getNewStream(Device device, int) const override {
    return getStream(device);
  }
  Stream exchangeStream(Stream stream) const noexcept override {
    return getStream(stream.device());
  }
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override {
    *event = &current;  // autograd checks that it is not null
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  bool queryStream(const Stream&) const override {
    return true;
  }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  DeviceIndex deviceCount() const noexcept override {
    return NUM_DEVICES;
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

}  // namespace

namespace at {

// PyTorch looks up the class by this name.
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasCUDA() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return NUM_DEVICES;
  }
  int getNumGPUs() const override {
    return NUM_DEVICES;
  }
  DeviceIndex current_device() const override {
    return current;
  }
  DeviceIndex getCurrentDevice() const override {
    return current;
  }
  void setCurrentDevice(DeviceIndex device) const override {
    current = device;
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return std::exchange(current, device);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return std::exchange(current, device);
  }
  void deviceSynchronize(DeviceIndex) const override {}
  Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory;
  }
  bool isPinnedPtr(const void* memory) const override {
    return simulated::is_pinned(memory);
  }
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    return detail::getDefaultCPUGenerator();
  }
  Generator getNewGenerator(DeviceIndex) const override {
    return detail::createCPUGenerator();
  }
};

REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at
