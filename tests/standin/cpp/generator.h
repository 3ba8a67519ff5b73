// Generators of the devices: device.cpp has them, the operators that draw use them.
#pragma once

#include <ATen/core/Generator.h>

namespace standin {

at::Generator new_generator(c10::DeviceIndex index);
const at::Generator& default_generator(c10::DeviceIndex index);  // a negative index is the current device
at::Generator generator_on_host(const at::Generator& generator);

}  // namespace standin
