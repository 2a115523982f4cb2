#include "settings.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const Gpu GPUS[] = {
    {"h100", "NVIDIA H100 80GB HBM3", 9, 0, 132, 232448, 50 << 20, 1980000, 2619000, 5120, 79.1},
    {"a100-80gb", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 166912, 40 << 20, 1410000, 1593000, 5120, 79.15},
    {"a100-40gb", "NVIDIA A100-SXM4-40GB", 8, 0, 108, 166912, 40 << 20, 1410000, 1215000, 5120, 39.39},
    {"t4", "Tesla T4", 7, 5, 40, 65536, 4 << 20, 1590000, 5001000, 256, 14.56},
    {"a100-mig", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", 8, 0, 42, 166912, 20 << 20, 1410000, 1215000, 2560, 19.5},
};

static Settings chosen;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static double number(const char *name, double otherwise, double maximum) {
  const char *text = getenv(name);
  if (!text || !*text) return otherwise;
  char *end;
  double value = strtod(text, &end);
  if (*end || value < 0 || value > maximum) {
    fprintf(stderr, "fakegpu: %s: got '%s', expected a number from 0 to %g\n", name, text, maximum);
    exit(2);
  }
  return value;
}

static const Gpu *gpu(const char *key) {
  for (size_t i = 0; i < sizeof GPUS / sizeof *GPUS; i++)
    if (!strcmp(GPUS[i].key, key)) return &GPUS[i];
  fprintf(stderr, "fakegpu: FAKEGPU: got '%s', expected h100, a100-80gb, a100-40gb, t4 or a100-mig\n", key);
  exit(2);
}

// CUDA_VISIBLE_DEVICES limits the GPUs that CUDA counts, but not the GPUs that NVML counts. Only the number of GPUs in
// the variable matters, because all GPUs are equal.
static int visible(int present) {
  const char *list = getenv("CUDA_VISIBLE_DEVICES");
  if (!list) return present;
  if (!*list || *list == '-') return 0;
  int entries = 1;
  for (; *list; list++) entries += *list == ',';
  return entries < present ? entries : present;
}

static void read_environment(void) {
  const char *key = getenv("FAKEGPU");
  chosen.gpu = gpu(key && *key ? key : "h100");
  chosen.memory_bytes = (size_t)(number("FAKEGPU_GIB", chosen.gpu->gib, 4096) * (1ULL << 30));
  chosen.present = (int)number("FAKEGPU_COUNT", 1, MAX_GPUS);
  chosen.slice = strstr(chosen.gpu->name, " MIG ") != NULL;
  int allowed = visible(chosen.present);
  if (chosen.slice && allowed > 1) allowed = 1; // CUDA never uses more than one slice
  chosen.usable = (int)number("FAKEGPU_USABLE", allowed, chosen.present);
  chosen.old_driver = number("FAKEGPU_OLD_DRIVER", 0, 1) != 0;
  chosen.cudnn = number("FAKEGPU_CUDNN", 1, 1) != 0;
}

const Settings *settings(void) {
  pthread_once(&once, read_environment);
  return &chosen;
}
