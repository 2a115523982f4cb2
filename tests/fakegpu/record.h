// The record of what the program asked of its GPUs, in the order of the calls.
#pragma once
#include <stddef.h>
#include <stdint.h>

// recorder.py mirrors this order and this struct.
enum EventKind {
  KERNEL,      // compiled into a library, such as torch's own
  MODULE,      // kernel of a module loaded at run time: Triton, NVRTC
  GEMM,        // cuBLAS, cuBLASLt
  COLLECTIVE,  // NCCL, point-to-point included
  COPY,
  FILL,        // memset
  SYNCHRONIZE, // the host waits for the device
  ALLOCATE,    // device memory
  FREE,
  REFUSED,     // an allocation beyond the GPU's memory
  PINNED,      // an allocation of page-locked host memory
  SIGNAL,      // an event recorded on a stream
  WAIT,        // a stream waits for an event
  COMMUNICATOR // made by NCCL
};

typedef struct {
  int kind;
  int device;
  const char *name;
  uint64_t stream;
  uint64_t object;            // the CUDA event of SIGNAL and WAIT; the address of ALLOCATE and FREE
  uint32_t grid[3], block[3]; // of kernels
  double flops;               // of GEMM
  uint64_t bytes;             // GEMM: read and written; COLLECTIVE: the larger of its two buffers
  int ranks;                  // of COLLECTIVE and COMMUNICATOR
} Event;

// Append to the record if it is on; the device is the caller's current one.
void record(Event event);

// Count a kernel launch, recorded or not.
void count_launch(void);
long fakegpu_launches(void);

int current_device(void);
void set_current_device(int device);
