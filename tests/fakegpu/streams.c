// Emulates streams and CUDA events. All work is complete as soon as it is submitted, so nothing really waits. The
// record only says which stream would wait for which event. Nothing is ever captured into a CUDA graph. The time
// between two events is always one millisecond.
#include "error.h"
#include "record.h"

#include <stdlib.h>

struct CUstream_st {
  int priority;
};

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  *stream = malloc(sizeof **stream);
  (*stream)->priority = priority;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = stream ? stream->priority : 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  record((Event){.kind = SYNCHRONIZE, .name = "cudaStreamSynchronize", .stream = (uint64_t)stream});
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
  record((Event){.kind = SYNCHRONIZE, .name = "cudaDeviceSynchronize"});
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  record((Event){
      .kind = WAIT, .name = "cudaStreamWaitEvent", .stream = (uint64_t)stream, .object = (uint64_t)event});
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
  function(data);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (count) *count = 0;
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  record((Event){.kind = SIGNAL, .name = "cudaEventRecord", .stream = (uint64_t)stream, .object = (uint64_t)event});
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  record((Event){.kind = SYNCHRONIZE, .name = "cudaEventSynchronize", .object = (uint64_t)event});
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
  *milliseconds = 1.0f;
  return cudaSuccess;
}
