// Stands in for cuDNN's graph interface, which torch uses for attention. Every graph is supported by one engine that needs no
// workspace; which graphs the real one supports, and how much memory it takes, is not known here. With FAKEGPU_CUDNN=0
// cuDNN fails to start, as where it is not installed.
#include "record.h"
#include "settings.h"

#include <cudnn.h>
#include <stdlib.h>
#include <string.h>

struct cudnnContext {
  cudaStream_t stream;
};

size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion(void) { return CUDART_VERSION; }

cudnnStatus_t cudnnGetProperty(libraryPropertyType which, int *value) {
  *value = which == MAJOR_VERSION ? CUDNN_MAJOR : which == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
  return CUDNN_STATUS_SUCCESS;
}

const char *cudnnGetErrorString(cudnnStatus_t status) { return status ? "not initialized" : "success"; }
void cudnnGetLastErrorString(char *message, size_t length) { message[0] = '\0'; }

cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) {
  *handle = calloc(1, sizeof **handle);
  return settings()->cudnn ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_NOT_INITIALIZED;
}

cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t *stream) {
  *stream = handle->stream;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *descriptor) {
  *descriptor = malloc(1);
  return CUDNN_STATUS_SUCCESS;
}

// One engine, one configuration, no notes, zero bytes of workspace; a plan as JSON is "{}".
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t wanted, int64_t *count, void *values) {
  int64_t have = 0;
  switch (name) {
  case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
  case CUDNN_ATTR_ENGINEHEUR_RESULTS:
  case CUDNN_ATTR_ENGINECFG_ENGINE:
  case CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE:
  case CUDNN_ATTR_ENGINECFG_SHARED_MEMORY_USED:
  case CUDNN_ATTR_ENGINE_GLOBAL_INDEX: have = 1; break;
  case CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION: have = sizeof "{}"; break;
  default: break;
  }
  if (count) *count = have;
  if (!values || wanted < have || !have) return CUDNN_STATUS_SUCCESS;
  if (name == CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION) memcpy(values, "{}", sizeof "{}");
  else if (type == CUDNN_TYPE_INT64) *(int64_t *)values = 0;
  else if (type == CUDNN_TYPE_INT32) *(int32_t *)values = 0;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack) {
  count_launch();
  record((Event){.kind = KERNEL, .name = "cudnnBackendExecute", .stream = (uint64_t)handle->stream});
  return CUDNN_STATUS_SUCCESS;
}
