// Emulates the CUDA runtime's functions for devices and errors. The properties have the values of the emulated GPU.
// Properties that torch, Triton and this project do not read are 0.
#include "error.h"
#include "record.h"
#include "settings.h"

#include <stdio.h>
#include <string.h>

#define CUDA_VERSION_NEW 13000 // the CUDA version of torch's build
#define CUDA_VERSION_OLD 12080

static __thread cudaError_t last_error;

cudaError_t fail(cudaError_t error) { return last_error = error; }

cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

typedef struct {
  cudaError_t error;
  const char *name, *text;
} Error;

static const Error ERRORS[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"}, // also for any error that is not listed
};

static const Error *entry_of(cudaError_t error) {
  const Error *entry = ERRORS;
  while (entry->error != error && entry->error != cudaErrorUnknown) entry++;
  return entry;
}

const char *cudaGetErrorName(cudaError_t error) { return entry_of(error)->name; }
const char *cudaGetErrorString(cudaError_t error) { return entry_of(error)->text; }

cudaError_t cudaGetDeviceCount(int *count) {
  *count = settings()->old_driver ? 0 : settings()->usable;
  if (settings()->old_driver) return fail(cudaErrorInsufficientDriver);
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *device) {
  *device = current_device();
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= settings()->usable) return fail(cudaErrorInvalidDevice);
  set_current_device(device);
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
  *version = settings()->old_driver ? CUDA_VERSION_OLD : CUDA_VERSION_NEW;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = CUDA_VERSION_NEW;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
  snprintf(text, length, "0000:%02X:00.0", device + 1);
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  const Gpu *gpu = settings()->gpu;
  *properties = (struct cudaDeviceProp){
      .totalGlobalMem = settings()->memory_bytes,
      .major = gpu->major,
      .minor = gpu->minor,
      .multiProcessorCount = gpu->multiprocessors,
      .l2CacheSize = gpu->l2_bytes,
      .memoryBusWidth = gpu->bus_bits,
      .sharedMemPerBlock = 48 << 10,
      .sharedMemPerBlockOptin = gpu->shared_memory,
      .sharedMemPerMultiprocessor = gpu->shared_memory + 1024,
      .reservedSharedMemPerBlock = 1024,
      .regsPerBlock = 65536,
      .regsPerMultiprocessor = 65536,
      .warpSize = 32,
      .maxThreadsPerBlock = 1024,
      .maxThreadsPerMultiProcessor = 2048,
      .maxBlocksPerMultiProcessor = 32,
      .maxThreadsDim = {1024, 1024, 64},
      .maxGridSize = {2147483647, 65535, 65535},
      .totalConstMem = 65536,
      .asyncEngineCount = 3,
      .pciBusID = device + 1,
      .canMapHostMemory = 1,
      .concurrentKernels = 1,
      .cooperativeLaunch = 1,
      .managedMemory = 1,
      .unifiedAddressing = 1,
  };
  strcpy(properties->name, gpu->name);
  return cudaSuccess;
}

// The attributes have the same numbers in the driver's interface, so cuDeviceGetAttribute calls this function, too.
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  const Gpu *gpu = settings()->gpu;
  *value = 0;
  switch ((int)attribute) {
  case cudaDevAttrMaxThreadsPerBlock:
  case cudaDevAttrMaxBlockDimX:
  case cudaDevAttrMaxBlockDimY:
  case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1024; break;
  case cudaDevAttrMaxBlockDimZ: *value = 64; break;
  case cudaDevAttrMaxGridDimX:
  case cudaDevAttrMaxPitch: *value = 2147483647; break;
  case cudaDevAttrMaxGridDimY:
  case cudaDevAttrMaxGridDimZ: *value = 65535; break;
  case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = gpu->shared_memory; break;
  case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = gpu->shared_memory + 1024; break;
  case cudaDevAttrTotalConstantMemory:
  case cudaDevAttrMaxRegistersPerBlock:
  case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
  case cudaDevAttrWarpSize:
  case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
  case cudaDevAttrClockRate: *value = gpu->clock_khz; break;
  case cudaDevAttrMemoryClockRate: *value = gpu->memory_clock_khz; break;
  case cudaDevAttrGlobalMemoryBusWidth: *value = gpu->bus_bits; break;
  case cudaDevAttrTextureAlignment: *value = 512; break;
  case cudaDevAttrMultiProcessorCount: *value = gpu->multiprocessors; break;
  case cudaDevAttrL2CacheSize: *value = gpu->l2_bytes; break;
  case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
  case cudaDevAttrAsyncEngineCount: *value = 3; break;
  case cudaDevAttrComputeCapabilityMajor: *value = gpu->major; break;
  case cudaDevAttrComputeCapabilityMinor: *value = gpu->minor; break;
  case cudaDevAttrGpuOverlap:
  case cudaDevAttrCanMapHostMemory:
  case cudaDevAttrConcurrentKernels:
  case cudaDevAttrUnifiedAddressing:
  case cudaDevAttrStreamPrioritiesSupported:
  case cudaDevAttrManagedMemory:
  case cudaDevAttrConcurrentManagedAccess:
  case cudaDevAttrCooperativeLaunch: *value = 1; break;
  }
  return cudaSuccess;
}
