// Emulates the CUDA runtime's memory functions. Allocations are limited by the GPU's memory. Copies of up to 64 KiB
// between host and device are actually performed. A larger copy only records an event; if its target is on the host, the
// target is filled with zeros. Every copy is complete when the call returns.
#define _GNU_SOURCE
#include "device_memory.h"
#include "error.h"
#include "pinned.h"
#include "record.h"
#include "settings.h"

#include <stdint.h>
#include <string.h>

#define PAGE (2ULL << 20)

cudaError_t cudaMalloc(void **address, size_t bytes) {
  size_t page_bytes = (bytes + PAGE - 1) / PAGE * PAGE;
  if (!charge(current_device(), page_bytes)) return fail(cudaErrorMemoryAllocation);
  *address = reserve(page_bytes, "cudaMalloc");
  record((Event){.kind = ALLOCATE, .name = "cudaMalloc", .object = (uint64_t)*address, .bytes = page_bytes});
  return cudaSuccess;
}

cudaError_t cudaFree(void *address) {
  int device;
  size_t bytes = address ? release(address, &device) : 0;
  if (!bytes) return address ? fail(cudaErrorInvalidValue) : cudaSuccess;
  refund(device, bytes);
  record((Event){.kind = FREE, .name = "cudaFree", .object = (uint64_t)address, .bytes = bytes});
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
  *total = settings()->memory_bytes;
  *unused = *total - used_bytes(current_device());
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags) {
  *address = pin(bytes);
  record((Event){.kind = PINNED, .name = "cudaHostAlloc", .bytes = bytes});
  return *address ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaFreeHost(void *address) {
  unpin(address);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
  memset(attributes, 0, sizeof *attributes);
  attributes->device = current_device();
  if (on_device(address)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->devicePointer = (void *)address;
  } else {
    attributes->type = is_pinned(address) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    attributes->hostPointer = (void *)address;
  }
  return cudaSuccess;
}

static const char *direction(const void *to, const void *from) {
  if (on_device(to)) return on_device(from) ? "DtoD" : is_pinned(from) ? "HtoD" : "HtoD pageable";
  return on_device(from) ? (is_pinned(to) ? "DtoH" : "DtoH pageable") : "HtoH";
}

static void copy(void *to, const void *from, size_t bytes, cudaStream_t stream) {
  record((Event){.kind = COPY, .name = direction(to, from), .stream = (uint64_t)stream, .bytes = bytes});
  bool computed = on_device(to) && on_device(from) && !is_result(from);
  bool on_host = !on_device(to) && !on_device(from);
  if (on_host || (bytes <= MAX_COPIED && !computed)) memmove(contents(to), contents(from), bytes);
  else if (!on_device(to)) memset(to, 0, bytes); // so that all runs are equal and all values are finite
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  copy(to, from, bytes, stream);
  if (on_device(from) && !on_device(to) && !is_pinned(to)) // with a pageable target, the real call waits for the copy
    record((Event){.kind = SYNCHRONIZE, .name = "cudaMemcpyAsync to pageable memory", .stream = (uint64_t)stream});
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  copy(to, from, bytes, NULL);
  record((Event){.kind = SYNCHRONIZE, .name = "cudaMemcpy"});
  return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                                cudaStream_t stream) {
  copy(to, from, bytes, stream);
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
  record((Event){
      .kind = COPY, .name = direction(to, from), .stream = (uint64_t)stream, .bytes = (uint64_t)width * height});
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
  record((Event){.kind = FILL, .name = "memset", .stream = (uint64_t)stream, .bytes = bytes});
  if (bytes <= MAX_COPIED) memset(contents(to), value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, NULL); }
