// Emulates the memory of the GPUs. Device addresses are reserved without access: a process that reads such an address
// on the host crashes, as on a real GPU, and a message says why. A second reservation of the same size holds the bytes
// of small copies, so a value that a program copies to the device and back, such as a step count, is preserved. Kernels
// change nothing.
#define _GNU_SOURCE
#include "device_memory.h"

#include "record.h"
#include "settings.h"

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SPACE (1ULL << 44) // 16 TiB of addresses; torch's expandable segments reserve 90 GiB each
#define PAGE (2ULL << 20)  // a GPU's large page

typedef struct {
  char *start;
  size_t bytes;
  int device;
  const char *function; // the function that allocated the block
  bool released;
} Block;

static char *base, *mirror;
static size_t reserved;
static Block *blocks; // sorted by address
static size_t block_count, block_capacity;
static size_t used[MAX_GPUS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction previous_action; // the earlier handler of SIGSEGV

static Block *block_of(const char *address) {
  size_t low = 0, high = block_count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (blocks[middle].start + blocks[middle].bytes <= address) low = middle + 1;
    else high = middle;
  }
  return low < block_count && blocks[low].start <= address ? &blocks[low] : NULL;
}

// Print the address that was accessed. Then restore the previous handler and return, which repeats the invalid access.
static void explain(int number, siginfo_t *info, void *context) {
  (void)context;
  if (on_device(info->si_addr)) {
    const Block *block = block_of(info->si_addr);
    char text[256];
    int length = snprintf(text, sizeof text, "fakegpu: host access to device memory at %p", info->si_addr);
    if (block)
      length += snprintf(text + length, sizeof text - length, ", byte %zu of %zu %s by %s",
                         (size_t)((char *)info->si_addr - block->start), block->bytes,
                         block->released ? "freed, once allocated" : "allocated", block->function);
    text[length++] = '\n';
    if (write(STDERR_FILENO, text, length) < 0) abort();
  }
  sigaction(number, &previous_action, NULL);
}

static char *map(int access) {
  char *start = mmap(NULL, SPACE, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) {
    perror("fakegpu: cannot reserve 16 TiB of addresses (ulimit -v? vm.overcommit_memory=2?)");
    abort();
  }
  return start;
}

// Called by the first allocation and not at the start, because the driver is preloaded into every process, even gcc.
static void open_space(void) {
  base = map(PROT_NONE);
  mirror = map(PROT_READ | PROT_WRITE);
  struct sigaction action = {.sa_sigaction = explain, .sa_flags = SA_SIGINFO};
  sigaction(SIGSEGV, &action, &previous_action);
}

void *reserve(size_t bytes, const char *function) {
  size_t page_bytes = (bytes + PAGE - 1) / PAGE * PAGE;
  pthread_mutex_lock(&lock);
  if (!base) open_space();
  if (reserved + page_bytes > SPACE) {
    fprintf(stderr, "fakegpu: 16 TiB of device addresses are used up\n");
    abort();
  }
  if (block_count == block_capacity) {
    block_capacity = block_capacity ? 2 * block_capacity : 1024;
    blocks = realloc(blocks, block_capacity * sizeof *blocks);
    if (!blocks) abort();
  }
  char *start = base + reserved;
  blocks[block_count++] =
      (Block){.start = start, .bytes = page_bytes, .device = current_device(), .function = function};
  reserved += page_bytes;
  pthread_mutex_unlock(&lock);
  return start;
}

void discard(const void *start, size_t bytes) { madvise(contents(start), bytes, MADV_DONTNEED); }

size_t release(const void *start, int *device) {
  pthread_mutex_lock(&lock);
  Block *block = block_of(start);
  size_t bytes = 0;
  if (block && block->start == start && !block->released) {
    block->released = true;
    bytes = block->bytes;
    *device = block->device;
  }
  pthread_mutex_unlock(&lock);
  if (bytes) discard(start, bytes);
  return bytes;
}

bool charge(int device, size_t bytes) {
  pthread_mutex_lock(&lock);
  bool fits = used[device] + bytes <= settings()->memory_bytes;
  if (fits) used[device] += bytes;
  pthread_mutex_unlock(&lock);
  if (!fits) record((Event){.kind = REFUSED, .name = "out of memory", .bytes = bytes});
  return fits;
}

void refund(int device, size_t bytes) {
  pthread_mutex_lock(&lock);
  used[device] -= bytes;
  pthread_mutex_unlock(&lock);
}

size_t used_bytes(int device) { return used[device]; }

bool on_device(const void *address) { return base && (char *)address >= base && (char *)address < base + SPACE; }

void *contents(const void *address) {
  return on_device(address) ? mirror + ((char *)address - base) : (void *)address;
}

static __thread const char *result;
static __thread size_t result_bytes;
static __thread long result_launches;

void keep_result(const void *start, size_t bytes) {
  result = start;
  result_bytes = bytes;
  result_launches = fakegpu_launches();
}

bool is_result(const void *address) {
  return result_launches == fakegpu_launches() && (char *)address >= result && (char *)address < result + result_bytes;
}
