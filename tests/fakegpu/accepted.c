// Emulates, for every library, the functions that always have the same result: they only succeed, create an object
// whose address is all that matters, free such an object, or return a constant. NVIDIA's declarations are not needed,
// because success is 0 in every library and the other arguments are not read.
#include <stdlib.h>

#define SUCCEEDS(name)                                                                                                 \
  int name(void) { return 0; }
#define CREATES(name)                                                                                                  \
  int name(void **object) {                                                                                            \
    *object = malloc(1);                                                                                               \
    return 0;                                                                                                          \
  }
#define FREES(name)                                                                                                    \
  int name(void *object) {                                                                                             \
    free(object);                                                                                                      \
    return 0;                                                                                                          \
  }
#define RETURNS(name, number)                                                                                          \
  int name(int *result) {                                                                                              \
    *result = number;                                                                                                  \
    return 0;                                                                                                          \
  }

SUCCEEDS(cublasLtMatmulPreferenceSetAttribute)
SUCCEEDS(cublasSetSmCountTarget)
SUCCEEDS(cublasSetWorkspace_v2)
SUCCEEDS(cudnnBackendFinalize)
SUCCEEDS(cudnnBackendSetAttribute)
SUCCEEDS(cudaDeviceEnablePeerAccess)
SUCCEEDS(cudaEventQuery)
SUCCEEDS(cudaFuncSetAttribute)
SUCCEEDS(cudaHostRegister)
SUCCEEDS(cudaHostUnregister)
SUCCEEDS(cudaMemcpyToSymbol)
SUCCEEDS(cudaStreamDestroy) // frees nothing, so no later stream gets the same address in the record
SUCCEEDS(cudaStreamQuery)
SUCCEEDS(cudaThreadExchangeStreamCaptureMode)
SUCCEEDS(cuFuncSetAttribute)
SUCCEEDS(cuFuncSetCacheConfig)
SUCCEEDS(cuLibraryUnload)
SUCCEEDS(cuMemMap)
SUCCEEDS(cuMemSetAccess)
SUCCEEDS(cuModuleUnload)
SUCCEEDS(ncclCommAbort)
SUCCEEDS(ncclCommDeregister)
SUCCEEDS(ncclCommDestroy) // frees nothing, because torch's watchdog thread may still use the object
SUCCEEDS(ncclCommFinalize)
SUCCEEDS(ncclGroupEnd)
SUCCEEDS(ncclGroupStart)
SUCCEEDS(ncclRedOpDestroy)

CREATES(cublasLtMatmulPreferenceCreate)
CREATES(cudaEventCreate)
CREATES(cudaEventCreateWithFlags)
CREATES(cuLibraryLoadData)
CREATES(cuModuleLoad)
CREATES(cuModuleLoadData)
CREATES(cuModuleLoadDataEx)

FREES(cublasDestroy_v2)
FREES(cublasLtMatmulDescDestroy)
FREES(cublasLtMatmulPreferenceDestroy)
FREES(cublasLtMatrixLayoutDestroy)
FREES(cudaEventDestroy)
FREES(cudnnBackendDestroyDescriptor)

RETURNS(cudaDeviceCanAccessPeer, 1)
RETURNS(cudaOccupancyMaxActiveBlocksPerMultiprocessor, 2)
RETURNS(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, 2)
RETURNS(cuOccupancyMaxActiveBlocksPerMultiprocessor, 2)
RETURNS(cuOccupancyMaxActiveClusters, 1)
