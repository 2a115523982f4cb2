// Stands in for the driver's tables of functions by name, through which torch, Triton and NVIDIA's libraries find it. A name
// newer than the headers is printed, and not found; what cuda.h has is found, emulated (driver.c) or not (missing.c).
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>

// Of several versions of a function the newest counts.
static void *find(const char *name) {
  static const char *const VERSIONS[] = {"_v4", "_v3", "_v2", ""};
  char versioned[128];
  for (int i = 0; i < 4; i++) {
    snprintf(versioned, sizeof versioned, "%s%s", name, VERSIONS[i]);
    void *found = dlsym(RTLD_DEFAULT, versioned);
    if (found) return found;
  }
  fprintf(stderr, "fakegpu: %s was looked up and is unknown: a CUDA newer than cuda.h?\n", name);
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

// NVIDIA's profiler asks for undocumented tables first, and is content without.
CUresult cuGetExportTable(const void **table, const CUuuid *id) { return CUDA_ERROR_NOT_FOUND; }
