// Stands in for calls that always end alike, of all libraries: they only succeed, make an object that is no more than its
// address, free one, or answer with one number. None needs NVIDIA's declarations: success is 0 everywhere, and nothing reads
// the other arguments.
#include <stdlib.h>

#define SUCCEEDS(name)                                                                                                 \
  int name(void) { return 0; }
#define MAKES(name)                                                                                                    \
  int name(void **object) {                                                                                            \
    *object = malloc(1);                                                                                               \
    return 0;                                                                                                          \
  }
#define FREES(name)                                                                                                    \
  int name(void *object) {                                                                                             \
    free(object);                                                                                                      \
    return 0;                                                                                                          \
  }
#define ANSWERS(name, number)                                                                                          \
  int name(int *answer) {                                                                                              \
    *answer = number;                                                                                                  \
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
SUCCEEDS(cudaStreamDestroy) // its name stays unique in the record
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
SUCCEEDS(ncclCommDestroy) // the watchdog may still ask
SUCCEEDS(ncclCommFinalize)
SUCCEEDS(ncclGroupEnd)
SUCCEEDS(ncclGroupStart)
SUCCEEDS(ncclRedOpDestroy)

MAKES(cublasLtMatmulPreferenceCreate)
MAKES(cudaEventCreate)
MAKES(cudaEventCreateWithFlags)
MAKES(cuLibraryLoadData)
MAKES(cuModuleLoad)
MAKES(cuModuleLoadData)
MAKES(cuModuleLoadDataEx)

FREES(cublasDestroy_v2)
FREES(cublasLtMatmulDescDestroy)
FREES(cublasLtMatmulPreferenceDestroy)
FREES(cublasLtMatrixLayoutDestroy)
FREES(cudaEventDestroy)
FREES(cudnnBackendDestroyDescriptor)

ANSWERS(cudaDeviceCanAccessPeer, 1)
ANSWERS(cudaOccupancyMaxActiveBlocksPerMultiprocessor, 2)
ANSWERS(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, 2)
ANSWERS(cuOccupancyMaxActiveBlocksPerMultiprocessor, 2)
ANSWERS(cuOccupancyMaxActiveClusters, 1)
