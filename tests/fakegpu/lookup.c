// Emulates the driver's lookup of functions by name, which torch, Triton and NVIDIA's libraries use. Every function in
// cuda.h is found, whether it is emulated (driver.c) or not (missing.c). A newer function is not found, and its name is
// printed.
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>

// Return the newest version of a function.
static void *find(const char *name) {
  static const char *const VERSIONS[] = {"_v4", "_v3", "_v2", ""};
  char versioned[128];
  for (int i = 0; i < 4; i++) {
    snprintf(versioned, sizeof versioned, "%s%s", name, VERSIONS[i]);
    void *function = dlsym(RTLD_DEFAULT, versioned);
    if (function) return function;
  }
  fprintf(stderr, "fakegpu: %s was looked up and is unknown; is this CUDA newer than cuda.h?\n", name);
  return NULL;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  *function = find(name);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *result) {
  *function = find(name);
  if (result) *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// NVIDIA's profiler requests undocumented tables when it starts, but does not need them.
CUresult cuGetExportTable(const void **table, const CUuuid *id) { return CUDA_ERROR_NOT_FOUND; }
