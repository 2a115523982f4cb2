// The record of what the program requested from its GPUs, in the order of the calls.
#pragma once
#include <stddef.h>
#include <stdint.h>

// recorder.py has the same order and the same struct.
enum EventKind {
  KERNEL,      // compiled into a library, such as torch's own
  MODULE,      // kernel of a module loaded at run time: Triton, NVRTC
  GEMM,        // cuBLAS, cuBLASLt
  COLLECTIVE,  // NCCL, including point-to-point
  COPY,
  FILL,        // memset
  SYNCHRONIZE, // the host waits for the device
  ALLOCATE,    // device memory
  FREE,
  REFUSED,     // an allocation for which the GPU had too little memory
  PINNED,      // an allocation of page-locked host memory
  SIGNAL,      // an event recorded on a stream
  WAIT,        // a stream waits for an event
  COMMUNICATOR // created by NCCL
};

typedef struct {
  int kind;
  int device;
  const char *name;
  uint64_t stream;
  uint64_t object;            // the CUDA event for SIGNAL and WAIT; the address for ALLOCATE and FREE
  uint32_t grid[3], block[3]; // for kernels
  double flops;               // for GEMM
  uint64_t bytes;             // for GEMM, bytes read and written; for COLLECTIVE, size of the larger buffer
  int ranks;                  // for COLLECTIVE and COMMUNICATOR
} Event;

// If recording is on, append the event, with the caller's current device.
void record(Event event);

// Count a kernel launch, even if recording is off.
void count_launch(void);
long fakegpu_launches(void);

int current_device(void);
void set_current_device(int device);
