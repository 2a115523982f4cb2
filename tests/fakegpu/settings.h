// Which GPUs are emulated. Read once from environment variables; README.md lists them.
#pragma once
#include <stdbool.h>
#include <stddef.h>

#define MAX_GPUS 16

typedef struct {
  const char *key;  // value of FAKEGPU
  const char *name; // as CUDA reports it
  int major, minor; // compute capability
  int multiprocessors;
  int shared_memory; // largest of a block, in bytes
  int l2_bytes;
  int clock_khz, memory_clock_khz, bus_bits;
  double gib; // memory that CUDA reports
} Gpu;

typedef struct {
  const Gpu *gpu;
  size_t memory_bytes; // of one GPU
  int present;         // GPUs that NVML counts
  int usable;          // GPUs that CUDA counts
  bool slice;          // of a GPU that is divided (MIG)
  bool old_driver;     // CUDA refuses to start
  bool cudnn;
} Settings;

const Settings *settings(void);
