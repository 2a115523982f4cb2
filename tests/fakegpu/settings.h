// The settings of the emulated GPUs. They are read once from environment variables, which README.md lists.
#pragma once
#include <stdbool.h>
#include <stddef.h>

#define MAX_GPUS 16

typedef struct {
  const char *key;  // value of FAKEGPU
  const char *name; // as CUDA reports it
  int major, minor; // compute capability
  int multiprocessors;
  int shared_memory; // the most that a block can use, in bytes
  int l2_bytes;
  int clock_khz, memory_clock_khz, bus_bits;
  double gib; // memory that CUDA reports
} Gpu;

typedef struct {
  const Gpu *gpu;
  size_t memory_bytes; // of one GPU
  int present;         // GPUs that NVML counts
  int usable;          // GPUs that CUDA counts
  bool slice;          // each GPU is a slice of a divided GPU (MIG)
  bool old_driver;     // CUDA cannot start
  bool cudnn;          // cuDNN can start
} Settings;

const Settings *settings(void);
