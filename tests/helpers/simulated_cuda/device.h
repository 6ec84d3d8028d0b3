// Interface of the simulated devices for the operators.

#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

namespace simulated {

constexpr c10::DeviceIndex NUM_DEVICES = 2;

extern thread_local c10::DeviceIndex current;

// Allocator of memory that is filled with NaN.
c10::Allocator* device_memory();

bool is_pinned(const void* memory);

}  // namespace simulated
