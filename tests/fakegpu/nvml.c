// Emulates NVML (libnvidia-ml.so.1), which counts the GPUs of a machine, even those that CUDA cannot use. There is no
// NVLink and no fabric. torch and this project use only the functions in this file. Any other function raises
// AttributeError or fails in dlsym, with its name in the message.
#include "settings.h"

#define SUCCESS 0
#define NOT_SUPPORTED 3
#define NO_PERMISSION 4

int nvmlInit(void) { return SUCCESS; }
int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = settings()->present;
  return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  *version = settings()->old_driver ? 12080 : 13000;
  return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  *device = (char *)0 + index + 1;
  return SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) { return nvmlDeviceGetHandleByIndex_v2(0, device); }

int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) {
  *count = 0;
  return settings()->slice ? NO_PERMISSION : SUCCESS; // as in a container that has a slice of a GPU
}

// Nothing is written, so the fabric's state in the caller's struct stays 0, "not supported".
int nvmlDeviceGetGpuFabricInfoV(void *device, void *information) { return SUCCESS; }

int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, void *type) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) { return NOT_SUPPORTED; }
