// What operators have to know of the simulated devices.

#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

namespace simulated {

constexpr c10::DeviceIndex NUM_DEVICES = 2;

extern thread_local c10::DeviceIndex current;

// Its memory is filled with nan.
c10::Allocator* device_memory();

bool is_pinned(const void* memory);

}  // namespace simulated
