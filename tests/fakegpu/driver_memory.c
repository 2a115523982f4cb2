// Emulates the CUDA driver's memory functions: virtual memory, which torch's expandable segments use, and the
// attributes of pointers, which Triton reads. Addresses may be used without a mapping, because no kernel reads them and
// the host must never read them.
#include "device_memory.h"
#include "record.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdlib.h>

#define GRANULARITY (2 << 20)

typedef struct {
  size_t bytes;
  int device;
} Physical;

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option) {
  *bytes = GRANULARITY;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *start, size_t bytes, size_t alignment, CUdeviceptr fixed,
                             unsigned long long flags) {
  *start = (CUdeviceptr)reserve(bytes, "cuMemAddressReserve");
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr start, size_t bytes) {
  int device;
  release((void *)start, &device);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
  if (!charge(properties->location.id, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  Physical *allocation = malloc(sizeof *allocation);
  *allocation = (Physical){bytes, properties->location.id};
  *handle = (CUmemGenericAllocationHandle)allocation;
  record((Event){.kind = ALLOCATE, .name = "cuMemCreate", .object = *handle, .bytes = bytes});
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  Physical *allocation = (Physical *)handle;
  refund(allocation->device, allocation->bytes);
  record((Event){.kind = FREE, .name = "cuMemRelease", .object = handle, .bytes = allocation->bytes});
  free(allocation);
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr start, size_t bytes) {
  discard((void *)start, bytes);
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  struct cudaPointerAttributes attributes;
  cudaPointerGetAttributes(&attributes, (void *)pointer);
  if (attributes.type == cudaMemoryTypeUnregistered) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
  case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = pointer; break;
  case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)value = (CUcontext)(uintptr_t)(attributes.device + 1); break;
  case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)value = attributes.type; break;
  case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = attributes.device; break;
  default: return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}
