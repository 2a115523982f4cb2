// Emulates cuDNN's graph interface, which torch uses for attention. One engine without a workspace supports every
// graph. The limits of the real cuDNN's engines and their use of memory are not emulated. With FAKEGPU_CUDNN=0, cuDNN
// fails to start, as if it were not installed.
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

// There is one engine and one configuration, without notes and with zero bytes of workspace. A plan's JSON is "{}".
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t requested, int64_t *count,
                                       void *values) {
  int64_t available = 0;
  switch (name) {
  case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
  case CUDNN_ATTR_ENGINEHEUR_RESULTS:
  case CUDNN_ATTR_ENGINECFG_ENGINE:
  case CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE:
  case CUDNN_ATTR_ENGINECFG_SHARED_MEMORY_USED:
  case CUDNN_ATTR_ENGINE_GLOBAL_INDEX: available = 1; break;
  case CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION: available = sizeof "{}"; break;
  default: break;
  }
  if (count) *count = available;
  if (!values || requested < available || !available) return CUDNN_STATUS_SUCCESS;
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
