// Set the calling thread's last CUDA error, which cudaGetLastError returns once, and return this error.
#pragma once
#include <cuda_runtime_api.h>

cudaError_t fail(cudaError_t error);
