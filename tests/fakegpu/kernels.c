// Emulates the launch of kernels that nvcc compiled into a library, such as torch's own. A library registers its
// kernels while it is loaded, so the record can contain their names. A launch does nothing. Every kernel reports 32
// registers.
#include "error.h"
#include "record.h"
#include "settings.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define BUCKETS 65536

typedef struct Registered {
  const void *function; // the function on the host that launches the kernel
  const char *name;     // the mangled name, a string in the library's data
  struct Registered *next;
} Registered;

static Registered *buckets[BUCKETS];

typedef struct {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
} Configuration;

static __thread Configuration pushed[16];
static __thread int depth;

static Registered **bucket(const void *function) {
  return &buckets[(uint64_t)function * 0x9E3779B97F4A7C15ULL >> 48]; // Fibonacci hashing
}

void **__cudaRegisterFatBinary(void *binary) { return calloc(1, sizeof(void *)); }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) { free(handle); }
char __cudaInitModule(void **handle) { return 1; }
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t bytes,
                       int constant, int global) {}

void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int threads, uint3 *thread,
                            uint3 *block, dim3 *block_size, dim3 *grid_size, int *warp_size) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  Registered *entry = malloc(sizeof *entry);
  pthread_mutex_lock(&lock);
  *entry = (Registered){host, name, *bucket(host)};
  *bucket(host) = entry;
  pthread_mutex_unlock(&lock);
}

static const char *name_of(const void *function) {
  for (const Registered *entry = *bucket(function); entry; entry = entry->next)
    if (entry->function == function) return entry->name;
  return "unregistered kernel";
}

static cudaError_t launch(const void *function, dim3 grid, dim3 block, cudaStream_t stream) {
  count_launch();
  record((Event){.kind = KERNEL,
                 .name = name_of(function),
                 .stream = (uint64_t)stream,
                 .grid = {grid.x, grid.y, grid.z},
                 .block = {block.x, block.y, block.z}});
  return cudaSuccess;
}

// f<<<grid, block, shared, stream>>>(...) pushes the configuration. Then the host function of f pops it and launches f.
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
  if (depth == (int)(sizeof pushed / sizeof *pushed)) abort();
  pushed[depth++] = (Configuration){grid, block, shared, stream};
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  const Configuration *last = &pushed[--depth];
  *grid = last->grid;
  *block = last->block;
  *shared = last->shared;
  *(cudaStream_t *)stream = last->stream;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
  return launch(function, grid, block, stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream) {
  return launch(function, grid, block, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
  return launch(function, config->gridDim, config->blockDim, config->stream);
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
  return launch(kernel, grid, block, stream);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
  const Gpu *gpu = settings()->gpu;
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 10 * gpu->major + gpu->minor;
  attributes->maxDynamicSharedSizeBytes = gpu->shared_memory;
  return cudaSuccess;
}

// Return a device address for the variable `symbol`. The size of the variable is unknown, and no kernel needs it.
cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) { return cudaMalloc(address, 4096); }
