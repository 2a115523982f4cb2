// The calling thread's last CUDA error, which cudaGetLastError returns once.
#pragma once
#include <cuda_runtime_api.h>

cudaError_t fail(cudaError_t error);
