// One CUDA device for a CPU build of torch. Nothing runs on it: fake tensors are on it, and torch asks about it.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device;
using c10::DeviceType;
using c10::Stream;

static const Device kDevice(DeviceType::CUDA, 0);
static const Stream kOnlyStream(Stream::DEFAULT, kDevice);

struct OneDevice final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return kDevice; }
  Device exchangeDevice(Device) const override { return kDevice; }
  Stream getStream(Device) const noexcept override { return kOnlyStream; }
  Stream getDefaultStream(Device) const override { return kOnlyStream; }
  Stream getNewStream(Device, int) const override { return kOnlyStream; }
  Stream exchangeStream(Stream) const noexcept override { return kOnlyStream; }
  bool queryEvent(void*) const override { return true; }
  void record(void**, const Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
};
static const c10::impl::DeviceGuardImplRegistrar kGuard(DeviceType::CUDA, new OneDevice());

namespace at {
// Torch finds the class by its name. What it answers is what a build with CUDA and cuDNN would on one GPU.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return 91900; }
  long versionRuntimeCuDNN() const override { return 91900; }
  double batchnormMinEpsilonCuDNN() const override { return 0.0; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at
